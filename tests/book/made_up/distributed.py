"""Rows of the distributed and scaling chapters that no machine measured: test data, valid by every rule of a row."""

import numpy as np
import pandas as pd

from hyperion.results import Row

DISTRIBUTED, SCALING = "05_distributed_training", "08_scaling_analysis"


def distributed_chapters(random):
    """(notebook, experiment, rows, samples) of chapters 2.5 and 2.8 on four ranks."""
    yield DISTRIBUTED, "parallel_parity", _parity_rows(), _parity_curves(random)
    yield DISTRIBUTED, "distributed_training", _rank_rows(), _training_curves(random)
    yield DISTRIBUTED, "resharding", _resharding_rows(), _resharding_curves(random)
    yield DISTRIBUTED, "rank_failure", _failure_rows(), _failure_curves(random)
    yield SCALING, "scaling", _scaling_rows(), pd.DataFrame({"time_s": [0.1]})


def _row(experiment, variant, metric, value, params, notebook=DISTRIBUTED, **columns):
    return Row(notebook=notebook, experiment=experiment, variant=variant, metric=metric, value=value, params=params, **columns)


def _parity_rows():
    params = {"what": "training loss", "model": "lm_test", "ranks": 4, "steps": 20}
    return [
        _row(
            "parallel_parity",
            name,
            "relative_difference",
            value,
            params,
            dtype="fp32",
            check="losses of one device",
            check_error=value,
            check_tolerance=1e-4,
        )
        for name, value in (("ddp", 2e-7), ("fsdp", 1.1e-6))
    ]


def _parity_curves(random):
    losses = 11 - 0.1 * np.arange(20)
    noise = {"single": 0.0, "ddp": 1e-7, "fsdp": 1e-6}
    return pd.concat(
        [
            pd.DataFrame({"strategy": name, "step": range(1, 21), "loss": losses * (1 + scale * random.random(20))})
            for name, scale in noise.items()
        ]
    )


def _rank_rows():
    shared = {"dtype": "bf16", "limit_source": "no limit: made up", "data_source": "mirror"}
    return [
        _row(
            "distributed_training", "lm_test_ddp", metric, value, {"strategy": "ddp", "ranks": 4, "epoch": 1}, rank=rank, **shared
        )
        for rank in range(4)
        for metric, value in (
            ("training_loss", 6 + 0.01 * rank),
            ("tokens_per_s", 9e4 + 1e3 * rank),
            ("peak_memory_gib", 9.5 + 0.1 * rank),
        )
    ]


def _training_curves(random):
    return pd.DataFrame({"training": "lm_test_ddp", "kind": "step", "step": range(1, 41), "loss": 10 - 0.1 * np.arange(40)})


def _resharding_rows():
    return [
        _row(
            "resharding",
            "fsdp",
            "relative_difference",
            4e-7,
            {"what": "next losses", "saved_by": 4, "resumed_by": ranks, "steps": 6},
            dtype="fp32",
            check="next losses",
            check_error=4e-7,
            check_tolerance=1e-4,
        )
        for ranks in (2, 1)
    ]


def _resharding_curves(random):
    losses = 11 - 0.1 * np.arange(12)
    return pd.concat([pd.DataFrame({"ranks": n, "step": range(1, 13), "loss": losses * (1 + 1e-7 * n)}) for n in (4, 2, 1)])


def _failure_rows():
    params = {"ranks": 4, "rank": 3, "signal": "SIGKILL"}
    return [
        _row(
            "rank_failure",
            "ddp",
            "detection_time_s",
            2.5,
            params,
            limit_source="no limit: made up",
            check="named",
            check_error=2.5,
            check_tolerance=60,
        )
    ]


def _failure_curves(random):
    losses = 11 - 0.1 * np.arange(12)
    return pd.concat([pd.DataFrame({"run": run, "step": range(1, 13), "loss": losses}) for run in ("resumed", "undisturbed")])


def _scaling_rows():
    rows = []
    for name, strategy, loss in (("language_ddp", "ddp", 0.02), ("language_fsdp", "fsdp", 0.05)):
        for mode in ("weak", "strong"):
            for ranks in (2, 4):
                efficiency = (1 - loss * ranks / 4) * (1 if mode == "weak" else 0.8)
                params = {"model": "lm_test", "strategy": strategy, "mode": mode, "ranks": ranks, "tokens": 1024}
                for metric, value in (
                    ("speedup", ranks * efficiency),
                    ("scaling_efficiency", efficiency),
                    ("communication_share", 1 - efficiency),
                ):
                    limit = {} if metric == "communication_share" else {"limit_source": "no limit: made up"}
                    rows.append(
                        _row(
                            "scaling",
                            name,
                            metric,
                            value,
                            params,
                            SCALING,
                            n=30,
                            ci_low=0.98 * value,
                            ci_high=1.02 * value,
                            dtype="bf16",
                            **limit,
                        )
                    )
            absent = {"model": "lm_test", "strategy": strategy, "mode": mode, "ranks": 8}
            rows.append(
                _row(
                    "scaling",
                    name,
                    "scaling_efficiency",
                    None,
                    absent,
                    SCALING,
                    dtype="bf16",
                    value_reason="this machine has 4 devices",
                    limit_source="no limit: made up",
                )
            )
    return rows
