"""A failed experiment fails the chapter: the claims, and the cells of the notebook that check them."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

import hyperion
from hyperion.book import pick
from hyperion.chapter import experiment_named
from hyperion.experiments.serving import server_answers, server_load, server_soak
from hyperion.experiments.serving.backends import BACKENDS, UNAVAILABLE
from hyperion.experiments.serving.claims import value_claims
from hyperion.experiments.serving.client import Reply
from hyperion.experiments.serving.served_models import ServedModel
from hyperion.experiments.serving.server import ServerError
from hyperion.results import Row, Run
from tests.chapter.toy import toy_context
from tests.experiments.serving.test_experiments import LOAD, SIZES, SOAK

ROOT = Path(hyperion.__file__).resolve().parent.parent
ANSWERS = {"model": "toy", "dtypes": ["fp32"], "backends": ["toy"], "prompts": 3, "prompt_tokens": 4, "output_tokens": 2}
OPTIONS = {"server_answers": ANSWERS | {"server": SIZES}, "server_load": LOAD | {"backends": ["toy"]}, "server_soak": SOAK}
# The cell that checks an experiment, and the name of the result in it.
CELLS = {"server_answers": ("sv-08", "answers"), "server_load": ("sv-16", "load"), "server_soak": ("sv-22", "soak")}
REFERENCES = sorted(path.parent.name for path in ROOT.glob("results/reference/*/rows.csv") if "13_serving" in path.read_text())


@pytest.fixture
def no_server(tmp_path, monkeypatch):
    """A backend whose packages are installed and that does not start."""

    def fail(*args):
        raise ServerError("the server did not start: made up")

    monkeypatch.setitem(BACKENDS, "toy", dataclasses.replace(BACKENDS["vllm"], name="toy", packages=()))
    for module in (server_answers, server_load, server_soak):
        monkeypatch.setattr(module, "served_model", lambda *args: ServedModel("toy", tmp_path, "synthetic"))
        monkeypatch.setattr(module, "prompts_of", lambda *args: ["p"] * 9)
        monkeypatch.setattr(module, "running_server", fail)
    monkeypatch.setattr(server_answers, "reference_answers", lambda *args: [])


def checked_by_the_notebook(experiment: str, rows: list[Row]) -> list[str]:
    """Run the cells of the chapter that check an experiment, and return the claims that do not hold."""
    cells = json.loads((ROOT / "phase2_development/13_serving.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = {cell["id"]: "".join(cell["source"]) for cell in cells}
    failed: list[str] = []

    class Chapter:
        def expect(self, holds, otherwise):
            if not holds:
                failed.append(otherwise)

        expect_timing = expect

    cell, result = CELLS[experiment]
    # The first check imports the function for all cells.
    names = {"chapter": Chapter(), "pick": pick, "value_claims": value_claims, "teach": lambda *args, **rows: None, "pd": pd}
    exec(sources[cell], names | {result: dataclasses.make_dataclass("Result", ["rows"])(rows)})
    return failed


@pytest.mark.parametrize("experiment", CELLS)
def test_a_server_that_does_not_start_fails_the_chapter(experiment, no_server, tmp_path):
    rows = experiment_named(experiment).run(toy_context(experiment, OPTIONS[experiment], tmp_path), lambda *progress: None).rows
    assert any("did not start" in row.value_reason for row in rows)
    assert any("did not start" in claim for claim in checked_by_the_notebook(experiment, rows))


def test_a_soak_with_a_failed_request_fails_the_chapter(tmp_path):
    context = toy_context("server_soak", SOAK, tmp_path)
    options = server_soak.ServerSoakOptions.of(context)
    replies = [Reply(0.0, 1.0, error="made up"), *(Reply(0.0, 1.0, tokens=2) for _ in range(39))]
    rows = server_soak._soak_rows(context, options, replies, pd.DataFrame(), options.growth_bound_bytes)
    (claim,) = checked_by_the_notebook("server_soak", rows)
    assert "39 of 40 requests succeeded" in claim


def test_answers_of_a_server_that_does_not_batch_fail_the_chapter(tmp_path):
    params = {"what": server_answers.COMPARED}
    row = toy_context("server_answers", {}, tmp_path).absent_row("toy", "count", "refused: the log of toy", params=params)
    assert ["refused: the log of toy" in claim for claim in checked_by_the_notebook("server_answers", [row])] == [True]


@pytest.mark.parametrize("experiment", CELLS)
def test_a_missing_package_is_no_failure(experiment, tmp_path):
    context = toy_context(experiment, {}, tmp_path)
    row = context.absent_row("vllm", "count", f"{UNAVAILABLE}vllm not installed", params={"what": server_answers.COMPARED})
    assert checked_by_the_notebook(experiment, [row]) == []


@pytest.mark.parametrize("machine", REFERENCES)
def test_the_rows_of_a_reference_run_have_all_results_and_each_lost_one_is_missed(machine):
    stored = Run.open(ROOT / "results/reference" / machine)
    for experiment in (*CELLS, "kv_cache_memory"):
        rows = stored.rows("13_serving", experiment)
        if not rows:
            continue
        assert [otherwise for holds, otherwise in value_claims(experiment, rows) if not holds] == []
        for lost in ("count", "output_tokens_per_s", "kv_cache_bytes"):
            some = [row for row in rows if row.metric != lost]
            if len(some) < len(rows) and experiment != "server_soak":
                assert not all(holds for holds, _ in value_claims(experiment, some)), lost
        if experiment == "server_soak":
            for lost in (server_soak.SOAK, server_soak.HANG_UPS, server_soak.OVERLOAD, server_soak.DRAIN, "no key"):
                some = [row for row in rows if row.variant != lost and not (lost == "no key" and "status" in row.params)]
                assert not all(holds for holds, _ in value_claims(experiment, some)), lost


def test_missing_results_are_one_claim():
    claims = value_claims(
        "server_soak", [Row(notebook="n", experiment="server_soak", variant=server_soak.SOAK, metric="count", value=3.0)]
    )
    assert claims[-1] == (
        False,
        "server_soak has no row of these results: clients that hang up, refused requests, overload, SIGTERM",
    )
