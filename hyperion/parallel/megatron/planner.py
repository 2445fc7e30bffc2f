"""Find the layouts of ranks that can train a Llama with megatron-core.

A layout is rejected if something cannot be divided equally, or if state and activations do not fit into the memory of a device.

The state is that of training in bf16: a rank has 2 bytes for each of its parameters, 4 for its gradient, and 12 for the float32
copy and the moments of Adam. With the distributed optimizer, the replicas divide these 12 bytes among themselves.

The activations are counted as in Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198, sections 4 and 5, for a Llama: it has no dropout, an MLP with three matrices, and fewer key-value heads. For
each token of a micro-batch, a layer of width h, with an MLP of width f, a heads and key-value heads of the total width k, stores
these bytes in bf16, on t tensor-parallel ranks and with sequences of length s:

    8h             inputs of the two norms, and inputs of the matrices for queries, keys and values and of the MLP
    (4h + 4k) / t  queries and the input of the output matrix; keys and values
    6f / t         two products of the MLP, and the input of its last matrix
    2as / t        scores of the attention, which a fused attention does not store

Sequence parallelism also divides the 8h by t. With full recomputation, a layer stores only its input of 2h bytes, which sequence
parallelism also divides by t. In addition, all activations of one layer exist at a time, while this layer is recomputed.

This is a lower bound. The norms and the activation function of the MLP are assumed to be fused. Without fusion, they store more:
the megatron-core that runs without CUDA stores 1.4 to 1.6 times as much, in the same number format.
Memory fragmentation, communication buffers and the memory of libraries are not counted. So a rejected layout cannot train with
these micro-batches if attention is not fused. A layout that just fits may still run out of memory.
"""

from dataclasses import dataclass

from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters
from hyperion.units import GIB

_PARAMETER_BYTES, _OPTIMIZER_BYTES = 2 + 4, 4 + 8


@dataclass(frozen=True)
class Batch:
    """Size of the micro-batches of a training run. A step is assumed to have at least as many micro-batches as stages.

    Args:
        sequence_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch.
        recompute: whether full recomputation is used: each layer stores only its input and is recomputed in the backward pass.
    """

    sequence_length: int
    micro_batch_size: int
    recompute: bool = False


def mixed_precision_bytes(shape: LlamaShape, layout: MegatronLayout, ranks: int) -> float:
    """Return the bytes of parameters, gradients and optimizer state on the fullest rank, for bf16 with float32 copies.

    Args:
        shape: shape of the Llama, with untied embeddings.
        layout: layout of the ranks.
        ranks: number of ranks.
    """
    return max(_state_bytes(shape, layout, stage, ranks) for stage in range(layout.pipeline))


def activation_bytes(shape: LlamaShape, layout: MegatronLayout, stage: int, batch: Batch) -> float:
    """Return the bytes of the activations on a rank of a stage, in bf16 with logits in float32.

    With the schedule 1F1B, a stage holds the activations of as many micro-batches as there are stages from it to the last one. So
    the first stage holds as much as all layers of one micro-batch, for any number of stages.

    Args:
        shape: shape of the Llama, with untied embeddings.
        layout: layout of the ranks.
        stage: stage of the rank, from 0. The last one has the last norm, the head and the logits of one micro-batch.
        batch: the micro-batches.
    """
    h, divided = shape.hidden_size, 1 / layout.tensor
    key_values = h * shape.num_key_value_heads / shape.num_attention_heads
    scores = shape.num_attention_heads * batch.sequence_length
    along_sequence = divided if layout.sequence else 1
    layer = 8 * h * along_sequence + (4 * h + 4 * key_values + 6 * shape.intermediate_size + 2 * scores) * divided
    stored, working = (2 * h * along_sequence, layer) if batch.recompute else (layer, 0)
    in_flight, layers = layout.pipeline - stage, shape.num_hidden_layers / layout.pipeline
    head = 4 * h * along_sequence + 4 * shape.vocab_size * divided if stage == layout.pipeline - 1 else 0
    return batch.micro_batch_size * batch.sequence_length * (in_flight * layers * stored + working + head)


def training_bytes(shape: LlamaShape, layout: MegatronLayout, ranks: int, batch: Batch) -> float:
    """Return the bytes of state and activations on the fullest rank.

    Args:
        shape, layout, ranks: as in `mixed_precision_bytes`.
        batch: the micro-batches.
    """
    return max(
        _state_bytes(shape, layout, stage, ranks) + activation_bytes(shape, layout, stage, batch)
        for stage in range(layout.pipeline)
    )


def why_rejected(shape: LlamaShape, layout: MegatronLayout, ranks: int, memory_bytes: float, batch: Batch) -> str:
    """Return why a layout cannot train a Llama on this number of ranks, or "" if no reason is known.

    With more tensor-parallel ranks than key-value heads, several ranks of megatron-core share such a head. This function rejects
    such layouts, because each of these ranks stores the key and the value, which is more than the formula says.

    Args:
        shape, layout, ranks: as in `mixed_precision_bytes`.
        memory_bytes: memory of a device.
        batch: the micro-batches.
    """
    parts = layout.tensor * layout.pipeline
    for number, what, among, of in (
        (ranks, "ranks", parts, "ranks of a replica"),
        (shape.num_attention_heads, "heads", layout.tensor, "tensor-parallel ranks"),
        (shape.num_key_value_heads, "key-value heads", layout.tensor, "tensor-parallel ranks"),
        (shape.intermediate_size, "columns of the MLP", layout.tensor, "tensor-parallel ranks"),
        (shape.vocab_size, "tokens of the vocabulary", layout.tensor, "tensor-parallel ranks"),
        (shape.num_hidden_layers, "layers", layout.pipeline, "stages"),
    ):
        if number % among:
            return f"{number} {what} cannot be divided by {among} {of}"
    needed = training_bytes(shape, layout, ranks, batch)
    if needed <= memory_bytes:
        return ""
    how = "with full recomputation" if batch.recompute else "without recomputation"
    alone = mixed_precision_bytes(shape, layout, ranks)
    return (
        f"state and activations need {needed / GIB:.1f} GiB {how}, which exceeds {memory_bytes / GIB:g} GiB; the state alone "
        f"needs {alone / GIB:.1f} GiB"
    )


def smallest_layout(
    shape: LlamaShape, ranks: int, memory_bytes: float, batch: Batch, node_ranks: int = 8
) -> MegatronLayout | None:
    """Return the possible layout with the fewest ranks per replica, or None if all layouts are rejected.

    A replica with fewer ranks communicates less. Of two layouts with equally many ranks, the one with fewer stages is returned,
    because it has a smaller bubble.

    Args:
        shape, ranks, memory_bytes, batch: as in `why_rejected`.
        node_ranks: number of devices of a node. Tensor parallelism stays inside a node.
    """
    candidates = [
        MegatronLayout(tensor, pipeline, sequence=tensor > 1, distributed_optimizer=True)
        for tensor in range(1, node_ranks + 1)
        for pipeline in range(1, ranks // tensor + 1)
    ]
    candidates.sort(key=lambda layout: (layout.tensor * layout.pipeline, layout.pipeline))
    return next((layout for layout in candidates if not why_rejected(shape, layout, ranks, memory_bytes, batch)), None)


def _state_bytes(shape: LlamaShape, layout: MegatronLayout, stage: int, ranks: int) -> float:
    share = layout.tensor * layout.pipeline / ranks if layout.distributed_optimizer else 1
    return rank_parameters(shape, layout, stage) * (_PARAMETER_BYTES + _OPTIMIZER_BYTES * share)
