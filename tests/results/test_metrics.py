"""Metrics: built-in and registered ones, and those that a run defines for its own rows."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pandas as pd
import pytest

from hyperion.book.report import report_page
from hyperion.errors import HyperionError
from hyperion.figures.material import Material
from hyperion.results import REGISTRY, Metric, Row, RowError, Run, compare, metric_named, register_metric, verify_run
from hyperion.results import metrics as registry
from hyperion.results.rows import own_metrics, own_metrics_from_json, own_metrics_to_json, rows_from_csv, rows_to_csv

SCORE = Metric("own_score", "points", "higher", "answers that a judge accepts", needs_limit=True)


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch):
    """Registrations of a test end with it."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def forget(name: str) -> None:
    """Make this process one that never imported the package of the metric."""
    del registry._registered[name]


def score(metric: str = SCORE.name, **changes) -> Row:
    named = {"notebook": "nb", "experiment": "judging", "variant": "small", "metric": metric}
    return Row(**named | {"value": 3.0, "limit": 4.0, "limit_source": "four questions", "predicted": 2.0} | changes)


def record(run: Run, *rows: Row) -> Run:
    run.record("nb", rows[0].experiment, rows, pd.DataFrame({"points": [1.0, 2.0]}), input_hash="h")
    return run


def test_every_metric_is_fully_described():
    for name, metric in REGISTRY.items():
        assert name == metric.name == name.lower() and metric.unit and metric.meaning
    for name in ("gemm_tflops", "bandwidth_gb_s", "step_time_s", "perplexity_token", "accuracy"):
        assert metric_named(name).needs_limit and metric_named(name).needs_interval


def test_an_unknown_metric_is_refused():
    with pytest.raises(HyperionError, match="unknown metric 'tflops'"):
        metric_named("tflops")
    with pytest.raises(HyperionError, match=r"use one of bandwidth_gb_s[\w, ]* \(similar\), \w+") as refused:
        metric_named("bandwith_gb_s")
    assert (refused.value.next_step or "").count("bandwidth_gb_s,") <= 1 and "accuracy" in (refused.value.next_step or "")


def test_a_registered_metric_is_known_and_the_same_definition_may_come_again():
    assert register_metric(SCORE) is register_metric(replace(SCORE)) is metric_named("own_score")
    assert score().unit == "points" and score().fraction_of_limit == 0.75
    with pytest.raises(RowError, match="beyond its limit"):
        score(value=5.0).validate()


@pytest.mark.parametrize("first", [SCORE, metric_named("step_time_s")])
def test_another_definition_of_a_name_is_refused_with_both(first):
    register_metric(first)
    second = replace(first, unit="marks", direction="none")
    with pytest.raises(HyperionError) as caught:
        register_metric(second)
    assert f"unit {first.unit!r} and 'marks', direction {first.direction!r} and 'none'" in caught.value.what
    assert repr(first) in str(caught.value.where) and repr(second) in str(caught.value.where)
    assert metric_named(first.name) == first


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Score"},
        {"name": "own score"},
        {"name": ""},
        {"name": None},
        {"name": "a" * 81},
        {"unit": ""},
        {"unit": "$x$"},
        {"unit": "a" * 41},
        {"direction": "up"},
        {"meaning": ""},
        {"meaning": "x" * 301},
        {"meaning": "\x1b[2J"},
    ],
)
def test_a_malformed_definition_is_refused_with_its_field(change):
    with pytest.raises(HyperionError, match=f"metric {next(iter(change))} is"):
        replace(SCORE, **change)


@pytest.mark.slow
def test_a_run_is_read_without_the_package_that_defined_its_metrics(new_run):
    register_metric(SCORE)
    run = record(new_run(), score())
    forget("own_score")
    again = Run.open(run.folder)
    assert "metrics.json" in again.hashes() and again.own_metrics() == {"nb/judging": [SCORE]}
    (row,) = again.rows()
    assert row == score() and row.definition == SCORE and row.fraction_of_limit == 0.75
    assert any("1 own_score" in statement for statement in verify_run(again))
    (compared,) = compare([again], [record(new_run("other"), replace(row, value=2.0))])
    assert compared.verdict == "indicative" and compared.change == pytest.approx(-1 / 3)
    page = report_page(Material(again))
    assert SCORE.meaning in page and "points" in page
    assert "own_score" not in REGISTRY


@pytest.mark.process
def test_a_process_that_never_saw_the_package_verifies_compares_and_draws(new_run):
    register_metric(SCORE)
    runs = [str(record(new_run(name), score(value=value)).folder) for name, value in (("a", 3.0), ("b", 3.5))]
    program = (
        "import sys\n"
        "from hyperion.cli import main\n"
        "a, b = sys.argv[1:]\n"
        "codes = []\n"
        "for command in (['verify', a], ['compare', a, b], ['report', a]):\n"
        "    sys.argv[1:] = command\n"
        "    codes.append(main())\n"
        "from hyperion.results import REGISTRY\n"
        "assert 'own_score' not in REGISTRY\n"
        "print('codes', codes)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *runs], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "codes [0, 0, 0]" in done.stdout and "own_score" in done.stdout


def test_runs_that_define_a_name_differently_do_not_meet(new_run):
    golf = replace(SCORE, unit="strokes", direction="lower", meaning="strokes until the hole")
    one, other = (
        record(new_run(name), score(limit=2.0 if metric is golf else 4.0, own_metric=metric))
        for name, metric in (("one", SCORE), ("other", golf))
    )
    register_metric(replace(SCORE, unit="votes"))
    assert [row.unit for run in (one, other) for row in run.rows()] == ["points", "strokes"]
    assert verify_run(one) and verify_run(other) and score().unit == "votes"
    third = record(new_run("third"), score(own_metric=SCORE), score("count", limit=None))
    fourth = record(
        new_run("fourth"), score(limit=2.0, own_metric=golf), score("step_time_s", n=1, ci_low=3.0, ci_high=3.0, limit=1)
    )
    with pytest.raises(HyperionError, match="no value in common"):
        compare([third], [fourth])
    for run, share in ((one, 0.5), (other, 0.51)):
        record(run, *run.rows(), score("batch_efficiency", value=share, n=1, ci_low=share, ci_high=share))
    by_metric = {compared.metric: compared for compared in compare([one], [other])}
    assert by_metric["batch_efficiency"].verdict == "same" and by_metric["own_score"].verdict == "missing"
    assert "[points] higher is better, [strokes] lower is better" in by_metric["own_score"].reason


def test_an_experiment_measured_again_takes_the_new_definition_and_others_keep_theirs(new_run):
    run = new_run()
    for experiment in ("judging", "marking"):
        record(run, score(experiment=experiment, own_metric=SCORE))
    changed = replace(SCORE, unit="marks")
    record(run, score(experiment="marking", own_metric=changed))
    assert run.own_metrics() == {"nb/judging": [SCORE], "nb/marking": [changed]}
    assert [row.unit for row in run.rows()] == ["points", "marks"] and run.verify()
    for experiment in ("judging", "marking"):
        record(run, score("count", experiment=experiment))
    assert run.own_metrics() == {} and run.verify()


def test_confirming_an_experiment_keeps_its_definitions(new_run):
    run = record(new_run(), score(own_metric=SCORE))
    run.confirm("nb", "judging", [replace(row, predicted=2.5) for row in run.rows()])
    assert run.own_metrics() == {"nb/judging": [SCORE]} and run.rows()[0].predicted == 2.5


def test_two_definitions_in_one_experiment_are_refused_and_nothing_is_stored(new_run):
    run = new_run()
    rows = [score(own_metric=SCORE), score(variant="large", own_metric=replace(SCORE, unit="marks"))]
    with pytest.raises(HyperionError, match="'own_score' has two definitions: unit 'points' and 'marks'"):
        record(run, *rows)
    assert run.rows() == [] and run.experiments() == {}


def test_a_row_cannot_bring_its_own_rules_for_a_built_in_metric(new_run):
    lenient = Metric("step_time_s", "s", "none", "a step")
    with pytest.raises(RowError, match="beyond its limit"):
        record(new_run(), score("step_time_s", n=1, ci_low=3.0, ci_high=3.0, own_metric=lenient))


def test_a_run_of_built_in_metrics_has_no_file_of_definitions(new_run):
    run = record(new_run(), score("count"))
    assert "metrics.json" not in run.hashes() and run.own_metrics() == {}


def test_rows_travel_with_their_definitions(new_run):
    row = score(own_metric=SCORE)
    document = json.loads(json.dumps(own_metrics_to_json(own_metrics([row]))))
    assert document == {"nb/judging": [asdict(SCORE)]}
    (read,) = rows_from_csv(rows_to_csv([row]), metrics=own_metrics_from_json(document, "here"))
    assert read == row and read.definition == SCORE
    for metrics in ({}, {"nb/other": [SCORE]}):
        with pytest.raises(RowError, match="unknown metric 'own_score': the run does not define it"):
            rows_from_csv(rows_to_csv([row]), metrics=metrics)
    with pytest.raises(HyperionError, match="unknown metric 'own_score'"):
        rows_from_csv(rows_to_csv([row]))
