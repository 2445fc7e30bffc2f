"""megatron-core: GPTModel with tensor, pipeline and data parallelism, and megatron-core's schedules and optimizer.

The imported package is a copy of the release that is adapted to run without CUDA.
"""

from torch import Tensor

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work
from hyperion.errors import HyperionError
from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import use_adapted


def train(work: Work, observer: Observer, tensor: int = 1, pipeline: int = 1, distributed_optimizer: bool = False) -> dict:
    """Perform the work and return the record.

    Args:
        work: the work, in float32.
        observer: observer of this rank.
        tensor, pipeline, distributed_optimizer: the layout; see `MegatronLayout`. On fewer ranks, `tensor` and `pipeline` are 1.

    Raises:
        HyperionError: the work is in bf16. megatron-core would round the initial state to bf16 and initialize its float32 weights
            with the rounded values.
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
    shape, config = _shape(work), work.config()
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    adam = gpt.Adam(work.learning_rate, work.weight_decay, *work.betas, epsilon=work.eps, clip_norm=work.clip_norm)
    with gpt.model_parallel(layout):
        model = gpt.build_gpt(shape, layout, work.sequence_length, config["rms_norm_eps"], theta)
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
        for step in range(work.steps):
            loss, norm = trainer.step(work.whole_batch(step, device=observer.device))
            observer.step(loss, norm, trainer.scored_tokens)
        return observer.finish(gpt.whole_weights(model, shape, layout))


def _shape(work: Work) -> LlamaShape:
    config = work.config()
    return LlamaShape(**{name: config[name] for name in LlamaShape.__dataclass_fields__})
