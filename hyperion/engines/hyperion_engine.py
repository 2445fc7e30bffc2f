"""This library's engine: LanguageEngine on one device, with DDP, or with FSDP2."""

import math
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work
from hyperion.models.llama import LlamaLM
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.training import LanguageEngine, Precision, adamw


def train(work: Work, observer: Observer, strategy: str = "single") -> dict:
    """Perform the work and return the record.

    Args:
        work: the training work.
        observer: observer of this rank.
        strategy: "single", "ddp" or "fsdp".
    """
    here = world()
    model = parallelize(LlamaLM(work.load_model()), ParallelPlan(strategy), here)
    optimizer = adamw(model, work.learning_rate, work.weight_decay, work.betas, work.eps)
    engine = LanguageEngine(
        model,
        optimizer,
        lambda step: work.learning_rate,
        Precision(work.dtype, "the work's format"),
        here.device,
        clip_norm=work.clip_norm or math.inf,
        micro_batches=work.micro_batches,
    )
    embedding = next(module for name, module in model.named_modules() if name.endswith("embed_tokens"))
    observer.start(engine, embedding, _state(model))
    for step in range(work.all_steps):
        rows_BT = work.whole_batch(step, here.rank, here.size, observer.device)
        metrics = engine.train_step((rows_BT[:, :-1], rows_BT[:, 1:]))
        observer.step(metrics.loss, metrics.gradient_norm, int(metrics.rank_items))
    # The copy of a large model to the host takes seconds, and a timed work writes no final state.
    return observer.finish({} if work.timed else _state(model))


def _state(model: Any) -> dict:
    """Return the full state dict with Hugging Face names on rank 0."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name.removeprefix("lm."): tensor for name, tensor in state.items()}
