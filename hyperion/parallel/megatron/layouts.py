"""Layouts of ranks in megatron-core, and its order of weights. This module needs no megatron-core."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperion.models.llama import LlamaShape, layer_shapes


@dataclass(frozen=True)
class MegatronLayout:
    """Layout of a training run in megatron-core: how its work is divided among ranks.

    `tensor` · `pipeline` ranks form a replica of the model. With more ranks, there are several replicas (data parallelism).

    Args:
        tensor: number of ranks that share each matrix.
        pipeline: number of stages, each with an equal part of the layers.
        sequence: whether sequence parallelism is used: the ranks that share matrices also divide the norms and residuals along
            the sequence.
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
    """Return the number of parameters of a rank of a Llama without biases.

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


def interleaved_qkv(weights: Mapping[str, Tensor], prefix: str, groups: int, kind: str = "weight") -> Tensor:
    """Return the weights of queries, keys and values as one matrix, or their biases as one vector, in megatron-core's order.

    The rows are grouped by key-value head: first the rows of its query heads, then those of its key, then those of its value. If
    the rows are divided among ranks, each rank therefore gets whole heads.

    Args:
        weights: the state dict of a LlamaForCausalLM.
        prefix: prefix of the names, such as "model.layers.0.self_attn.".
        groups: number of key-value heads.
        kind: "weight" or "bias".
    """
    parts = [weights[f"{prefix}{name}_proj.{kind}"].chunk(groups) for name in ("q", "k", "v")]
    return torch.cat([torch.cat(group) for group in zip(*parts, strict=True)])


def rank_weights(
    weights: Mapping[str, Tensor], shape: LlamaShape, layout: MegatronLayout, stage: int, tensor_rank: int
) -> dict[str, Tensor]:
    """Return a rank's part of the weights of a Llama, as a dict with megatron-core's names.

    Args:
        weights: the state dict of a LlamaForCausalLM, or of a Qwen2ForCausalLM, which has biases of queries, keys and values.
        shape: shape of the Llama, with untied embeddings.
        layout: layout of the ranks.
        stage: stage of the rank, from 0.
        tensor_rank: number of the rank among the ranks that share each matrix.
    """

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(layout.tensor, dim=0)[tensor_rank]

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(layout.tensor, dim=1)[tensor_rank]

    part = {"embedding.word_embeddings.weight": rows(weights["model.embed_tokens.weight"])} if stage == 0 else {}
    for local, of in enumerate(_stage_prefixes(shape, layout, stage)):
        to = f"decoder.layers.{local}."
        part[to + "input_layernorm.weight"] = weights[of + "input_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{of}self_attn.q_proj.{kind}" in weights:
                qkv = interleaved_qkv(weights, of + "self_attn.", shape.num_key_value_heads, kind)
                part[f"{to}self_attention.linear_qkv.{kind}"] = rows(qkv)
        part[to + "self_attention.linear_proj.weight"] = columns(weights[of + "self_attn.o_proj.weight"])
        part[to + "pre_mlp_layernorm.weight"] = weights[of + "post_attention_layernorm.weight"]
        # linear_fc1 contains the rank's part of the gate projection, followed by its part of the up projection.
        pair = [rows(weights[of + f"mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        part[to + "mlp.linear_fc1.weight"] = torch.cat(pair)
        part[to + "mlp.linear_fc2.weight"] = columns(weights[of + "mlp.down_proj.weight"])
    if stage == layout.pipeline - 1:
        part["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        part["output_layer.weight"] = rows(weights["lm_head.weight"])
    return part


def joined_weights(
    parts: Mapping[tuple[int, int], Mapping[str, Tensor]], shape: LlamaShape, layout: MegatronLayout
) -> dict[str, Tensor]:
    """Return the state dict of a LlamaForCausalLM from the parts of all ranks. This reverses `rank_weights`.

    Args:
        parts: the part of each rank. The key is (stage, number of the rank among the ranks that share each matrix).
        shape, layout: as in `rank_weights`.
    """
    weights = {}
    for stage in range(layout.pipeline):
        ranks = [parts[stage, rank] for rank in range(layout.tensor)]

        def rows(name: str, ranks: list = ranks) -> Tensor:
            return torch.cat([part[name] for part in ranks])

        def columns(name: str, ranks: list = ranks) -> Tensor:
            return torch.cat([part[name] for part in ranks], dim=1)

        if stage == 0:
            weights["model.embed_tokens.weight"] = rows("embedding.word_embeddings.weight")
        for local, to in enumerate(_stage_prefixes(shape, layout, stage)):
            of = f"decoder.layers.{local}."
            weights[to + "input_layernorm.weight"] = ranks[0][of + "input_layernorm.weight"]
            queries = shape.num_attention_heads // shape.num_key_value_heads
            for kind in ("weight", "bias"):
                if (name := f"{of}self_attention.linear_qkv.{kind}") not in ranks[0]:
                    continue
                qkv = rows(name)
                group = qkv.view(shape.num_key_value_heads, queries + 2, -1, *qkv.shape[1:])  # queries, key, value of a group
                for letter, heads in (("q", group[:, :queries]), ("k", group[:, queries]), ("v", group[:, queries + 1])):
                    weights[f"{to}self_attn.{letter}_proj.{kind}"] = heads.reshape(-1, *qkv.shape[1:])
            weights[to + "self_attn.o_proj.weight"] = columns(of + "self_attention.linear_proj.weight")
            weights[to + "post_attention_layernorm.weight"] = ranks[0][of + "pre_mlp_layernorm.weight"]
            pairs = [part[of + "mlp.linear_fc1.weight"].chunk(2) for part in ranks]
            for place, name in enumerate(("gate", "up")):
                weights[f"{to}mlp.{name}_proj.weight"] = torch.cat([pair[place] for pair in pairs])
            weights[to + "mlp.down_proj.weight"] = columns(of + "mlp.linear_fc2.weight")
        if stage == layout.pipeline - 1:
            weights["model.norm.weight"] = ranks[0]["decoder.final_layernorm.weight"]
            weights["lm_head.weight"] = rows("output_layer.weight")
    return weights


def _stage_prefixes(shape: LlamaShape, layout: MegatronLayout, stage: int) -> list[str]:
    """Return the prefixes of a stage's layers in the names of a LlamaForCausalLM."""
    layers = shape.num_hidden_layers // layout.pipeline
    return [f"model.layers.{stage * layers + local}." for local in range(layers)]
