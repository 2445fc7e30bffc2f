"""Predictions of rates: curves are fitted to one reference run, and hold for rows that they have not seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from hyperion.chapter import efficiency
from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.efficiency import (
    COLLECTIVE,
    EAGER_STEP,
    OWN_PRODUCT,
    PRODUCT,
    REFERENCE_STEP,
    REPEATED,
    TRAINING_STEP,
    Curve,
    Work,
    _own_curve,
    curve_of,
    expected_product,
    expected_share,
    expected_stream,
    fit_times,
    own_product_curve,
    own_stream_curve,
    read_curves,
    with_interval,
)
from hyperion.commands import efficiency_fit, regenerate
from hyperion.commands.efficiency_fit import (
    Reference,
    coverage,
    curves_to_toml,
    first_fits,
    median_error,
    points_of,
    score_stored,
    score_unseen,
)
from hyperion.errors import HyperionError
from hyperion.hardware import detect
from hyperion.paths import reference_folder
from tests.chapter.toy import toy_context
from tests.hardware.machines import facts

FITTED, UNSEEN = ("h200x2", "cpu-2cores", "h100"), ("h200-study", "h200x4")
# Rates whose stored predictions were 184 ceilings and models of steps.
LARGEST_ERROR, LEAST_COVERAGE = 0.15, 0.80


@pytest.fixture(scope="module")
def references():
    return {name: Reference.open(reference_folder() / name) for name in FITTED + UNSEEN}


@pytest.fixture(scope="module")
def curves(references):
    return first_fits([references[name] for name in FITTED])


@pytest.fixture
def on(monkeypatch, tmp_path):
    """A function that returns a context on a made-up device."""

    def context(name: str, experiment: str = "gemm", rows=()) -> Context:
        device = detect(facts(name))
        monkeypatch.setattr(Context, "device", property(lambda self: device))
        return toy_context(experiment, {}, tmp_path, list(rows))

    return context


def test_rates_of_machines_that_the_curves_have_not_seen(references, curves):
    scored = score_unseen([], [references[name] for name in UNSEEN], curves)
    steps = {"image_training_speed", "model_steps", "batch_scaling"}
    assert {s.point.row.experiment for s in scored} == {"gemm", "bandwidth", "collectives", *steps}
    assert len(scored) == 94
    assert median_error(scored) <= LARGEST_ERROR and coverage(scored) >= LEAST_COVERAGE
    for experiment in ("gemm", "bandwidth", "collectives"):
        some = [s for s in scored if s.point.row.experiment == experiment]
        assert median_error(some) <= LARGEST_ERROR and coverage(some) >= LEAST_COVERAGE, experiment
    too_high = sum(s.error > 0 for s in scored)
    assert 0.2 * len(scored) <= too_high <= 0.8 * len(scored)  # a prediction may be wrong in both directions


def test_all_rates_with_those_held_out_from_the_fit(references, curves):
    scored = score_unseen([references[name] for name in FITTED], [references[name] for name in UNSEEN], curves)
    predicted = {"best_products", "operand_data", "stream_formats", "model_steps", "batch_scaling", "model_products"}
    assert predicted <= {s.point.row.experiment for s in scored} and len(scored) > 160
    # The run h100 gives only the curves that the runs before it have no rows for.
    of_h100 = [s for s in scored if s.point.row in references["h100"].rows]
    assert {s.point.row.experiment for s in of_h100} == {"precision_variants", "training_ladder"} and len(of_h100) == 14
    # A single size has no other size from which it can be predicted.
    assert {curve.name for curve in curves if curve.kind == REPEATED and "h100" in curve.source} == {"read", "copy"}
    assert len({(s.point.row.notebook, s.point.row.key) for s in scored if s.point.row in references["h200x2"].rows}) == sum(
        s.point.row in references["h200x2"].rows for s in scored
    )
    assert median_error(scored) <= LARGEST_ERROR and coverage(scored) >= LEAST_COVERAGE


def test_the_ceilings_that_an_old_reference_stored_are_no_such_predictions(references):
    assert score_stored(references["h200-study"]) == [] and not references["h200-study"].predictions


def test_the_predictions_that_a_machine_stored_before_it_measured_hold(references):
    scored = score_stored(references["h200x4"])
    assert len(scored) == 60 and median_error(scored) <= LARGEST_ERROR and coverage(scored) >= LEAST_COVERAGE
    assert 0.2 * len(scored) <= sum(s.error > 0 for s in scored) <= 0.8 * len(scored)


def test_the_file_is_the_fit_of_its_references(curves, tmp_path, monkeypatch, capsys):
    written = tmp_path / "efficiency.toml"
    monkeypatch.setattr(efficiency_fit, "CURVES_FILE", written)
    regenerate.curves([reference_folder() / name for name in FITTED])
    assert written.read_text() == curves_to_toml(curves) and f"{len(curves)} curves" in capsys.readouterr().out
    for made, stored in zip(read_curves(written), read_curves(), strict=True):
        assert (made.arch, made.kind, made.name, made.points, made.source) == (
            stored.arch,
            stored.kind,
            stored.name,
            stored.points,
            stored.source,
        )
        for term in ("overhead_s", "arithmetic", "traffic", "spread"):
            assert getattr(made, term) == pytest.approx(getattr(stored, term), rel=1e-3, abs=1e-9)


def test_the_page_is_the_score_of_the_references(capsys):
    regenerate.predictions(sorted(reference_folder().iterdir()))
    printed = capsys.readouterr()
    assert printed.out == (Path(__file__).parents[2] / "docs/predictions.md").read_text()
    assert "left out" in printed.err and "h200-launches is not a run" in printed.err


def test_rates_of_another_gpu_lie_within_their_stored_predictions():
    """The curves were fitted to H200s; two runs on H100s stored their predictions before they measured. None is left out."""
    scores = []
    for name in ("h100", "h100-second-host"):
        reference = Reference.open(reference_folder() / name)
        scores += score_stored(reference)
        stored = [p for p in reference.predictions.values() if p.estimate is not None and p.high is not None]
        assert len([p for p in stored if not p.metric.endswith("_time_s")]) >= len(score_stored(reference)) == 144
    assert {"precision_variants", "training_ladder", "mapped_memory"} <= {s.point.row.experiment for s in scores}
    assert median_error(scores) <= LARGEST_ERROR and coverage(scores) >= LEAST_COVERAGE


def test_a_curve_that_two_runs_could_give_is_that_of_the_first(references):
    both = first_fits([references["h200x2"], references["h100"]])
    sources = {(curve.kind, curve.source.split(" ")[0]) for curve in both}
    assert (PRODUCT, "h200x2") in sources and (PRODUCT, "h100") not in sources
    assert {run for kind, run in sources if kind == EAGER_STEP} == {"h100"}


def test_rates_of_a_busy_machine_are_neither_fitted_nor_scored(references):
    idle = references["h100"]
    busy = replace(idle, rows=[replace(row, throttle="busy") for row in idle.rows])
    assert points_of(idle) and score_stored(idle)
    assert points_of(busy) == [] and score_stored(busy) == []


def test_a_fit_finds_overhead_and_efficiencies():
    works = [Work(size, 1e-3 * size, 2e-4 * size**0.5) for size in (1.0, 10.0, 100.0, 1000.0)]
    points = [(work, 5e-6 + 1.3 * work.arithmetic_s + 0.5 * work.traffic_s) for work in works]
    assert fit_times(points) == pytest.approx((5e-6, 1.3, 0.5), rel=1e-6)
    # One size cannot tell an overhead from a low efficiency.
    assert fit_times(points[:1])[0] == 0
    assert sum(fit_times([(Work(1.0, 0.0, 1e-3), 2e-3)])) == pytest.approx(2.0)


def test_the_rate_of_small_work_is_low_and_that_of_large_work_approaches_a_share():
    curve = Curve("sm_90", PRODUCT, "bf16", 5e-6, 1.25, 0.0, 0.1, 4, "a run")
    rates = [curve.rate(Work(989.4e-3 * s, 1e-3 * s, 0.0)) for s in (0.001, 0.01, 1.0, 1000.0)]
    assert rates == sorted(rates) and rates[0] < 200 and rates[-1] == pytest.approx(989.4 / 1.25, rel=1e-4)


def test_no_call_is_faster_than_its_traffic_at_the_ceiling():
    curve = Curve("sm_90", PRODUCT, "bf16", 1.0, 0.5, 0.2, 0.1, 4, "a run")
    assert curve.time_s(Work(1.0, 4.0, 10.0)) == 1.0 + 10.0 and curve.time_s(Work(1.0, 40.0, 10.0)) == 1.0 + 20.0 + 2.0


def test_an_added_interval_is_the_same_factor_in_both_directions():
    device, forecast = detect(facts("H200")), Forecast("v", "samples_per_s", 100.0, "a model")
    spread = curve_of("sm_90", REFERENCE_STEP, "").spread
    added = with_interval(device, REFERENCE_STEP, forecast)
    assert (added.low, added.high) == pytest.approx((100 / (1 + spread), 100 * (1 + spread))) and added.estimate == 100.0
    assert with_interval(detect(facts("A100-80")), REFERENCE_STEP, forecast) == forecast


def test_a_prediction_of_a_product_lies_below_its_ceiling_and_names_its_reference(on):
    expected = expected_product(on("H200"), "bf16", 4096, 4096, 4096)
    assert expected.ceiling == pytest.approx(1070.5, abs=0.1)
    assert 0 < expected.low < expected.estimate < expected.high
    assert 600 < expected.estimate < 850 and "h200x2 (NVIDIA H200" in expected.basis and "ceiling: roofline" in expected.basis
    small = expected_product(on("H200"), "bf16", 1024, 1024, 1024)
    assert small.estimate < expected.estimate / 2


def test_another_architecture_has_only_a_ceiling(on):
    for name in ("MI250X", "A100-80"):
        expected = expected_product(on(name), "bf16", 4096, 4096, 4096)
        assert expected.ceiling > 100 and (expected.estimate, expected.low, expected.high) == (None, None, None)
        assert expected.basis.startswith("no reference run has a curve for it; ceiling: ")
    share = expected_share(on("MI250X").device, TRAINING_STEP, 5.0, "at measured rates")
    assert share.ceiling == 5.0 and share.estimate is None


def test_a_run_with_its_own_products_predicts_from_them(on, references):
    squares = [row for row in references["h200x2"].rows if row.experiment == "gemm"]
    slow = [replace(row, value=row.value / 2) for row in squares if row.value is not None]
    fast, half = (expected_product(on("H200", "best_products", rows), "bf16", 8192, 8192, 8192) for rows in (squares, slow))
    assert half.estimate == pytest.approx(fast.estimate / 2) and "this run's own rows" in half.basis
    # On an architecture without a curve, the run's own rows suffice. Two sizes are too few.
    other = expected_product(on("A100-80", "best_products", squares), "bf16", 8192, 8192, 8192)
    assert other.estimate is not None and other.low < other.estimate
    few = [row for row in squares if row.params["m"] > 2048]
    for some in (few, [*few, *few]):  # repetitions of a size are no further sizes
        assert own_product_curve(some, detect(facts("H200")), "bf16") is None


def test_the_spread_of_a_runs_own_curve_is_that_of_curves_of_its_kind(monkeypatch):
    curve = Curve("sm_90", OWN_PRODUCT, "", 0.0, 1.0, 1.0, 0.2, 9, "")
    monkeypatch.setattr(efficiency, "_stored", lambda: {1: curve, 2: replace(curve, kind=COLLECTIVE, spread=3.0)})
    points = [(Work(amount, amount, amount), 2 * amount) for amount in (1.0, 2.0, 3.0)]
    assert _own_curve(OWN_PRODUCT, "bf16", points).spread == 0.2


def test_rows_of_a_busy_machine_or_of_hot_caches_are_not_part_of_a_runs_own_curve(references):
    device, rows = detect(facts("H200")), references["h200x2"].rows
    slow = [replace(row, value=row.value / 2) for row in rows if row.value is not None]
    busy = [replace(row, throttle="busy") for row in slow]
    hot = [replace(row, params=row.params | {"cache": "hot"}) for row in slow]
    for others in (busy, hot):
        assert own_product_curve([*rows, *others], device, "bf16") == own_product_curve(rows, device, "bf16") is not None
        assert own_stream_curve([*rows, *others], "copy") == own_stream_curve(rows, "copy") is not None


def test_streams_that_a_cache_may_serve_have_no_prediction(on):
    context = on("H200", "bandwidth")
    assert expected_stream(context, "copy", "fp32", 1 << 20).estimate is None
    large = expected_stream(context, "copy", "fp32", 4 * 10**9)
    assert 0.8 * large.ceiling < large.estimate < 0.95 * large.ceiling


def test_curves_are_by_architecture_kind_and_name():
    assert curve_of("sm_90", COLLECTIVE, "all_reduce") is not None and curve_of("sm_80", COLLECTIVE, "all_reduce") is None
    assert curve_of("x86_64", PRODUCT, "fp32") is not None
    assert len({(c.arch, c.kind, c.name) for c in read_curves()}) == len(read_curves())


def test_a_damaged_file_of_curves_is_refused(tmp_path):
    path = tmp_path / "curves.toml"
    for text in (
        "[[curve]\n",
        '[[curve]]\narch = "sm_90"\n',
        curves_to_toml(read_curves()).replace("points = 7", "points = nan"),
    ):
        path.write_text(text)
        with pytest.raises(HyperionError):
            read_curves(path)
