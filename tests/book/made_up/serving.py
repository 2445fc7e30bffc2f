"""Rows of the chapter on serving that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.chapter.subjects import subjects
from hyperion.experiments.serving.metrics import GROWTH_CHECK
from hyperion.results import Row

CHAPTER = "13_serving"
SERVER = "transformers serve"
MEMORY = "resident memory of all processes"


def serving_chapters() -> list[tuple[str, str, list[Row], pd.DataFrame]]:
    """Chapter, experiment, rows and samples of the experiments that have figures, as a made-up run records them."""
    subjects()  # registers the metrics of serving
    answers = [
        _row("server_answers", SERVER, "count", 192.0, {"what": "tokens equal to generate"}, dtype="fp32"),
        _row("server_answers", "vllm", "count", None, {"what": "tokens equal to generate"}, dtype="fp32"),
    ]
    sizes = {tokens: 65536.0 * tokens for tokens in (256, 1024)}
    cache = [
        _row("kv_cache_memory", "tensors of the cache", "kv_cache_bytes", size, {"tokens": tokens}, predicted=size)
        for tokens, size in sizes.items()
    ]
    cache.append(_row("kv_cache_memory", "device memory", "kv_cache_bytes", None, {"tokens": 256}))
    soak = [
        _row("server_soak", MEMORY, "growth_bytes", 2048.0, {"requests": 100, "backend": SERVER}, tolerance=65536.0),
        _row("server_soak", "used device memory", "growth_bytes", None, {"requests": 100, "backend": SERVER}),
    ]
    readings = pd.DataFrame(
        {
            "backend": SERVER,
            "requests": range(1, 101),
            "fitted": [n > 20 for n in range(1, 101)],
            MEMORY: [1e9 + 2048.0 * n for n in range(1, 101)],
        }
    )
    samples = pd.DataFrame({"x": [1]})
    return [
        (CHAPTER, "server_answers", answers, samples),
        (CHAPTER, "kv_cache_memory", cache, samples),
        (CHAPTER, "server_load", load_rows(), samples),
        (CHAPTER, "server_soak", soak, readings),
    ]


def load_rows() -> list[Row]:
    """Rows of a server for one user and for 16 users, and in an open loop."""
    loops = [{"loop": "closed", "users": users, "requests": 100} for users in (1, 16)]
    loops.append({"loop": "open", "load": 0.5, "requests": 40})
    rows = []
    for place, params in enumerate(loops):
        rows.append(
            _row("server_load", SERVER, "output_tokens_per_s", 100.0 + 900 * place, params, predicted=120.0 * (1 + place))
        )
        for metric, value in (("ttft_s", 0.05), ("tpot_s", 0.01)):
            rows += [
                _row("server_load", SERVER, metric, (1 + place) * value * percent / 50, params | {"percentile": percent})
                for percent in (50, 95)
            ]
    return [*rows, _row("server_load", "vllm", "output_tokens_per_s", None, {"model": "made up"})]


def _row(
    experiment: str,
    variant: str,
    metric: str,
    value: float | None,
    params: dict,
    dtype: str = "bf16",
    tolerance: float = 0.0,
    predicted: float | None = None,
) -> Row:
    timed = {"n": 5, "ci_low": 0.9 * value, "ci_high": 1.1 * value} if value else {"value_reason": "unavailable: made up"}
    check = GROWTH_CHECK if metric == "growth_bytes" else "made up"
    checks = {"check": check, "check_error": 0.0, "check_tolerance": tolerance} if value else {}
    common = {"notebook": CHAPTER, "experiment": experiment, "dtype": dtype, "limit_source": "no limit: made up"}
    return Row(variant=variant, metric=metric, value=value, params=params, predicted=predicted, **common | timed | checks)
