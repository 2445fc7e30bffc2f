"""What the training figures show: floors, baselines, chance."""

import math

from hyperion.experiments.baselines.figures import (
    image_classifier,
    language_model,
    leakage,
    parity_ladder,
    perplexity,
    throughput,
)
from hyperion.figures.material import Material
from hyperion.figures.style import png, styled
from hyperion.results import Run
from tests.book.made_up.run import GPU


def drawn(function, material):
    with styled():
        figure = function(material)
    return figure, " | ".join([*(t.get_text() for axes in figure.axes for t in axes.texts), figure.get_supxlabel()])


def heights(axes):
    return {round(float(line.get_ydata()[0]), 6) for line in axes.lines if len(set(line.get_ydata())) == 1}


def test_natural_text_has_baselines_but_no_floor(material):
    figure, shown = drawn(language_model, material)
    assert "unigram (812.4)" in shown and "interpolated bigram (262.7)" in shown and "floor" not in shown
    assert "entropy of natural text is not known" in shown
    assert {round(math.log(812.4), 6), round(math.log(262.7), 6)} <= heights(figure.axes[1])


def test_synthetic_text_has_its_floor_in_both_panels(cpu_material):
    figure, shown = drawn(language_model, cpu_material)
    assert shown.count("floor") == 2
    assert 2.9 in heights(figure.axes[0]) and 2.9 in heights(figure.axes[1])


def test_accuracy_lies_between_chance_and_the_best_possible(material, cpu_material):
    assert "chance 10 %" in drawn(image_classifier, material)[1]
    assert "best possible" not in drawn(image_classifier, material)[1]
    assert "best possible 95.0 %" in drawn(image_classifier, cpu_material)[1]


def test_the_leakage_line_is_the_entropy_of_a_token(material):
    assert "ln V = 4.159" in drawn(leakage, material)[1]


def test_a_steady_step_is_drawn_as_a_reference_and_called_no_bound(material):
    figure, shown = drawn(throughput, material)
    steady = [line for axes in figure.axes for line in axes.lines if line.get_label() == "a steady step, timed alone"]
    assert steady and {line.get_linestyle() for line in steady} == {":"} and "can be faster than" in shown.replace("\n", " ")


def test_perplexities_are_written_beside_their_bars(material):
    shown = drawn(perplexity, material)[1]
    assert "38.20" in shown and "262.7" in shown and "812.4" in shown


def test_a_single_step_with_another_loss_is_a_mark(tmp_path, material):
    rows, samples = material.of("parity_ladder"), material.samples("parity_ladder")
    losses = samples.assign(loss=8.0)
    losses.loc[(losses["rung"] == "accumulated") & (losses["step"] == 7), "loss"] += 1e-6
    run = Run.create(tmp_path / "run", {"environment": GPU})
    run.record(rows[0].notebook, "parity_ladder", rows, losses, input_hash="h")
    figure = drawn(parity_ladder, Material(run))[0]
    png(figure)
    left = figure.axes[0]
    assert left.get_legend().get_window_extent().x0 >= left.get_window_extent().x1, "the legend covers marks"
    (curve,) = left.lines
    assert curve.get_marker() == "o" and [*curve.get_xdata()[curve.get_markevery()]] == [7]
    assert all(line.get_marker() == "None" for line in drawn(parity_ladder, material)[0].axes[0].lines)
