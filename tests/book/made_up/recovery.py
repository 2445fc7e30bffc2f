"""Rows of faults and recoveries that no machine measured: test data, valid by every rule of a row."""

import numpy as np
import pandas as pd

from hyperion.results import Row
from tests.book.made_up.learning import CORE

_MAY_LOSE = {"SIGTERM": 0, "SIGKILL": 3, "power cut": 6, "NaN": 3, "full disk": 3}
_PHASES = ("loader", "forward", "backward", "optimizer", "evaluation", "save")


def recovery_chapters():
    """(notebook, experiment, rows, samples) of the part of chapter 2.2 on what must not change."""
    yield CORE, "recovery", _rows(), _trials()
    yield CORE, "parity_ladder", _ladder_rows(), _ladder_curves()


def _trials():
    return pd.DataFrame(
        [
            {"kind": kind, "phase": phase, "step": 7, "moment": 0.5, "lost": most // 2, "recovered": True}
            for kind, most in _MAY_LOSE.items()
            for phase in (("save",) if kind == "full disk" else _PHASES)
        ]
    )


def _rows():
    return [
        Row(
            notebook=CORE,
            experiment="recovery",
            variant=kind,
            metric="steps_lost",
            value=most // 2,
            dtype="fp32",
            params={"device": "cpu", "seed": 0, "steps": 14, "checkpoint_every": 3, "may_lose": most},
            check="the most that may be lost",
            check_error=most // 2,
            check_tolerance=most,
        )
        for kind, most in _MAY_LOSE.items()
    ]


_LADDER = {
    "again": (0, 0),
    "accumulated": (1.4e-7, 1e-4),
    "bf16": (9e-5, 3e-2),
    "checkpointed": (0, 0),
    "compiled": (1.7e-4, 1e-2),
    "resumed": (0, 0),
}


def _ladder_rows():
    return [
        Row(
            notebook=CORE,
            experiment="parity_ladder",
            variant=name,
            metric="relative_difference",
            value=value,
            dtype="bf16",
            params={"what": "training loss", "beside": "the rung before", "steps": 30, "micro_batches": 4},
            n=30,
            check="losses of the rung before",
            check_error=value,
            check_tolerance=tolerance,
        )
        for name, (value, tolerance) in _LADDER.items()
    ]


def _ladder_curves():
    steps, apart = np.arange(1, 31), {"fp32": 0.0, "again": 0.0}
    for name, (value, _) in list(_LADDER.items())[1:]:
        apart[name] = max(value, list(apart.values())[-1])
    return pd.concat(
        [
            pd.DataFrame({"rung": name, "step": steps, "loss": 8 - 0.05 * steps + scale * np.sin(steps)})
            for name, scale in apart.items()
        ]
    )
