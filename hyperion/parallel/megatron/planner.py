"""Which layouts can train a Llama? A layout is rejected if something cannot be divided equally, or if its state does not fit.

The state is that of training in bf16: a rank has 2 bytes for each of its parameters, 4 for its gradient, and 12 for the float32
copy and the moments of Adam. With the distributed optimizer, replicas divide the 12. Activations are not counted. So a
layout that is rejected cannot train, and a layout that is not rejected may still need a smaller batch or recomputation.
"""

from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters

_PARAMETER_BYTES, _OPTIMIZER_BYTES = 2 + 4, 4 + 8


def mixed_precision_bytes(shape: LlamaShape, layout: MegatronLayout, ranks: int) -> float:
    """Return the bytes of parameters, gradients and optimizer on the fullest rank, in bf16 with float32 copies.

    Args:
        shape: shape of the Llama, with untied embeddings.
        layout: layout of the ranks.
        ranks: number of ranks.
    """
    share = layout.tensor * layout.pipeline / ranks if layout.distributed_optimizer else 1
    fullest = max(rank_parameters(shape, layout, stage) for stage in range(layout.pipeline))
    return fullest * (_PARAMETER_BYTES + _OPTIMIZER_BYTES * share)


def why_rejected(shape: LlamaShape, layout: MegatronLayout, ranks: int, memory_bytes: float) -> str:
    """Return why a layout cannot train a Llama on some ranks, or "" if nothing speaks against it.

    megatron-core can also repeat key-value heads if there are more tensor-parallel ranks than such heads. This function rejects
    such layouts, because their ranks have more parameters than the formula says.

    Args:
        shape, layout, ranks: as in `mixed_precision_bytes`.
        memory_bytes: memory of a device.
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
    state = mixed_precision_bytes(shape, layout, ranks)
    return f"the state of {state / 2**30:.1f} GiB exceeds {memory_bytes / 2**30:g} GiB" if state > memory_bytes else ""


def smallest_layout(shape: LlamaShape, ranks: int, memory_bytes: float, node_ranks: int = 8) -> MegatronLayout | None:
    """Return the layout with the fewest ranks of a replica that is not rejected, or None.

    Fewer ranks of a replica communicate less. Among equal numbers, the layout with fewer stages is chosen, which has no bubble.

    Args:
        shape, ranks, memory_bytes: as in `why_rejected`.
        node_ranks: number of devices of a node. Tensor parallelism stays inside a node.
    """
    candidates = [
        MegatronLayout(tensor, pipeline, sequence=tensor > 1, distributed_optimizer=True)
        for tensor in range(1, node_ranks + 1)
        for pipeline in range(1, ranks // tensor + 1)
    ]
    candidates.sort(key=lambda layout: (layout.tensor * layout.pipeline, layout.pipeline))
    return next((layout for layout in candidates if not why_rejected(shape, layout, ranks, memory_bytes)), None)
