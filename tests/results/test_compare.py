"""Comparing relaunches: a real slowdown is confirmed, a small one and noise are not."""

import numpy as np
import pandas as pd
import pytest

from hyperion.errors import HyperionError
from hyperion.results import Row, Run, compare, relaunches

NOISE = 0.01


@pytest.fixture
def relaunched(tmp_path):
    """Makes `count` runs of ten timed variants, the first of them slower by `slowdown`."""

    def make(side, count, slowdown=0.0, information=None):
        random = np.random.default_rng([count, *map(ord, side)])
        for launch in range(count):
            run = Run.create(tmp_path / side / str(launch), information or {})
            rows = []
            for variant in range(10):
                time = 0.1 * (1 + (slowdown if variant == 0 else 0)) * random.lognormal(0, NOISE)
                common = {
                    "notebook": "nb",
                    "experiment": "e",
                    "variant": f"v{variant}",
                    "n": 30,
                    "limit_source": "none known",
                }
                rows.append(Row(**common, metric="step_time_s", value=time, ci_low=time, ci_high=time))
                rows.append(Row(**common, metric="tokens_per_s", value=1 / time, ci_low=1 / time, ci_high=1 / time))
            run.record("nb", "e", rows, pd.DataFrame({"x": [0]}), input_hash="h")
        return relaunches(str(tmp_path / side))

    return make


def verdicts(comparisons):
    return {(c.name, c.metric): c.verdict for c in comparisons}


def test_a_slowdown_of_ten_percent_is_confirmed_in_both_directions(relaunched):
    comparisons = compare(relaunched("a", 5), relaunched("b", 5, slowdown=0.10))
    found = verdicts(comparisons)
    assert found.pop(("e v0", "step_time_s")) == "regression"
    assert found.pop(("e v0", "tokens_per_s")) == "regression"
    assert set(found.values()) == {"same"}
    assert [c.name for c in comparisons[:2]] == ["e v0"] * 2 and comparisons[0].change == pytest.approx(-0.09, abs=0.03)
    back = verdicts(compare(relaunched("c", 5, slowdown=0.10), relaunched("d", 5)))
    assert back["e v0", "step_time_s"] == "improvement"


@pytest.mark.parametrize("slowdown", [0.0, 0.02])
def test_noise_and_two_percent_are_not_flagged(relaunched, slowdown):
    assert set(verdicts(compare(relaunched("a", 5), relaunched("b", 5, slowdown=slowdown))).values()) == {"same"}


def test_one_against_one_is_unconfirmed(relaunched):
    comparisons = compare(relaunched("a", 1), relaunched("b", 1, slowdown=0.10))
    assert verdicts(comparisons)["e v0", "step_time_s"] == "unconfirmed"
    assert all(c.p_value is None for c in comparisons)
    assert "regression" not in verdicts(comparisons).values()


def test_launches_that_did_not_take_turns_are_refused(relaunched):
    one, other = ({"relaunch": {"call": name}} for name in ("monday", "tuesday"))
    monday = relaunched("a", 5, information=one)
    assert compare(monday, relaunched("b", 5, information=one))
    with pytest.raises(HyperionError, match="did not take turns with each other"):
        compare(monday, relaunched("c", 5, information=other))


def test_runs_that_share_nothing_and_folders_without_runs_are_refused(relaunched, tmp_path):
    with pytest.raises(HyperionError, match="share no comparable value"):
        compare(relaunched("a", 1), [Run.create(tmp_path / "empty", {})])
    (tmp_path / "none").mkdir()
    with pytest.raises(HyperionError, match="no run in this folder"):
        relaunches(str(tmp_path / "none"))


def test_a_search_is_compared_whatever_shape_won_and_given_shapes_only_with_themselves(tmp_path):
    def run_with(name, m, seen):
        common = {"notebook": "nb", "experiment": "best_products", "metric": "gemm_tflops", "dtype": "bf16", "value": 700.0,
                  "n": 30, "ci_low": 699.0, "ci_high": 701.0, "limit_source": "none known", "check": "c", "check_error": 0.0,
                  "check_tolerance": 1.0}  # fmt: skip
        shape = {"m": m, "n": 8192, "k": 8192, "cache": "cold"}
        found = Row(variant="fastest found", params=shape | {"seen": seen, "shapes": 512, "stopped": f"{seen} seen"}, **common)
        run = Run.create(tmp_path / name, {})
        rows = [found, Row(variant="finalist", params=shape, **common)]
        run.record("nb", "best_products", rows, pd.DataFrame({"x": [0]}), input_hash="h")
        return run

    compared = compare([run_with("a", 4096, 400)], [run_with("b", 8192, 512)])
    assert len(compared) == 1 and "fastest found" in compared[0].name
