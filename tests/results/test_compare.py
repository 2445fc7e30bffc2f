"""Comparing launches: a real slowdown is confirmed, noise is not, and nothing that differs or is missing stays unsaid."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hyperion.errors import HyperionError
from hyperion.results import Row, Run, circumstances, compare, relaunches, why_indicative
from hyperion.results.compare import Comparison, sensitivity

NOISE = 0.01
COMMON = {"notebook": "nb", "experiment": "e", "n": 30, "limit_source": "none known"}


def timed(variant: str, time: float, **columns) -> Row:
    return Row(**COMMON | {"variant": variant, "metric": "step_time_s", "value": time, "ci_low": time, "ci_high": time} | columns)


def recorded(folder, rows: list[Row], information: dict | None = None, **record) -> Run:
    """A run with these rows."""
    run = Run.create(folder, information or {})
    for experiment in sorted({row.experiment for row in rows}):
        of_one = [row for row in rows if row.experiment == experiment]
        run.record("nb", experiment, of_one, pd.DataFrame({"x": [0]}), input_hash="h", **record)
    return run


@pytest.fixture
def launched(tmp_path):
    """Makes a folder of `count` launches of ten timed variants, the first of them slower by `slowdown`, all of one call."""

    def make(side, count, slowdown=0.0, call="monday"):
        random = np.random.default_rng([count, *map(ord, side)])
        for number in range(count):
            rows = []
            for variant in range(10):
                time = 0.1 * (1 + (slowdown if variant == 0 else 0)) * random.lognormal(0, NOISE)
                rate = {"metric": "tokens_per_s", "value": 1 / time, "ci_low": 1 / time, "ci_high": 1 / time}
                rows += [timed(f"v{variant}", time), timed(f"v{variant}", time, **rate)]
            information = {"relaunch": {"call": call, "side": side, "launch": number}} if call else {}
            recorded(tmp_path / side / str(number), rows, information)
        return relaunches(str(tmp_path / side))

    return make


def verdicts(comparisons):
    return {(c.name, c.metric): c.verdict for c in comparisons}


@pytest.mark.slow
def test_a_slowdown_of_ten_percent_is_confirmed_in_both_directions(launched):
    comparisons = compare(launched("a", 5), launched("b", 5, slowdown=0.10))
    found = verdicts(comparisons)
    assert found.pop(("e v0", "step_time_s")) == "regression"
    assert found.pop(("e v0", "tokens_per_s")) == "regression"
    assert set(found.values()) == {"same"}
    assert [c.name for c in comparisons[:2]] == ["e v0"] * 2 and comparisons[0].change == pytest.approx(-0.09, abs=0.03)
    assert comparisons[0].p_value <= 0.05 and len(comparisons[0].launches_a) == 5
    back = verdicts(compare(launched("c", 5, slowdown=0.10), launched("d", 5)))
    assert back["e v0", "step_time_s"] == "improvement"


@pytest.mark.parametrize("slowdown", [0.0, 0.02])
def test_noise_and_two_percent_are_not_flagged(launched, slowdown):
    assert set(verdicts(compare(launched("a", 5), launched("b", 5, slowdown=slowdown))).values()) == {"same"}


@pytest.mark.parametrize(
    ("count", "call", "why"),
    [(1, None, "did not alternate"), (12, None, "did not alternate"), (4, "monday", "fewer than 5 launches")],
)
def test_ordinary_runs_and_few_launches_are_indicative(launched, count, call, why):
    sides = launched("a", count, call=call), launched("b", count, slowdown=0.10, call=call)
    comparisons = compare(*sides)
    assert verdicts(comparisons)["e v0", "step_time_s"] == "indicative"
    assert all(c.p_value is None and c.power is None for c in comparisons)
    assert not {"regression", "improvement"} & set(verdicts(comparisons).values())
    assert why in why_indicative(*sides)


def test_one_launch_a_side_has_no_spread(tmp_path):
    a, b = (recorded(tmp_path / name, [timed("v", seconds)]) for name, seconds in (("a", 1.0), ("b", 1.2)))
    (found,) = compare([a], [b])
    assert found.spread is None


def test_the_change_that_is_confirmed_is_that_of_the_lower_one_of_two_values():
    one = Comparison("e v", "step_time_s", 1.0, 1.0, 0.0, 0.01, 1.0, "same", power=0.4, detectable=0.04)
    assert sensitivity([one, replace(one, detectable=None)]).endswith("probability of 80 %: 4.0%")


def test_few_launches_of_one_side_are_indicative(launched):
    five, four = launched("a", 5), launched("b", 4)
    assert "fewer than 5 launches" in why_indicative(five, four) and "fewer than 5 launches" in why_indicative(four, five)


@pytest.mark.slow
def test_launches_that_did_not_take_turns_are_refused(launched):
    monday = launched("a", 5)
    assert compare(monday, launched("b", 5))
    with pytest.raises(HyperionError, match="come from several calls of `hyperion relaunch`"):
        compare(monday, launched("c", 5, call="tuesday"))
    with pytest.raises(HyperionError, match="come from several calls of `hyperion relaunch`"):
        compare(monday, launched("d", 5, call=None))
    both = [*launched("e", 3), *launched("f", 2)]
    with pytest.raises(HyperionError, match="contains launches of both versions"):
        compare(both, launched("g", 5))


def test_runs_that_share_nothing_and_folders_without_runs_are_refused(launched, tmp_path):
    with pytest.raises(HyperionError, match="no value in common"):
        compare(launched("a", 1, call=None), [Run.create(tmp_path / "empty", {})])
    (tmp_path / "none").mkdir()
    with pytest.raises(HyperionError, match="no run"):
        relaunches(str(tmp_path / "none"))


def test_a_search_is_compared_whatever_shape_won_and_given_shapes_only_with_themselves(tmp_path):
    def run_with(name, m, seen, value):
        common = {
            "notebook": "nb",
            "experiment": "best_products",
            "metric": "gemm_tflops",
            "dtype": "bf16",
            "value": value,
            "n": 30,
            "ci_low": value - 1,
            "ci_high": value + 1,
            "limit_source": "none known",
            "check": "c",
            "check_error": 0.0,
            "check_tolerance": 1.0,
        }
        shape = {"m": m, "n": 8192, "k": 8192, "cache": "cold"}
        found = Row(variant="fastest found", params=shape | {"seen": seen, "shapes": 512, "stopped": f"{seen} seen"}, **common)
        return recorded(tmp_path / name, [found, Row(variant="finalist", params=shape, **common)])

    compared = compare([run_with("a", 4096, 400, 700.0)], [run_with("b", 8192, 512, 701.0)])
    (same,) = [c for c in compared if c.verdict != "missing"]
    assert "fastest found" in same.name
    assert [(c.name.split()[1], c.reason) for c in compared if c.verdict == "missing"] == [
        ("finalist", "not in B: no row"),
        ("finalist", "not in A: no row"),
    ]


def test_values_that_one_side_lacks_are_missing_with_their_reason(tmp_path):
    """Crashed (no row), refused (a row without a value), in some launches only, and the same in a metric without direction."""
    whole = [timed(name, 0.1) for name in ("kept", "crashed", "refused", "sometimes")]
    count = timed("counted", 0, metric="count", value=3.0, ci_low=None, ci_high=None)
    no_value = {"value": None, "ci_low": None, "ci_high": None, "n": None}
    refused = timed("refused", 0, value_reason="out of memory", **no_value)
    nowhere = timed("nowhere", 0, value_reason="unsupported", **no_value)
    a = [recorded(tmp_path / f"a{i}", [*whole, count, nowhere, timed("own", i + 1.0)]) for i in range(2)]
    b = [
        recorded(tmp_path / f"b{i}", [whole[0], refused, nowhere, timed("own", i + 1.5), timed("new", 1.0), *whole[3:][i:]])
        for i in range(2)
    ]
    found = {c.name: c for c in compare(a, b)}
    assert {name: c.reason for name, c in found.items() if c.verdict == "missing"} == {
        "e crashed": "not in B: no row",
        "e refused": "not in B: out of memory",
        "e counted": "not in B: no row",
        "e sometimes": "not in 1 of 2 launches of B: no row",
        "e new": "not in A: no row",
    }
    assert found["e kept"].verdict == "same" and "e nowhere" not in found
    assert found["e crashed"].value_b is None and found["e crashed"].launches_a == (0.1, 0.1)


def test_values_that_are_not_positive_are_compared_by_their_difference(tmp_path):
    def run_with(name, breaks, share):
        rows = [
            timed("t", 0.1 + breaks / 1000, metric="graph_breaks", value=breaks, ci_low=None, ci_high=None),
            timed("o", 0.1, metric="communication_share", value=share, ci_low=share, ci_high=share),
        ]
        return recorded(tmp_path / name, rows)

    found = {c.metric: c for c in compare([run_with("a", 0.0, -0.02)], [run_with("b", 5.0, -0.02)])}
    assert (found["graph_breaks"].verdict, found["graph_breaks"].change) == ("indicative", -1.0)
    assert (found["communication_share"].verdict, found["communication_share"].change) == ("same", 0.0)


@pytest.mark.parametrize("tolerances", [(1e-4, 1e-4), (1e-4, 5e-5)])
def test_errors_are_compared_relative_to_their_largest_tolerance(tmp_path, tolerances):
    def run_with(name, tolerance, errors):
        rows = [
            timed(variant, error, metric="relative_difference", value=error, ci_low=None, ci_high=None)
            for variant, error in errors.items()
        ]
        checks = {"check": "c", "check_tolerance": tolerance}
        return recorded(tmp_path / name, [replace(row, check_error=row.value, **checks) for row in rows])

    a = run_with("a", tolerances[0], {"rounding": 1e-7, "more": 1e-6, "less": 4e-5})
    b = run_with("b", tolerances[1], {"rounding": 2e-6, "more": 5e-5, "less": 0.0})
    found = {c.name.removeprefix("e "): (c.verdict, c.change) for c in compare([a], [b])}
    assert found == {
        "rounding": ("same", pytest.approx(-0.019)),
        "more": ("indicative", pytest.approx(-0.49)),
        "less": ("indicative", pytest.approx(0.4)),
    }


def test_a_time_beside_a_check_is_compared_by_its_ratio(tmp_path):
    a, b = (
        recorded(tmp_path / name, [replace(timed("t", time), check="c", check_error=1.0, check_tolerance=2.0)])
        for name, time in (("a", 1.0), ("b", 1.5))
    )
    assert [c.change for c in compare([a], [b])] == [pytest.approx(1 / 1.5 - 1)]


def test_a_time_that_its_check_bounds_is_compared_by_its_ratio(tmp_path):
    a, b = (
        recorded(tmp_path / name, [replace(timed("t", time), check="in time", check_error=time, check_tolerance=60.0)])
        for name, time in (("a", 0.7), ("b", 1.9))
    )
    assert [c.change for c in compare([a], [b])] == [pytest.approx(0.7 / 1.9 - 1)]


def test_rows_of_two_ranks_have_two_names(tmp_path):
    runs = [recorded(tmp_path / side, [timed("v", t, rank=0), timed("v", 2 * t, rank=1)]) for side, t in (("a", 1.0), ("b", 1.1))]
    assert {c.name for c in compare(runs[:1], runs[1:])} == {"e v rank 0", "e v rank 1"}


def test_one_launch_given_several_times_is_refused(tmp_path, launched):
    """Itself, through a link, as a copy, as a copy with a prediction added, and one launch of a call in another folder."""
    run = recorded(tmp_path / "run", [timed("v", 0.1234)])
    other = recorded(tmp_path / "other", [timed("v", 0.1235)])
    (tmp_path / "link").symlink_to(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    predicted = recorded(tmp_path / "predicted", [timed("v", 0.1234, predicted=0.1)])
    for twin in (run, Run.open(tmp_path / "link"), Run.open(tmp_path / "copy"), predicted):
        for sides in (([run], [twin]), ([run, twin], [other]), ([other], [run, twin])):
            with pytest.raises(HyperionError, match="the same launch is given twice") as error:
                compare(*sides)
            assert str(twin.folder) in error.value.where and error.value.next_step
    assert compare([run], [other])

    five = launched("a", 5)
    again = recorded(tmp_path / "again", [timed("v0", 0.5)], five[2].information() | {"schema": 1})
    with pytest.raises(HyperionError, match="launch 2 of version a in the same call"):
        compare([*five, again], launched("b", 5))


def test_a_folder_with_a_link_to_one_of_its_runs_holds_that_run_once(launched, tmp_path):
    launched("a", 2)
    (tmp_path / "a/latest").symlink_to("1")
    assert [run.folder.name for run in relaunches(str(tmp_path / "a"))] == ["0", "1"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links/one").symlink_to(tmp_path / "a/0")
    assert [run.folder for run in relaunches(str(tmp_path / "links"))] == [(tmp_path / "a/0").resolve()]


def test_every_circumstance_that_differs_is_stated(tmp_path):
    gpu = {"name": "NVIDIA H200", "uuid": "0" * 12}
    environment = {
        "torch": "2.11",
        "driver": "580",
        "gpus": [gpu, gpu],
        "cpu": {"name": "x", "cores": 4},
        "cuda": "13.0",
        "source": {"commit": "a" * 40, "hash": "b" * 64},
        "packages": {"numpy": "2.4"},
    }
    changed = environment | {
        "torch": "2.12",
        "driver": "590",
        "gpus": [gpu | {"name": "NVIDIA H100"}],
        "packages": {"numpy": "2.5"},
        "source": {"commit": "c" * 40, "hash": "d" * 64},
    }
    state = {"clock_mhz": 1980.0, "throttle": "none", "data_source": "mirror"}
    a = recorded(
        tmp_path / "a",
        [timed("v", 0.1, **state)],
        {"environment": environment, "profile": "full", "seed": 0, "data_source": "auto"},
        provenance={"sizes": {"batch": 8, "steps": 5}},
        data={"wikitext-2": {"sha256": "1" * 16}},
    )
    slow = state | {"clock_mhz": 1500.0, "throttle": "sw_power_cap", "data_source": "synthetic"}
    b = recorded(
        tmp_path / "b",
        [timed("v", 0.2, **slow), timed("w", 0.1, experiment="f")],
        {"environment": changed, "profile": "smoke", "seed": 1, "data_source": "auto"},
        provenance={"sizes": {"batch": 4, "steps": 5}},
        data={"wikitext-2": {"sha256": "2" * 16}},
    )
    found = circumstances([a], [b])
    assert {one.name: (one.a, one.b) for one in found} == {
        "device": ("2 x NVIDIA H200", "1 x NVIDIA H100"),
        "profile": ("full", "smoke"),
        "data source of rows": ("mirror", "synthetic"),
        "seed": ("0", "1"),
        "throttled rows": ("0 of 1 rows", "1 of 1 rows (sw_power_cap)"),
        "clock_mhz": ("1980 MHz (median of 1 of 1 values)", "1500 MHz"),
        "torch": ("2.11", "2.12"),
        "driver": ("580", "590"),
        "source.commit": ("a" * 12, "c" * 12),
        "source.hash": ("b" * 12, "d" * 12),
        "sizes of nb/e: batch": ("8", "4"),
        "data of nb/e: wikitext-2.sha256": ("1" * 16, "2" * 16),
        "gpus.name": ("NVIDIA H200", "NVIDIA H100"),
        "packages.numpy": ("2.4", "2.5"),
    }
    assert [one.name for one in found[:4]] == ["device", "profile", "data source of rows", "seed"]
    assert [one.name for one in circumstances([b], [a])] == [one.name for one in found]
    assert circumstances([a], [a]) == []


def test_what_differs_within_one_side_and_throttling_on_both_are_stated(tmp_path):
    def run_with(name, profile):
        return recorded(tmp_path / name, [timed("v", 0.1, throttle="thermal")], {"profile": profile})

    a, b = [run_with("a", "full"), run_with("a2", "smoke")], [run_with("b", "full")]
    found = {one.name: (one.a, one.b) for one in circumstances(a, b)}
    assert found == {"profile": ("full, smoke", "full"), "throttled rows": ("2 of 2 rows (thermal)", "1 of 1 rows (thermal)")}
