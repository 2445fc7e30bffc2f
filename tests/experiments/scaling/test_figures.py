"""The cost of communication is drawn under its own name: a share from a profile, and a difference that may be negative."""

from dataclasses import replace

import pandas as pd
import pytest
from matplotlib.collections import PolyCollection

from hyperion.experiments.scaling.figures import (
    COMPUTING,
    LEAST_EXPOSED,
    MEAN_EXPOSED,
    busy_shares,
    communication,
    headlines,
    host_bound_steps,
    scaling,
)
from hyperion.experiments.scaling.sentences import parts_of_the_step
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import BUSY_GPU, Row, Run
from tests.book.made_up.run import GPU


def drawn(tmp_path, *metrics):
    """The legend and the values of both panels, for a training with the given metrics on two and four devices."""
    run = Run.create(tmp_path, {"environment": GPU})
    common = {"notebook": "08_scaling_analysis", "experiment": "scaling", "variant": "language_fsdp", "dtype": "bf16", "n": 20}
    rows = []
    for metric, value, more in metrics:
        for mode in ("weak", "strong"):
            for ranks in (2, 4):
                params = {"model": "lm", "strategy": "fsdp", "mode": mode, "ranks": ranks} | more
                interval = {} if metric == "share" else {"ci_low": value - 0.01, "ci_high": value + 0.01}
                rows.append(Row(**common, metric=metric, value=value, params=params, **interval))
    run.record("08_scaling_analysis", "scaling", rows, pd.DataFrame({"x": [1]}), input_hash="h")
    with styled():
        figure = communication(Material(run))
    bands = [(axes, area) for axes in figure.axes for area in axes.collections if isinstance(area, PolyCollection)]
    least = [value for _, value, more in metrics if LEAST_EXPOSED in more.values()]
    ends = [end for axes, area in bands for end in area.get_datalim(axes.transData).intervaly]
    assert ends == pytest.approx([least[0], EXPOSED[1]] * 2 if least else [])
    for container in (container for axes in figure.axes for container in axes.containers):
        hollow = "difference" in container.get_label()
        assert container.lines[0].get_fillstyle() == ("none" if hollow else "full")
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    return legends, " ".join(figure.get_supxlabel().split())


EXPOSED = ("share", 0.04, {"what": "exposed communication", "of": MEAN_EXPOSED})
LEAST = ("share", 0.01, {"what": "exposed communication", "of": LEAST_EXPOSED})


def test_exposed_communication_and_the_difference_have_their_own_lines(tmp_path):
    legends, notes = drawn(tmp_path, EXPOSED, ("alone_difference", -0.06, {}))
    assert legends == [["language fsdp, exposed", "language fsdp, difference from alone"]] * 2
    assert "the difference is no share of communication" in notes and "Solid, filled: exposed communication" in notes
    assert "Band" not in notes


def test_a_band_connects_the_mean_with_the_rank_that_waits_least(tmp_path):
    legends, notes = drawn(tmp_path, EXPOSED, LEAST, ("alone_difference", -0.06, {}))
    assert (
        legends == [["language fsdp, exposed", "language fsdp, difference from alone"]] * 2 and "Band: down to the rank" in notes
    )


def test_a_run_of_an_earlier_version_has_the_difference_only(tmp_path):
    legends, notes = drawn(tmp_path, ("communication_share", -0.06, {}))
    assert legends == [["language fsdp, difference from alone"]] * 2 and "Solid" not in notes


def cells(variant: str, busy: dict[tuple[int, str], float], of: dict | None = None) -> list[Row]:
    """Efficiencies of both modes on two devices, and the share of the step in which the GPUs are busy.

    Args:
        of: parameter of the shares on two devices; {} for a run of an earlier version.
    """
    common = {"notebook": "08_scaling_analysis", "experiment": "scaling", "variant": variant, "dtype": "bf16", "n": 20}
    several = {"of": COMPUTING} if of is None else of
    rows = [
        Row(**common, metric="share", value=v, params={"ranks": r, "mode": m} | BUSY_GPU | (several if r > 1 else {}))
        for (r, m), v in busy.items()
    ]
    for mode in ("weak", "strong"):
        params = {"model": variant, "strategy": "ddp", "mode": mode, "ranks": 2}
        ends = {"ci_low": 0.8, "ci_high": 0.82, "limit_source": "no limit"}
        rows += [Row(**common, metric=m, value=0.81, params=params, **ends) for m in ("speedup", "scaling_efficiency")]
    return rows


def test_an_efficiency_is_no_headline_if_the_host_limits_one_of_its_steps(tmp_path):
    rows = cells("filled", {(1, "weak"): 0.95, (2, "weak"): 0.91, (2, "strong"): 0.9})
    rows += cells("launched", {(1, "weak"): 0.95, (2, "weak"): 0.91, (2, "strong"): 0.6})
    rows += cells("small", {(1, "weak"): 0.4, (2, "weak"): 0.95, (2, "strong"): 0.95})
    rows += cells("unknown", {})  # runs of earlier versions
    quoted = [(quote.row.variant, quote.row.params["mode"]) for quote in headlines(rows, lambda row: True)]
    assert quoted == [("filled", "weak"), ("filled", "strong"), ("launched", "weak")]
    traced = replace(rows[0], variant="unknown", value=0.1, params={"ranks": 2, "mode": "weak", **EXPOSED[2]})
    on_a_cpu = [quote.row.variant for quote in headlines([*rows, traced], lambda row: True)]
    assert on_a_cpu.count("unknown") == 2, "traced, without a busy share"
    run = Run.create(tmp_path, {"environment": GPU})
    run.record("08_scaling_analysis", "scaling", rows, pd.DataFrame({"x": [1]}), input_hash="h")
    with styled():
        notes = " ".join(scaling(Material(run)).get_supxlabel().split())
    assert "launched on 2 (strong): 60.0 %, small on 1: 40.0 %." in notes and "filled" not in notes


def exposed(variant: str, of: str, shares: dict[tuple[int, str], float]) -> list[Row]:
    """Exposed communication by number of ranks and mode."""
    common = {"notebook": "08_scaling_analysis", "experiment": "scaling", "variant": variant, "dtype": "bf16", "n": 3}
    what = {"what": "exposed communication", "of": of}
    return [Row(**common, metric="share", value=v, params={"ranks": r, "mode": m} | what) for (r, m), v in shares.items()]


def test_a_gpu_that_waits_for_another_rank_is_not_busy():
    # In an earlier version, the GPUs seem busy during the whole step, and during 0.4 of it they wait.
    rows = cells("old", {(1, "weak"): 0.95, (2, "weak"): 0.97, (2, "strong"): 1.0}, of={})
    rows += exposed("old", MEAN_EXPOSED, {(2, "weak"): 0.02, (2, "strong"): 0.4})
    rows += cells("new", {(1, "weak"): 0.95, (2, "weak"): 0.89, (2, "strong"): 0.9})
    rows += exposed("new", MEAN_EXPOSED, {(2, "weak"): 0.4, (2, "strong"): 0.5})
    rows += exposed("new", LEAST_EXPOSED, {(2, "weak"): 0.01, (2, "strong"): 0.3})
    shares = {("old", 1, "weak"): 0.95, ("old", 2, "weak"): 0.95, ("old", 2, "strong"): 0.6}
    shares |= {("new", 1, "weak"): 0.95, ("new", 2, "weak"): 0.89, ("new", 2, "strong"): 0.9}
    assert busy_shares(rows) == pytest.approx(shares)
    assert set(host_bound_steps(rows)) == {("old", 2, "strong"), ("new", 2, "weak")}
    quoted = [(quote.row.variant, quote.row.params["mode"]) for quote in headlines(rows, lambda row: True)]
    assert quoted == [("old", "weak"), ("new", "strong")]


@pytest.mark.parametrize(("proven", "bound"), [(0.25, True), (0.31, False), (-0.5, True)])
def test_communication_that_the_step_alone_proves_is_not_the_host(proven, bound):
    rows = cells("slow links", {(2, "weak"): 0.6})
    difference = replace(rows[0], metric="alone_difference", value=proven + 0.1, ci_low=proven, ci_high=proven + 0.2)
    assert (("slow links", 2, "weak") in host_bound_steps([*rows, difference])) is bound


def test_sentences_quote_the_parts_of_one_step_only():
    rows = cells("filled", {(1, "weak"): 0.95, (2, "weak"): 0.91, (2, "strong"): 0.62})
    common = {"notebook": "08_scaling_analysis", "experiment": "scaling", "variant": "filled", "dtype": "bf16", "n": 20}
    for mode, value in (("weak", 0.04), ("strong", 0.08)):
        params = {"mode": mode, "ranks": 2}
        rows += exposed("filled", MEAN_EXPOSED, {(2, mode): value}) + exposed("filled", LEAST_EXPOSED, {(2, mode): value / 4})
        ends = {"ci_low": value - 0.05, "ci_high": value + 0.05}
        rows.append(Row(**common, metric="alone_difference", value=value, params=params, **ends))
    weak, strong = (row for row in rows if row.metric == "scaling_efficiency")
    assert parts_of_the_step(rows, weak) == [
        "Without exposed communication, the GPUs are busy during 91.0 % of the step: they rarely wait for the host.",
        "In the profiled steps, 4.0 % of the time is exposed communication.",
        "The rank with the least has 1.0 %: the exchange itself costs at most this, the rest is waiting.",
        "The difference from the same step alone is 4.0 % (-1.0 to 9.0 %): no share, because the interval is not above zero.",
    ]
    assert parts_of_the_step(rows, strong) == [
        "Without exposed communication, the GPUs are busy during 62.0 % of the step: the host limits the speed.",
        "In the profiled steps, 8.0 % of the time is exposed communication.",
        "The rank with the least has 2.0 %: the exchange itself costs at most this, the rest is waiting.",
        "The difference from the same step alone is 8.0 % (3.0 to 13.0 %): a share.",
    ]
    earlier = [replace(strong, metric="communication_share", value=0.2, ci_low=0.1, ci_high=0.3), strong]
    assert parts_of_the_step(earlier, strong) == ["The difference from the same step alone is 20.0 % (10.0 to 30.0 %): a share."]
