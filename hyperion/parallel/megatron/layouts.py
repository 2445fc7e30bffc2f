"""Layouts of ranks in megatron-core, and its order of weights. This module needs no megatron-core."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperion.models.llama import LlamaShape, layer_shapes


@dataclass(frozen=True)
class MegatronLayout:
    """How megatron-core divides a training among ranks. Ranks that remain form replicas (data parallelism).

    Args:
        tensor: number of ranks that share each matrix.
        pipeline: number of stages, each with an equal part of the layers.
        sequence: whether the ranks that share matrices also divide the norms and residuals along the sequence.
        distributed_optimizer: whether replicas divide the state of the optimizer.
        micro_batches: number of micro-batches of a step on each replica.
    """

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    distributed_optimizer: bool = False
    micro_batches: int = 1

    def name(self, ranks: int) -> str:
        """Return a short name, such as "TP 2 + SP", for a training on `ranks` ranks."""
        parts = [f"{letter} {size}" for letter, size in (("TP", self.tensor), ("PP", self.pipeline)) if size > 1]
        replicas = ranks // (self.tensor * self.pipeline)  # none if there are too few ranks
        parts += [f"DP {replicas}"] * (replicas > 1)
        parts += ["SP"] * self.sequence + ["distributed optimizer"] * self.distributed_optimizer
        return " + ".join(parts) or "one rank"


def rank_parameters(shape: LlamaShape, layout: MegatronLayout, stage: int) -> float:
    """Return the number of parameters of a rank.

    Args:
        shape: shape of the Llama, with untied embeddings.
        layout: layout of the ranks.
        stage: stage of the rank, from 0. The first stage has the embedding, the last one the last norm and the head.
    """
    D, layers = shape.hidden_size, shape.num_hidden_layers / layout.pipeline
    matrices = sum(d_in * d_out for d_in, d_out in layer_shapes(shape).values())
    end = shape.vocab_size * D / layout.tensor
    ends = end * (stage == 0) + (end + D) * (stage == layout.pipeline - 1)
    return layers * (matrices / layout.tensor + 2 * D) + ends


def rank_state_bytes(shape: LlamaShape, layout: MegatronLayout, stage: int, ranks: int) -> float:
    """Return the bytes of a rank's parameters, gradients and moments of Adam in float32.

    Args:
        shape, layout, stage: as in `rank_parameters`.
        ranks: number of ranks. Replicas divide the moments only with the distributed optimizer.
    """
    share = layout.tensor * layout.pipeline / ranks if layout.distributed_optimizer else 1
    return rank_parameters(shape, layout, stage) * (4 + 4 + 8 * share)


def interleaved_qkv(weights: Mapping[str, Tensor], prefix: str, groups: int) -> Tensor:
    """Return the weights of queries, keys and values as one matrix, in the order of megatron-core.

    For each key-value head, the matrix has the rows of its queries, then of its key, then of its value. So a part of the rows
    holds whole heads.

    Args:
        weights: the state dict of a LlamaForCausalLM.
        prefix: prefix of the names, such as "model.layers.0.self_attn.".
        groups: number of key-value heads.
    """
    parts = [weights[f"{prefix}{name}_proj.weight"].chunk(groups) for name in ("q", "k", "v")]
    return torch.cat([torch.cat(group) for group in zip(*parts, strict=True)])
