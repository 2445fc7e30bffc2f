"""Synthetic results for tests of the form and of comparisons."""

import functools
from dataclasses import replace
from typing import Any

from hyperion.frameworks.parallelism import Parallelism
from hyperion.frameworks.result import GpuInfo, MemoryMetrics, ModelInfo, Result, TrainingConfig, derive
from hyperion.frameworks.shapes import MODELS
from hyperion.hardware import MachineFacts
from hyperion.hardware.facts import GpuFacts, collect_facts


def result(step_s: float = 0.5, steps: int = 20, jitter: float = 0.01, **changes: Any) -> Result:
    """A result of 8 GPUs whose step times alternate around `step_s`. `changes` are fields of the result or of its training."""
    times = tuple(step_s * (1 + jitter * (-1) ** step) for step in range(steps))
    training = TrainingConfig(
        steps, 64, 1, 2048, 8, "strategy", 8, "initial", "rows", "AdamW", (0.9, 0.95), 1e-8, 0.1, 1.0, "float32"
    )
    training = replace(training, **{name: changes.pop(name) for name in list(changes) if name in vars(training)})
    division = Parallelism("identical", 1, 1, training.num_gpus, training.gradient_accumulation_steps)
    values: dict[str, Any] = {
        "platform": "amd",
        "framework": "tran",
        "model": "llama",
        "dataset": "wikitext-2",
        "precision": "bf16",
        "learning_rates": (3e-4,) * steps,
        "loss_values": tuple(11.0 - 0.1 * step for step in range(steps)),
        **changes,
    }
    return Result(
        schema_version=1,
        timestamp="2026-01-01T00:00:00+00:00",
        source="observed",
        gpu_info=GpuInfo(training.num_gpus, "device", 192.0, 304, "2.11.0", "rocm", "7.0"),
        model_info=ModelInfo(MODELS["llama"].parameters, MODELS["llama"].parameters),
        parallelism_config=division,
        training_config=training,
        performance_metrics=derive(times, 1, training, 304),
        step_times=times,
        memory_metrics=MemoryMetrics("synthetic", peak_memory_allocated_gb=100.0),
        **values,
    )


@functools.cache
def machine(kind: str = "cpu", gpus: int = 0, memory_bytes: int = 192 * 10**9) -> MachineFacts:
    """Facts about a machine: this one, but with GPUs of the platform "amd" or "nvd", or with none."""
    gpu = GpuFacts("GPU", memory_bytes, 100, 9, 0, gcn_arch_name="gfx942" if kind == "amd" else None)
    versions = {"hip": "7.0" if kind == "amd" else None, "cuda": "13.0" if kind == "nvd" else None}
    return replace(collect_facts(), gpus=(gpu,) * gpus, gpu_error=None, **versions)
