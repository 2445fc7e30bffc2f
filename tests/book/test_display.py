"""What a notebook shows: banners, pictures, tables, lessons."""

from dataclasses import dataclass, field, replace

import pandas as pd
import pytest

from hyperion.book import display
from hyperion.book.display import answered_guess, compared_steps, fill, pick, show_predictions, show_table, verdict
from hyperion.errors import HyperionError
from hyperion.results import Prediction, Row


@dataclass
class Result:
    rows: list = field(default_factory=list)
    source: str = ""
    replayed_from: str = ""


@pytest.fixture
def shown(monkeypatch):
    """The bundles that reach the notebook, in order."""
    bundles = []
    monkeypatch.setattr(display, "_display", bundles.append)
    return bundles


@pytest.mark.slow
def test_show_gives_pictures_then_the_answer_to_the_guess_then_tables(run, material, shown):
    display.show(Result(material.of("gemm")), run)
    kinds = [next(iter(bundle)) for bundle in shown]
    assert kinds == ["image/png"] * 2 + ["text/markdown"] + ["text/html"] * 3
    assert shown[2]["text/plain"].startswith("Measured: gemm_tflops of torch.mm")
    assert all("text/plain" in bundle for bundle in shown)


def predicted(**columns) -> Prediction:
    row = {"notebook": "n", "experiment": "e", "variant": "copy", "dtype": "fp32", "params": {"m": 1}, "metric": "bandwidth_gb_s"}
    stored = {"guess": 100.0, "estimate": 240.0, "basis": "", "input_hash": "new", "made_at": "2026-01-01T00:00:00.000+00:00"}
    return Prediction(**row | stored | columns)


def test_a_missing_value_of_a_table_is_none_and_whole_numbers_stay_whole(shown):
    show_table(pd.DataFrame({"n": [1, 2], "p95 / ms": ["2.4", float("nan")]}))
    (table,) = (bundle["text/html"] for bundle in shown)
    assert '<td class="number">none</td>' in table and "nan" not in table and ">1</td>" in table


def test_no_prediction_is_a_sentence_and_no_empty_table(capsys):
    show_predictions(pd.DataFrame())
    assert capsys.readouterr().out == "The library makes no prediction for this experiment on this device.\n"


def test_the_guess_is_answered_with_what_was_predicted_and_measured():
    row = Row(
        notebook="n", experiment="e", variant="copy", dtype="fp32", params={"m": 1}, metric="bandwidth_gb_s", value=200.0, n=30
    )
    other = replace(row, params={"m": 2}, value=7.0)
    old = predicted(guess=1.0, input_hash="old")
    assert answered_guess([old, predicted(), predicted(params={"m": 2}, guess=None)], [other, row]) == (
        "Measured: bandwidth_gb_s of copy fp32 is 200 GB/s. You guessed 100 GB/s: 50 % too low. "
        "The library predicted 240 GB/s: 20 % too high."
    )
    no_guess = answered_guess([predicted(guess=None, estimate=200.4)], [row])
    assert no_guess.endswith("The library predicted 200.4 GB/s: within 0.5 %. You made no guess.")
    # A run of an earlier version stored the ceiling as its estimate.
    for ceiling in ({"estimate": 400.0, "made_at": ""}, {"estimate": None, "ceiling": 400.0}):
        sentence = answered_guess([predicted(guess=None, **ceiling)], [row])
        assert sentence.endswith("only a ceiling of 400 GB/s; the measured value is 50 % of it. You made no guess."), sentence
    missing = replace(row, value=None, value_reason="out of memory", n=None)
    assert answered_guess([predicted()], [missing]) == "bandwidth_gb_s of copy fp32 was not measured: out of memory."
    assert answered_guess([], [row]) == answered_guess([predicted(experiment="other")], [row]) == ""
    each = replace(row, rank=0)
    assert answered_guess([predicted()], [each]) == "" != answered_guess([predicted(each_rank=True)], [each])


def test_a_guess_about_rows_with_more_params_or_about_zero_is_answered():
    columns = {"notebook": "n", "experiment": "e", "variant": "copy", "dtype": "fp32", "metric": "bandwidth_gb_s", "n": 30}
    first, second = (Row(**columns, params={"m": 1, "kernel": name}, value=value) for name, value in (("a", 0.0), ("b", 50.0)))
    absent = replace(second, value=None, value_reason="out of memory", n=None)
    most = "Measured: bandwidth_gb_s of copy fp32, the largest of 2 values, is 50 GB/s. You guessed 100 GB/s: 100 % too high. "
    assert answered_guess([predicted()], [first, second]).startswith(most)
    exact = replace(first, params={"m": 1})
    assert answered_guess([predicted(estimate=0.0)], [second, absent, exact]) == (
        "Measured: bandwidth_gb_s of copy fp32 is 0 GB/s. You guessed 100 GB/s: too high. The library predicted 0 GB/s: correct."
    )
    rounded = answered_guess([predicted(guess=0.0)], [replace(exact, value=1e-15)])
    assert "You guessed 0 GB/s: correct. The library predicted 240 GB/s: too high." in rounded
    assert "You guessed 100 GB/s: 50 times the measured value." in answered_guess([predicted()], [replace(exact, value=2.0)])
    assert "The library predicted 240 GB/s: correct." in answered_guess([predicted()], [replace(exact, value=240.0)])
    # The relative error of a prediction of 0 would be 100 % for any measured value.
    for low, high, words in ((-1.0, 5.0, "inside the 95 % interval"), (1.0, 5.0, "too low"), (-5.0, -1.0, "too high")):
        away = replace(exact, value=(low + high) / 2, ci_low=low, ci_high=high)
        assert f"The library predicted 0 GB/s: {words}." in answered_guess([predicted(estimate=0.0)], [away])
    assert "the largest of 2 values, was not measured: out of memory." in answered_guess([predicted()], [absent, absent])


@pytest.mark.slow
def test_replay_and_synthetic_are_announced_first(run, material, shown):
    display.show(Result(material.of("gemm"), replayed_from="h200"), run)
    assert "REPLAY: measured on h200" in shown[0]["text/plain"]
    shown.clear()
    display.show(Result(material.of("text_pipeline"), source="synthetic"), run)
    assert "SYNTHETIC DATA" in shown[0]["text/html"]


def test_a_result_without_rows_is_refused(run, shown):
    with pytest.raises(HyperionError, match="has no rows"):
        display.show(Result(), run)


def test_a_figure_that_the_experiment_does_not_have_is_refused_by_name(run, material, shown):
    rows = [row for row in material.rows if row.experiment == "gemm"]
    with pytest.raises(HyperionError, match="'gemm' has no figure 'gem'") as refusal:
        display.show(Result(rows), run, figures=["gem"])
    assert "gemm" in (refusal.value.next_step or "")


def test_outside_a_notebook_plain_text_is_printed(material, capsys):
    display.banner("REPLAY")
    display.teach("best: {best.value}", best=material.of("gemm", metric="gemm_tflops")[0])
    printed = capsys.readouterr().out
    assert "REPLAY" in printed and "TFLOPS" in printed


def test_teach_gives_markdown(material, shown):
    display.teach("**{row.value}**", row=material.of("gemm", metric="gemm_tflops")[0])
    assert shown[0]["text/markdown"].startswith("**") and "TFLOPS" in shown[0]["text/markdown"]


def test_pick_finds_the_one_row(material):
    assert pick(material.rows, "gemm_tflops", dtype="bf16", m=1024, variant="torch.mm").params["m"] == 1024
    assert pick(material.rows, "perplexity_token", best=True, split="valid").value == 38.2
    best = pick(material.of("gemm"), "gemm_tflops", best=True)
    assert best.value == max(r.value for r in material.of("gemm", metric="gemm_tflops") if r.value)


def test_pick_refuses_none_and_several(material):
    with pytest.raises(HyperionError, match="no measured row of gemm_tflops, dtype='fp8'"):
        pick(material.rows, "gemm_tflops", dtype="fp8")
    with pytest.raises(HyperionError, match=r"\d+ rows of gemm_tflops"):
        pick(material.rows, "gemm_tflops", dtype="bf16")


def test_compared_steps_names_the_window_or_all_steps(material):
    row = material.rows[0]
    assert compared_steps(replace(row, params={"steps": 200, "first": 1, "last": 25})) == "steps 1 to 25"
    assert compared_steps(replace(row, params={"steps": 200})) == "200 steps"


def test_fill_writes_values_with_units(material):
    row = pick(material.rows, "bandwidth_gb_s", variant="copy", elements=500_000_000)
    text = fill("{copy.variant}: {copy.value} of {copy.limit}, {copy.share}; off by {copy.error}; {n}", copy=row, n=1 / 3)
    share = f"{100 * row.value / 4800:.1f} %"
    assert text == f"copy: {row.value:,.0f} GB/s of 4,800 GB/s, {share}; off by {100 * (4800 / row.value - 1):+.1f} %; 0.3333"
    accuracy = pick(material.rows, "accuracy", split="test")
    assert fill("{a.value} on {a.split}", a=accuracy) == "91.7 % on test"


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (1, "0 differ on 1 rank; 1 step of 1 rank in 0.1 steps"),
        (2, "0 differ on all 2 ranks; 2 steps of 2 ranks in 0.1 steps"),
        (21, "0 differ on all 21 ranks; 21 steps of 21 ranks in 0.1 steps"),
    ],
)
def test_fill_counts_one_in_the_singular(n, text):
    assert fill("0 differ on all {n} ranks; {n} steps of {n} ranks in 0.1 steps", n=n) == text


@pytest.mark.slow
def test_fill_fails_where_the_row_lacks_what_the_text_says(material, cpu_material):
    row = pick([row for row in cpu_material.rows if row.experiment == "gemm"], "gemm_tflops", best=True)
    with pytest.raises(HyperionError, match=r"quotes best.share.*no data sheet entry"):
        fill("{best.share} of the limit", best=row)
    with pytest.raises(HyperionError, match="field 'worst'"):
        fill("{worst.value}", best=row)


def test_a_ratio_of_speeds_says_faster_only_when_its_whole_interval_does():
    def ratio(low, value, high):
        return Row(
            notebook="n",
            experiment="e",
            variant="v",
            metric="speedup",
            value=value,
            n=30,
            ci_low=low,
            ci_high=high,
            limit_source="no limit: made up",
        )

    assert verdict(ratio(1.01, 1.1, 1.2)) == "faster than"
    assert verdict(ratio(0.7, 0.8, 0.99)) == "slower than"
    assert verdict(ratio(0.99, 1.1, 1.2)) == "as fast, within noise, as"
