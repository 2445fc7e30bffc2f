"""Rows of a fine-tuning that no machine measured: test data, valid by every rule of a row."""

import numpy as np
import pandas as pd

from hyperion.results import Row

CHAPTER = "06_llama_lora"
_MODEL = {"model": "random_llama_1b", "parameters": 1_173_000_000}


def lora_rows(full: float | None = 21.6) -> list[Row]:
    """Losses before and after, memory of both methods; `full` None did not fit."""

    def row(variant, metric, value, experiment="llama_lora", **columns):
        return Row(notebook=CHAPTER, experiment=experiment, variant=variant, dtype="bf16", metric=metric, value=value, **columns)

    def loss(step, value):
        params = {"model": "random_llama_1b", "split": "held out", "tokens": "completion", "step": step}
        return row(
            "LoRA",
            "validation_loss",
            value,
            params=params,
            n=1470,
            ci_low=value - 0.1,
            ci_high=value + 0.1,
            limit_source="no limit: made up",
            predicted=11.3 if step == 0 else None,
            data_source="mirror",
        )

    def memory(variant, value, floor):
        if value is None:
            return row(variant, "peak_memory_gib", None, params=_MODEL, value_reason="out of memory: made up")
        return row(variant, "peak_memory_gib", value, params=_MODEL, limit=floor, limit_source="bytes", predicted=value * 1.1)

    parity = {"model": "random_llama_d512_l8", "what": "training loss", "ranks": 4, "steps": 20, "batch_size": 32}
    epoch = row("LoRA", "peak_memory_gib", 4.4, params={"epoch": 1, "step": 60}, limit_source="no limit: made up")
    return [
        loss(0, 11.31),
        loss(60, 8.2),
        epoch,
        memory("LoRA", 4.1, 2.3),
        memory("full fine-tuning", full, 17.5),
        row(
            "LoRA under FSDP2",
            "relative_difference",
            3e-7,
            experiment="lora_sharded",
            params=parity,
            check="one device",
            check_error=3e-7,
            check_tolerance=1e-4,
        ),
    ]


def lora_samples(random: np.random.Generator) -> dict[str, pd.DataFrame]:
    """Loss curves by experiment."""
    steps = np.arange(1, 61)
    losses = 8 + 3.3 * np.exp(-steps / 15) + 0.1 * random.standard_normal(60)
    alone = losses[:20]
    return {
        "llama_lora": pd.DataFrame({"kind": "step", "step": steps, "loss": losses}),
        "lora_sharded": pd.DataFrame({"kind": "step", "step": steps[:20], "alone": alone, "sharded": alone * (1 + 2e-7)}),
    }


def llama_chapter(random: np.random.Generator) -> list[tuple]:
    """(notebook, experiment, rows, samples) of both experiments."""
    samples = lora_samples(random)
    return [
        (CHAPTER, experiment, [row for row in lora_rows() if row.experiment == experiment], samples[experiment])
        for experiment in samples
    ]
