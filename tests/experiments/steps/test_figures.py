"""What the baseline figures show: phases beside their least times, and the batch that did not fit."""

from dataclasses import replace

import pytest
from matplotlib.patches import Rectangle

from hyperion.experiments.steps.figures import batch_scaling, model_steps, operator_cost, spread_above
from hyperion.figures.material import Material
from hyperion.figures.style import new_figure, png, styled
from hyperion.results import Run
from tests.book.made_up.baseline import ABSENT, MIB_PER_SAMPLE, STEPS
from tests.book.made_up.run import GPU


def drawn(function, material):
    with styled():
        figure = function(material)
    return figure, " | ".join([*(t.get_text() for axes in figure.axes for t in axes.texts), figure.get_supxlabel()])


def bars(axes, hatched):
    """Heights of the bars of a panel by their place, lowest first."""
    found = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_height() and bool(p.get_hatch()) == hatched]
    return [bar.get_height() for bar in sorted(found, key=lambda bar: (bar.get_x(), bar.get_y()))]


def test_a_hosts_costs_are_bars_and_a_block_that_was_left_out_is_a_note(material, cpu_material):
    figure, shown = drawn(operator_cost, material)
    eager, compiled = bars(figure.axes[1], hatched=False)
    assert bars(figure.axes[0], hatched=False)[0] == pytest.approx(31, rel=0.02) and "µs" in shown
    assert eager == pytest.approx(44 * 31, rel=0.02) and compiled == pytest.approx(2100, rel=0.02)
    assert "Besides its operators, a step takes 43" in shown
    figure, shown = drawn(operator_cost, cpu_material)
    assert len(figure.axes) == 1 and "left out by this profile" in shown


def test_phases_are_stacked_beside_their_least_times(material):
    figure, shown = drawn(model_steps, material)
    assert [axes.get_title(loc="left") for axes in figure.axes[:3]] == ["resnet50", "vit_b_16", "encoder_d512_h8_l6"]
    times = [times for model, _, _, times in STEPS if model == "resnet50"]
    assert bars(figure.axes[0], hatched=False) == pytest.approx([part for each in times for part in each[:3]], rel=0.02)
    assert sum(bars(figure.axes[0], hatched=True)) == pytest.approx(sum(each[3] for each in times), rel=0.02)
    assert "Percentages: least time divided" in shown and "Batch 32" in shown and "No least time" not in shown
    png(figure)
    assert figure.axes[0].get_legend().get_window_extent().y1 < figure._suptitle.get_window_extent().y0


def test_each_variant_has_its_name_its_prediction_and_its_two_utilisations(material):
    figure, shown = drawn(model_steps, material)
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert names == ["fp32", "tf32", "bf16", "bf16\nch.-last", "bf16\nch.-last\ncompiled"]
    foretold = [line.get_ydata()[0] for line in figure.axes[0].lines]
    assert foretold == pytest.approx([0.8 * sum(each[:3]) for m, _, _, each in STEPS if m == "resnet50"], rel=1e-6)
    assert len(bars(figure.axes[3], hatched=False)) == 2 * len(names)
    assert f"vit_b_16 bf16 ch.-last: {ABSENT}" in shown and "this run's gemm" in shown


def test_the_note_says_which_peak_the_utilisation_and_the_least_time_use(tmp_path, material):
    assert "maximum clock" in drawn(model_steps, material)[1] and "published peak" not in drawn(model_steps, material)[1]
    rows = [replace(row, limit=1.08) if row.metric == "mfu" else row for row in material.of("model_steps")]
    run = Run.create(tmp_path / "run", {"environment": GPU})
    run.record(rows[0].notebook, "model_steps", rows, material.samples("model_steps"), input_hash="h")
    assert "MFU: relative to the published peak" in drawn(model_steps, Material(run))[1]


def test_without_limits_there_are_no_hatched_bars_and_the_note_says_why(cpu_material):
    figure, shown = drawn(model_steps, cpu_material)
    assert not any(bars(axes, hatched=True) for axes in figure.axes)
    assert "No least time: no data sheet entry" in shown and "Percentages: least time" not in shown
    assert len(bars(figure.axes[3], hatched=False)) == 5, "without a peak the fastest product is all there is"


@pytest.mark.slow
def test_the_batch_that_did_not_fit_is_a_cross_on_the_line(material):
    figure, shown = drawn(batch_scaling, material)
    crosses = [line for line in figure.axes[1].lines if line.get_marker() == "x"]
    assert len(crosses) == len(MIB_PER_SAMPLE) and "batches that did not fit" in shown
    assert {f"{int(cross.get_xdata()[0]):,}" for cross in crosses} <= {text.get_text() for text in figure.axes[1].texts}
    # The line meets the cap of 24 GiB at the largest batch; a quarter more lies above it.
    assert all(line.get_ydata()[0] == pytest.approx(1.25 * 23.6 + 0.4, rel=0.05) for line in crosses)
    assert figure.axes[1].get_ylabel() == "GiB of device memory"


def test_batches_beside_their_crosses_do_not_stand_on_each_other():
    with styled():
        figure, (axes,) = new_figure("crosses", "a machine")
        axes.plot([0, 100], [0, 1])
        for x in (50, 51, 52, 90):
            axes.annotate("12,345", (x, 0.5), xytext=(0, 7), textcoords="offset points", ha="center", va="bottom")
        spread_above(axes)
        figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
    assert axes.texts[0].xyann == axes.texts[3].xyann == (0, 7)


@pytest.mark.slow
def test_resident_memory_is_called_so(cpu_material):
    assert drawn(batch_scaling, cpu_material)[0].axes[1].get_ylabel() == "GiB resident in the process"
