"""The forecast of a rank's death is that of the row which tells it. (What a killed rank leaves: tests/processes.)"""

import numpy as np
import pandas as pd

from hyperion.experiments import rank_failure
from hyperion.experiments.context import Result
from hyperion.experiments.rank_failure import EXPERIMENT, RUNS
from hyperion.processes import RankError
from tests.experiments.toy import toy_context


def test_the_forecast_names_the_row_that_the_killed_rank_gets(tmp_path, monkeypatch):
    told = RankError("rank 1 was killed", rank=1, signal="SIGKILL")
    losses = pd.DataFrame({"run": np.repeat(RUNS, 3), "loss": [3.0, 2.0, 1.0] * 2})
    monkeypatch.setattr(rank_failure, "_killed", lambda *arguments: (told, 1.5, 0))
    monkeypatch.setattr(rank_failure, "run_on_ranks", lambda *arguments, ranks: [Result([], losses)] * ranks)
    context = toy_context("rank_failure", {"cpu_ranks": 2}, tmp_path)
    (forecast,) = EXPERIMENT.forecast(context)
    row = next(r for r in EXPERIMENT.run(context, lambda *report: None).rows if r.metric == forecast.metric)
    assert (forecast.variant, forecast.dtype, forecast.params) == (row.variant, row.dtype, row.params)
    assert row.params == {"ranks": 2, "rank": 1, "signal": "SIGKILL"} and row.rank is None
