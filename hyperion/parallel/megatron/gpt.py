"""A Llama as megatron-core's GPTModel: the layout of its ranks, its weights, and its training step.

Import this module only after `hyperion.parallel.megatron.release.use_adapted`, in a process with a process group.

Letters in shapes: B sequences, T tokens, V vocabulary, D width, F width of the MLP, H features of a head.
"""
# pyright: reportMissingImports=false

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout, joined_weights, rank_weights


@dataclass(frozen=True)
class Adam:
    """Options of AdamW. Tensors with one dimension have no weight decay."""

    learning_rate: float
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0


@contextlib.contextmanager
def model_parallel(layout: MegatronLayout) -> Iterator[None]:
    """Context manager that creates megatron-core's process groups for a layout, and destroys them on exit."""
    existing = set(_process_groups())
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # megatron-core only forgets its groups. With NCCL, each of them keeps a communicator, and after some hundred of them the
        # next one ends the process with a segmentation fault. Groups of gloo have to stay: see hyperion.processes.group.
        if dist.get_backend() == "nccl":
            torch.cuda.synchronize()
            for group in [group for group in _process_groups() if group not in existing]:
                dist.destroy_process_group(group)


def _process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this rank in the order of their creation."""
    return list(dist.distributed_c10d._world.pg_map)


def build_gpt(
    shape: LlamaShape,
    layout: MegatronLayout,
    length: int,
    norm_epsilon: float = 1e-6,
    rope_theta: float = 1e4,
    rope_factor: float | None = None,
    qkv_bias: bool = False,
) -> GPTModel:
    """Return this rank's part of a GPTModel with the architecture of a Llama, in float32. It uses no fused kernels.

    Args:
        shape: shape of the Llama, with untied embeddings.
        layout: layout of the ranks. `model_parallel` must have created its groups.
        length: largest number of tokens in a sequence.
        norm_epsilon: epsilon of the norms.
        rope_theta: base of the angles of the rotary embedding.
        rope_factor: factor by which the low frequencies of the rotary embedding are divided, as in Llama 3.1, or None.
        qkv_bias: whether queries, keys and values have biases, as in Qwen2.
    """
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The fused kernels are CUDA extensions or compiled functions.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.sequence,
        # This would call torch.cuda.synchronize after each transfer between stages.
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocab_size,
        max_sequence_length=length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=rope_theta,
        rope_scaling=rope_factor is not None,
        rope_scaling_factor=rope_factor or 1.0,
    )


def load_llama_weights(model: GPTModel, weights: Mapping[str, Tensor], shape: LlamaShape, layout: MegatronLayout) -> None:
    """Copy the weights of transformers' LlamaForCausalLM into this rank's part of the model.

    Args:
        model: the model of `build_gpt`.
        weights: the state dict of the LlamaForCausalLM, on every rank.
        shape, layout: shape and layout with which the model was built.
    """
    part = rank_weights(weights, shape, layout, *_place())
    known = dict(model.named_parameters())
    if set(part) != set(known):
        raise ValueError(f"the weights and the model differ in {sorted(set(part) ^ set(known))}")
    with torch.no_grad():
        for name, parameter in known.items():
            parameter.copy_(part[name])


def whole_weights(model: GPTModel, shape: LlamaShape, layout: MegatronLayout) -> dict[str, Tensor]:
    """Return the state dict of a LlamaForCausalLM with the weights of all ranks, on the CPU. It is empty on all ranks but 0.

    All ranks must call this function. The arguments are those of `load_llama_weights`.
    """
    mine = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((_place(), mine), found)
    # Replicas return equal keys and equal weights, so it does not matter which of them is kept.
    return joined_weights(dict(found), shape, layout) if found else {}


def _place() -> tuple[int, int]:
    """Return this rank's stage, and its number among the ranks that share each matrix."""
    return parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()


@dataclass
class MegatronTrainer:
    """A model with megatron-core's data parallelism, pipeline schedule and optimizer.

    Args:
        model: this rank's part of the model.
        layout: layout of the ranks.
        adam: options of the optimizer.
    """

    model: GPTModel
    layout: MegatronLayout
    adam: Adam
    wrapped: Any = field(init=False)
    optimizer: Any = field(init=False)
    # Targets that this rank scored in the last call of `gradients`; 0 on a rank that is not the last stage.
    scored_tokens: int = field(init=False, default=0)

    def __post_init__(self):
        sharded = self.layout.distributed_optimizer
        config = self.model.config
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=False)
        self.wrapped = DistributedDataParallel(config, wrapping, self.model)
        options = OptimizerConfig(
            optimizer="adam",
            lr=self.adam.learning_rate,
            weight_decay=self.adam.weight_decay,
            adam_beta1=self.adam.beta1,
            adam_beta2=self.adam.beta2,
            adam_eps=self.adam.epsilon,
            clip_grad=self.adam.clip_norm,
            use_distributed_optimizer=sharded,
        )
        self.optimizer = get_megatron_optimizer(options, [self.wrapped], get_standard_config_overrides(options))
        # The overrides exempt norms from weight decay, but only this scheduler applies them.
        rate, decay = self.adam.learning_rate, self.adam.weight_decay
        OptimizerParamScheduler(self.optimizer, rate, rate, 0.0, 0, 1, "constant", decay, decay, 1, "constant")
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

    def step(self, tokens_BT: Tensor) -> tuple[float | None, float]:
        """Do one optimizer step.

        Args:
            tokens_BT: token ids of the whole batch, on every rank. The inputs are all but the last token of a row, the targets
                all but the first.

        Returns:
            The mean loss of this rank's data-parallel part in nats (None on a rank that is not the last stage), and the norm of
            all gradients before clipping.
        """
        self.clear()
        loss = self.gradients(tokens_BT)
        _, norm, _ = self.optimizer.step()
        return loss, float(norm)

    def clear(self) -> None:
        """Set the gradients to zero."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients(self, tokens_BT: Tensor) -> float | None:
        """Run the schedule: all forward and backward passes of a batch, and the reduction of the gradients.

        The argument and the result are those of `step`.
        """
        mine_BT = tokens_BT.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        pieces = mine_BT.split(len(mine_BT) // self.layout.micro_batches)
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(pieces),
            model=[self.wrapped],
            num_microbatches=len(pieces),
            seq_length=mine_BT.shape[1] - 1,
            micro_batch_size=len(pieces[0]),
            forward_only=False,
        )
        self.scored_tokens = sum(count for _, count in losses)
        return torch.stack([loss for loss, _ in losses]).mean().item() if losses else None

    def state_bytes(self) -> int:
        """Return the bytes of the moments of Adam on this rank."""
        states = [one for optimizer in self.torch_optimizers() for one in optimizer.state.values()]
        return sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value) and value.ndim)

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of PyTorch, Apex or Transformer Engine inside megatron-core's optimizer."""
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [one.optimizer for one in chained]


def _forward_step(pieces: Iterator[Tensor], model: Any):
    """Compute the losses of the next micro-batch, in the form that megatron-core's schedules expect."""
    tokens_BT = next(pieces)
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:].contiguous()
    positions_BT = torch.arange(inputs_BT.shape[1], device=inputs_BT.device).expand_as(inputs_BT)
    output = model(inputs_BT.contiguous(), positions_BT, None, labels=targets_BT)

    def mean_loss(nll_BT: Tensor) -> tuple[Tensor, tuple[Tensor, int]]:
        loss = nll_BT.mean()
        # A copy, because the schedule divides the loss by the number of micro-batches in place.
        return loss, (loss.detach().clone(), nll_BT.numel())

    return output, mean_loss


def full_logits(model: GPTModel, inputs_BT: Tensor) -> Tensor | None:
    """Return the logits of the whole vocabulary, on all ranks of the last stage. None on the other ranks.

    All ranks must call this function with the same inputs.

    Args:
        model: this rank's part of the model, not wrapped.
        inputs_BT: token ids.

    Returns:
        logits_BTV in the dtype of the model.
    """
    positions_BT = torch.arange(inputs_BT.shape[1], device=inputs_BT.device).expand_as(inputs_BT)
    with torch.no_grad():
        previous = None
        if not model.pre_process:
            group = parallel_state.get_pipeline_model_parallel_group()
            ranks = parallel_state.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1
            previous = inputs_BT.new_empty(
                (inputs_BT.shape[1] // ranks, len(inputs_BT), model.config.hidden_size), dtype=model.config.params_dtype
            )
            dist.recv(previous, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
            model.set_input_tensor(previous)
        output = model(inputs_BT, positions_BT, None)
        if not model.post_process:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
            return None
        return tensor_parallel.gather_from_tensor_model_parallel_region(output)
