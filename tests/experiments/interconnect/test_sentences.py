"""Whether DDP's default bucket is large enough is decided by measured rates; the fit is called a fit."""

import pytest

from hyperion.experiments.interconnect.sentences import default_bucket
from hyperion.measure.collectives.latency_bandwidth import share_of_best
from hyperion.paths import reference_folder
from hyperion.results import Row, Run

MIB = 2**20


def row(metric, value, **params):
    common = {"notebook": "nb", "experiment": "collectives", "variant": "all_reduce", "dtype": "fp32"}
    return Row(**common, metric=metric, value=value, ci_low=0.99 * value, ci_high=1.01 * value, n=30, params=params)


def sweep(*rates, recommended=20.0, plateau=300.0):
    """Rates at 5, 25 and 1024 MiB, with the size and the plateau of a fit."""
    measured = [row("busbw_gb_s", rate, bytes=mib * MIB) for mib, rate in zip((5, 25, 1024), rates, strict=False)]
    return [*measured, row("recommended_bytes", recommended * MIB, note=""), row("asymptotic_busbw_gb_s", plateau)]


def test_a_measured_share_of_nine_tenths_is_large_enough():
    fit, measured = default_bucket(sweep(100.0, 290.0, 300.0))
    assert fit.startswith("By the fit, messages of at least 20 MiB") and "large enough" not in fit
    assert "reaches 96.7 % of the highest rate, 300 GB/s" in measured and measured.endswith("So it is large enough.")


@pytest.mark.parametrize(("recommended", "fit_disagrees"), [(20.0, True), (26.0, True), (40.0, False)])
def test_a_lower_share_is_not_large_enough_whatever_the_fit_recommends(recommended, fit_disagrees):
    _, measured = default_bucket(sweep(100.0, 240.0, 347.0, recommended=recommended))
    assert "So it leaves 30.8 % unused." in measured and "large enough" not in measured
    assert ("no straight line fits" in measured and "its plateau, 300 GB/s, is lower" in measured) is fit_disagrees


def test_without_a_message_of_that_size_nothing_is_concluded():
    *_, last = default_bucket(sweep(100.0))
    assert last.startswith("No message of 25 MiB or more") and default_bucket([]) == []


def test_the_share_is_interpolated_over_the_logarithm_of_the_size():
    assert share_of_best(4.0, [1, 16, 256], [10.0, 30.0, 40.0]) == pytest.approx(0.5)
    assert share_of_best(1024, [1, 16], [10.0, 40.0]) == 1 and share_of_best(0.5, [16, 1], [40.0, 10.0]) == 0.25


@pytest.mark.parametrize("name", ["h200x2", "h200x4"])
def test_on_the_references_a_bucket_of_25_mib_leaves_bandwidth_unused(name):
    rows = [row for row in Run.open(reference_folder() / name).rows() if row.experiment == "collectives"]
    assert "unused" in default_bucket(rows)[-1]
