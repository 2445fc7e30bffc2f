"""Rows of a compilation that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.results import Row

CHAPTER = "07_compilation_optimization"
# milliseconds of a call, seconds of compiling, GiB in tensors and held, by mode
MODELS = {
    "resnet18_imagenet_stem": {
        "eager": (1.31, None, 0.031, 0.042),
        "default": (0.62, 14.2, 0.030, 0.041),
        "max-autotune": (0.28, 31.0, 0.023, 0.060),
        "reduce-overhead": (0.29, 15.1, 0.023, 0.060),
    },
    "lm_d768_h12_l4": {
        "eager": (0.95, None, 0.36, 0.41),
        "default": (0.83, 9.4, 0.33, 0.37),
        "max-autotune": (0.47, 41.0, 0.23, 0.44),
        "reduce-overhead": None,
    },
}
WEIGHTS_GIB = {"resnet18_imagenet_stem": 0.0208, "lm_d768_h12_l4": 0.125}


def compilation_rows() -> list[Row]:
    """All modes of two models on a GPU, one of them missing."""
    return [row for model, modes in MODELS.items() for mode, told in modes.items() for row in _rows(model, mode, told)]


def compilation_chapter() -> tuple[str, str, list[Row], pd.DataFrame]:
    """Chapter, experiment, rows and samples, as a made-up run records them."""
    return CHAPTER, "compilation", compilation_rows(), pd.DataFrame({"time_s": [1e-3]})


def _rows(model: str, mode: str, told: tuple | None) -> list[Row]:
    params = {"model": model, "batch": 32, "input": "some input", "weights": "initial, seed 0"}
    clock = params | {"clock": "wall, 20 calls in a row"}

    def row(metric, value, params=params, **columns):
        return Row(
            notebook=CHAPTER,
            experiment="compilation",
            variant=mode,
            dtype="bf16",
            metric=metric,
            value=value,
            params=params,
            **columns,
        )

    if told is None:
        return [row("inference_time_s", None, clock, value_reason="the compiler failed: made up")]
    milliseconds, compiling, tensors, held = told
    weights = {"limit": WEIGHTS_GIB[model], "limit_source": "the weights alone"}
    no_limit = {"limit_source": "no limit: made up"}
    rows = [
        row("inference_time_s", milliseconds / 1e3, clock, **_interval(milliseconds / 1e3), **no_limit),
        row("peak_memory_gib", tensors, **weights),
        row("reserved_memory_gib", held, **weights),
        row("relative_difference", 0.004, params | {"from": "float64"}, check="slice", check_error=0.004, check_tolerance=0.02),
    ]
    if compiling is None:
        return rows
    eager = MODELS[model]["eager"][0]
    speedup = eager / milliseconds
    return [
        *rows,
        row("speedup", speedup, clock, **_interval(speedup), **no_limit),
        row("break_even_calls", compiling / (eager - milliseconds) * 1e3),
        row("compile_time_s", compiling, params | {"cache": "cold"}),
        row("graph_breaks", 0, params | {"reasons": "none"}),
        row("relative_difference", 0.005, params | {"from": "eager"}, check="eager", check_error=0.005, check_tolerance=0.02),
    ]


def _interval(value: float) -> dict:
    return {"n": 60, "ci_low": 0.99 * value, "ci_high": 1.01 * value}
