"""One process of a recovery trial: a tiny run, undisturbed, with a fault planted, or gone on with after one."""

import hashlib
import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hyperion.checkpoints import CheckpointError
from hyperion.data.batches.loaders import LanguageBatches, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.experiments.baselines.recovery_faults import Fault, Phases
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    NonFiniteError,
    Plan,
    Precision,
    WarmupCosine,
    adamw,
    rng_state,
    seed_everything,
    sgd_nesterov,
    train,
)

EVERY = 3  # steps between checkpoints
STEPS = 14
EPOCH = 5  # steps
_VOCABULARY, _LENGTH, _BATCH = 31, 8, 8
_EXACT = Precision("fp32", "a check of exactness")


def in_own_process(**params) -> dict:
    """`run_once` in a process that sees no GPU: asking one for its random generator would make a context on it, in each of
    many processes.
    """
    os.environ.update({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"})
    return run_once(**params)


def run_once(
    folder: str, task: str, seed: int, fault: dict | None = None, moments: dict | None = None, watch: bool = False
) -> dict:
    """Train STEPS steps on the CPU, going on from what `folder` holds.

    Args:
        task: 'language' or 'images'.
        fault: the fields of a Fault; None for a run without.
        moments: of each phase, as an undisturbed run counted them (see Phases).
        watch: count the moments.

    Returns:
        "ended": 'finished' or what stopped it; then hashes of all that a run consists of, "resumed_at" and the moments.
    """
    torch.set_num_threads(1)
    seed_everything(seed)
    engine, batches, validation = {"language": _language, "images": _images}[task](seed)
    phases = Phases(engine, Fault(**fault) if fault else None, moments or {}, Path(folder) / "struck")
    if fault or watch:
        phases.plant(batches)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    plan = Plan(steps=STEPS, checkpoint_every=EVERY)
    try:
        history = train(engine, batches, plan, validation=validation, folder=Path(folder))
    except (NonFiniteError, CheckpointError) as error:
        return {"ended": f"{type(error).__name__}: {error.what}"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # the answer is a file too
    evaluations = [record.evaluation for record in history.epochs]
    parts = {
        "losses": [loss.hex() for loss in history.losses],
        "evaluations": [sorted((k, float(v).hex()) for k, v in numbers.items()) for numbers in evaluations if numbers],
        "weights": engine.model.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "sampler": batches.state_dict(),
        "generators": rng_state(),
    }
    hashes = {name: _hash(part) for name, part in parts.items()}
    resumed_at = history.resumed_at[-1] if history.resumed_at else 0
    return {"ended": "finished", "hashes": hashes, "resumed_at": resumed_at, "moments": phases.counted}


def _language(seed: int):
    tokens = np.random.default_rng(seed).integers(0, _VOCABULARY, _LENGTH + EPOCH * _BATCH * (_LENGTH + 1))
    batches = LanguageBatches(tokens, _LENGTH, _BATCH, seed)
    # With dropout the losses depend on the random generator.
    model = TransformerLM(TransformerConfig(_VOCABULARY, _LENGTH, width=16, heads=2, layers=2, dropout=0.2))
    engine = LanguageEngine(model, adamw(model, 3e-3), WarmupCosine(3e-3, 3, STEPS), _EXACT, detect_cpu())
    return engine, batches, lambda: evaluation_windows(tokens[:100], _LENGTH, _LENGTH, 0, 4)


def _images(seed: int):
    random = np.random.default_rng(seed)
    images, labels = random.integers(0, 256, (EPOCH * 8, 3, 32, 32), dtype=np.uint8), np.arange(EPOCH * 8) % 10
    scale = ([0.5] * 3, [0.25] * 3)
    batches = ImageBatches(images, labels, 8, scale, seed=seed, augment=("crop", "flip"))
    model = resnet18(width=2)
    engine = ImageEngine(model, sgd_nesterov(model, 0.05), WarmupCosine(0.05, 3, STEPS), _EXACT, detect_cpu())
    return engine, batches, lambda: ImageBatches(images[:16], labels[:16], 8, scale, shuffle=False)


def _hash(value) -> str:
    """sha256 of a nested value, each tensor by its bytes."""
    digest = hashlib.sha256()

    def told(item):
        if isinstance(item, Tensor):
            digest.update(item.detach().contiguous().cpu().view(-1).numpy().tobytes())
            return [str(item.dtype), list(item.shape)]
        raise TypeError(f"{type(item).__name__} in the state of a run")

    digest.update(json.dumps(value, default=told, sort_keys=True, allow_nan=True).encode())
    return digest.hexdigest()


def is_evaluated(step: int) -> bool:
    """Whether an evaluation comes after that step."""
    return step % EPOCH == 0 or step == STEPS


def is_saved(step: int) -> bool:
    """Whether a checkpoint comes after that step."""
    return step % EVERY == 0 or step == STEPS


def checkpoints_before(step: int) -> int:
    """Checkpoints that stand when that step begins."""
    return math.ceil(step / EVERY) - 1
