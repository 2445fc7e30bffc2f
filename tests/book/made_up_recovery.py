"""Rows of faults and recoveries that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.results import Row
from tests.book.made_up_learning import CORE

_MAY_LOSE = {"SIGTERM": 1, "SIGKILL": 3, "power cut": 6, "NaN": 3, "full disk": 3}
_PHASES = ("loader", "forward", "backward", "optimizer", "evaluation", "save")


def recovery_chapters():
    """(notebook, experiment, rows, samples) of the part of chapter 2.2 on what must not change."""
    yield CORE, "recovery", _rows(), _trials()


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
            notebook=CORE, experiment="recovery", variant=kind, metric="steps_lost", value=most // 2, dtype="fp32",
            params={"device": "cpu", "seed": 0, "steps": 14, "checkpoint_every": 3, "may_lose": most},
            check="the most that may be lost", check_error=most // 2,
            check_tolerance=most,
        )
        for kind, most in _MAY_LOSE.items()
    ]  # fmt: skip
