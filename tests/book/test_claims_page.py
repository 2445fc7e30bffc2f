"""Claims are answered by the intervals of rows, and repeated measurements have their percentiles and variations."""

import json
import tomllib
from dataclasses import replace

import pandas as pd
import pytest

from hyperion.book import claims_page
from hyperion.book.claims_page import claims_markdown, repeats_markdown, reruns_markdown
from hyperion.errors import HyperionError
from hyperion.figures.material import Material
from hyperion.results import Row, Run

SPEED = Row(
    notebook="n", experiment="e", variant="v", metric="speedup", value=1.0, n=30, ci_low=0.9, ci_high=1.1, params={"ranks": 2}
)
CHAPTER, GEMM = "01_hardware_exploration", "gemm"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A run named `one` with two speed-ups and a size of memory, and the claims that a test writes."""
    run = Run.create(tmp_path / "one", {"profile": "smoke"})
    four = replace(SPEED, value=2.0, ci_low=1.8, ci_high=2.2, params={"ranks": 4})
    memory = replace(four, metric="peak_memory_gib", params={"ranks": 8})
    rows = [replace(row, limit_source="no limit: made up") for row in (SPEED, four, memory)]
    run.record("n", "e", rows, pd.DataFrame({"x": [1.0]}), input_hash="h")

    def table(claim: str) -> str:
        (tmp_path / "claims.toml").write_text(f'[[claim]]\nclaim = "c"\npublished = "p"\nanswer = "a"\n{claim}')
        monkeypatch.setattr(claims_page, "_FILE", tmp_path / "claims.toml")
        return claims_markdown({run: "one"})

    return table


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        ('{ row = "two", at_least = 0.9 }', "holds"),
        ('{ row = "two", at_least = 0.95 }', "undecided"),
        ('{ row = "two", at_least = 1.2 }', "does not hold"),
        ('{ row = "two", at_most = 1.1 }', "holds"),
        ('{ row = "two", at_most = 0.8 }', "does not hold"),
        ('{ row = "four", of = "two", at_least = 1.5 }', "holds"),
        ('{ row = "two", of = "four", at_most = 0.5 }', "undecided"),
        ('{ row = "two", at_least = 0.9 }, { row = "four", at_most = 1.0 }', "does not hold"),
        ('{ row = "two", at_least = 0.95 }, { row = "four", at_least = 1.0 }', "undecided"),
        ("", "undecided"),
    ],
)
def test_an_answer_follows_from_both_ends_of_the_interval(made, condition, answer):
    rows = "[claim.rows]\n" + "".join(
        f'{name} = {{ run = "one", metric = "speedup", ranks = {ranks} }}\n' for name, ranks in (("two", 2), ("four", 4))
    )
    assert made(f"holds = [{condition}]\n{rows}").splitlines()[-1] == f"| c | p | a |  | {answer} | one |"


@pytest.mark.parametrize(
    ("states", "worst"), [(("yes", "yes"), "yes"), (("unknown", "yes"), "unknown"), (("unknown", "no (drift)"), "no (drift)")]
)
def test_the_worst_of_the_times_of_a_claim_counts_and_memory_is_no_time(made, monkeypatch, states, worst):
    by_ranks = dict(zip((2, 4, 8), (*states, "no (warm-up)"), strict=True))
    monkeypatch.setattr(Material, "steadiness", lambda _, row: by_ranks[row.params["ranks"]])
    monkeypatch.setattr(claims_page, "is_timed", lambda row: row.metric == "speedup")  # as if these were rates
    rows = "".join(f'r{ranks} = {{ run = "one", ranks = {ranks} }}\n' for ranks in by_ranks)
    assert made(f"[claim.rows]\n{rows}").splitlines()[-1] == f"| c | p | a | {worst} | undecided | one |"


def test_a_claim_without_rows_is_not_measured(made):
    assert made("").splitlines()[-1] == "| c | p | a |  | not measured | none |"


@pytest.mark.parametrize("wanted", ['run = "one"', 'run = "one", ranks = 16', 'run = "two"', 'run = "one", dtype = "bf16"'])
def test_a_claim_that_does_not_name_one_row_is_refused(made, wanted):
    with pytest.raises(HyperionError, match="rows with these properties"):
        made(f"[claim.rows]\nr = {{ {wanted} }}")


def test_every_condition_is_about_a_row_of_its_claim():
    for claim in tomllib.loads(claims_page._FILE.read_text("utf-8"))["claim"]:
        for condition in claim.get("holds", []):
            assert {condition["row"], condition.get("of", condition["row"])} <= claim["rows"].keys()
            assert condition.keys() <= {"row", "of", "at_least", "at_most"} and len(condition) > 1


def launch(folder, number: int, gpu: str, rate: float) -> Run:
    """A launch with 11 samples of a product of 2 TFLOP, whose times are 0.5 to 1.5 times the median."""
    run = Run.create(folder / str(number), {"profile": "smoke", "environment": {"gpus": [{"name": "made up", "uuid": gpu}]}})
    params = {"cache": "cold", "k": 10_000, "m": 10_000, "n": 10_000}
    checked = {"check": "c", "check_error": 0.0, "check_tolerance": 1.0, "n": 11, "ci_low": rate, "ci_high": rate}
    row = Row(
        notebook=CHAPTER,
        experiment=GEMM,
        variant="torch.mm",
        dtype="bf16",
        metric="gemm_tflops",
        value=rate,
        params=params,
        limit_source="no limit: made up",
        **checked,
    )
    times = [2 / rate * (0.5 + place / 10) for place in range(11)]
    samples = pd.DataFrame({"dtype": "bf16", "params": json.dumps(params, sort_keys=True), "time_s": times})
    run.record(CHAPTER, GEMM, [row], samples, input_hash="h")
    return run


def test_repeats_have_percentiles_and_the_deviation_within_and_between_gpus(tmp_path):
    launches = [("a", 99.0), ("a", 101.0), ("b", 198.0), ("b", 202.0)]
    runs = {launch(tmp_path, number, gpu, rate): "made-up-launches" for number, (gpu, rate) in enumerate(launches)}
    other = {launch(tmp_path, 9, "a", 1.0): "h200"}
    cells = [cell.strip() for cell in repeats_markdown(runs | other).splitlines()[-1].strip("| ").split("|")]
    # The 10th and 90th percentile of a launch's times are 0.6 and 1.4 times the median. All rates: the square root of
    # (51² + 49² + 48² + 52²) / 3, over 150. On the same GPU, each of four deviates by 1 %, with two degrees of freedom.
    assert cells[:4] == ["bf16", "10000", "4", "2"] and cells[4] == "149.5"
    assert cells[5] == f"{149.5 / 1.4:.1f} to {149.5 / 0.6:.1f}"
    assert cells[6:] == ["38.51 %", "1.41 %"]


def test_reruns_have_the_differences_that_half_and_nine_tenths_stay_below(tmp_path):
    def run_of(name: str, factor: float, sizes: int, error: float) -> Run:
        run = Run.create(tmp_path / name, {"profile": "smoke"})
        rows = [
            Row(
                notebook=CHAPTER,
                experiment=GEMM,
                variant=f"{metric} {size}",
                metric=metric,
                value=value,
                check="c",
                limit_source="no limit: made up",
                check_error=error,
                check_tolerance=1.0,
            )
            for metric, count in (("peak_memory_gib", sizes), ("reserved_memory_gib", 9), ("relative_difference", 20))
            for size in range(count)
            for value in [error if metric == "relative_difference" else 1 + size * factor]
        ]
        run.record(CHAPTER, GEMM, rows, pd.DataFrame({"time_s": [1.0]}), input_hash="h")
        return run

    # The differences of the eleven values in both runs are 0, 1, …, 10 %.
    runs = {
        run_of("a", 0.0, 11, 0.1): "h100",
        run_of("b", 0.01, 12, 0.2): "h100-second-host",
        run_of("c", 0.0, 11, 0.1): "h200-second-gpu",
    }
    header, _, *lines = reruns_markdown(runs).splitlines()
    assert header == "| metric | h100 and h100-second-host |", "a run without a first run is left out"
    assert lines == ["| peak_memory_gib | 5.0 %, 9.0 % (11 values) |"], "few values and checked errors are left out"
