"""megatron-core: GPTModel with tensor, pipeline and data parallelism, and megatron-core's schedules and optimizer.

The imported package is a copy of the release that is adapted to run without CUDA.
"""

from typing import Any

from torch import Tensor

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work
from hyperion.errors import HyperionError
from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import use_adapted

# megatron-core has these values of the scaling of rotary frequencies as constants, and the factor as an option.
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def train(work: Work, observer: Observer, tensor: int = 1, pipeline: int = 1, distributed_optimizer: bool = False) -> dict:
    """Perform the work and return the record.

    Args:
        work: the work, in float32.
        observer: observer of this rank.
        tensor, pipeline, distributed_optimizer: the layout; see `MegatronLayout`. On fewer ranks, `tensor` and `pipeline` are 1.

    Raises:
        HyperionError: the work is in bf16, or its model has something that is not translated to megatron-core. With bf16,
            megatron-core would round the initial state and initialize its float32 weights with the rounded values.
    """
    if work.dtype != "fp32":
        raise HyperionError(
            f"the work is in {work.dtype}, but this adapter trains in fp32 only: megatron-core would start from rounded weights",
            where="hyperion/engines/megatron_core.py",
            next_step="leave megatron-core out of this comparison",
        )
    use_adapted()
    from hyperion.parallel.megatron import gpt

    ranks = observer.here.size
    if ranks < tensor * pipeline:
        tensor = pipeline = 1
    layout = MegatronLayout(tensor, pipeline, distributed_optimizer=distributed_optimizer, micro_batches=work.micro_batches)
    replicas = ranks // (tensor * pipeline)
    config = work.config()
    shape, theta, factor = _translated(config)
    adam = gpt.Adam(work.learning_rate, work.weight_decay, *work.betas, epsilon=work.eps, clip_norm=work.clip_norm)
    with gpt.model_parallel(layout):
        bias = config["model_type"] == "qwen2"
        model = gpt.build_gpt(shape, layout, work.sequence_length, config["rms_norm_eps"], theta, factor, bias)
        gpt.load_llama_weights(model, work.load_model().state_dict(), shape, layout)
        trainer = gpt.MegatronTrainer(model.to(observer.device), layout, adam)

        def own_share(parameter: Tensor) -> float:
            """Return 1 / n if n ranks hold the same values.

            Each rank of a tensor-parallel group holds all norms. Replicas hold the same values unless the optimizer divides them.
            """
            repeated = 1 if getattr(parameter, "tensor_model_parallel", False) else tensor
            return 1 / (repeated * (1 if distributed_optimizer else replicas))

        embedding = model.embedding.word_embeddings if model.pre_process else None
        state = gpt.whole_weights(model, shape, layout)
        observer.start(model, embedding, state, readers=tensor, own_share=own_share)
        for step in range(work.all_steps):
            loss, norm = trainer.step(work.whole_batch(step, device=observer.device))
            observer.step(loss, norm, trainer.scored_tokens)
        return observer.finish(gpt.whole_weights(model, shape, layout))


def _translated(config: dict[str, Any]) -> tuple[LlamaShape, float, float | None]:
    """Return (shape, base of the rotary angles, factor of their scaling or None) from a config.json of transformers.

    Raises:
        HyperionError: the model has something that is not translated. Without this check, another model would train.
    """
    rope = config.get("rope_parameters") or {**config, **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", "default")
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    faults = {
        f"model_type {config.get('model_type')!r}": config.get("model_type") not in ("llama", "qwen2"),
        "tied embeddings": config.get("tie_word_embeddings"),
        "biases": config.get("attention_bias") or config.get("mlp_bias"),
        f"activation {config.get('hidden_act')!r}": config.get("hidden_act") != "silu",
        "sliding windows": config.get("use_sliding_window"),
        "heads of another width": config["hidden_size"] != config["num_attention_heads"] * width,
        f"rope_type {kind!r}": kind not in ("default", "llama3"),
        "other values of rope_type 'llama3' than Llama 3.1": kind == "llama3" and _LLAMA_3.items() - rope.items(),
    }
    if found := [what for what, fault in faults.items() if fault]:
        raise HyperionError(
            f"the model has {', '.join(found)}, which this adapter does not translate to megatron-core",
            where="config.json of the work",
            next_step="leave megatron-core out of this comparison, or use another model",
        )
    shape = LlamaShape(**{name: config[name] for name in LlamaShape.__dataclass_fields__})
    return shape, rope["rope_theta"], float(rope["factor"]) if kind == "llama3" else None
