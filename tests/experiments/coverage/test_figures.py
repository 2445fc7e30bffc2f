"""What the figures and tables of operators and architectures show."""

import pytest

from hyperion.experiments.coverage.claims import architecture_claims, operator_claims
from hyperion.experiments.coverage.figures import (
    PLOTS,
    TITLES,
    architectures,
    count_table,
    family_table,
    gap_table,
    operator_counts,
    operator_errors,
    steps_of,
)
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.operators import operator_chapters
from tests.book.made_up.run import GPU


@pytest.fixture
def material(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in operator_chapters():
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def test_the_bars_of_each_format_and_pass_add_up_to_all_operators(material):
    axes = drawn(operator_counts, material).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "fp32 forward",
        "fp32 backward",
        "bf16 forward",
        "bf16 backward",
    ]
    assert {bar.get_x() + bar.get_width() for bar in axes.patches[-4:]} == {10.0}
    labels = [text for text in axes.texts if text.get_text()]
    assert all(text.get_text().isdecimal() or text.xy[0] == 10 for text in labels), (
        "the numbers of narrow parts are after the bar"
    )
    assert any(text.get_text().startswith("1 ") for text in labels if text.xy[0] == 10)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["passed", "failed", "unsupported", "no gradient"]


def test_the_curve_ends_at_the_share_of_all_operators_and_gaps_are_named(material):
    figure = drawn(operator_errors, material)
    curves = {line.get_label(): line for line in figure.axes[0].lines if not line.get_label().startswith("_")}
    fp32 = curves["fp32, 2 operators and variants"]
    assert list(fp32.get_xdata()) == [1e-4, 0.25] and list(fp32.get_ydata()) == [0.5, 1.0]
    assert "logcumsumexp (bf16), sort (bf16)" in figure.get_supxlabel() and "fft.rfft" not in figure.get_supxlabel()


def test_each_architecture_has_a_line_and_a_failure_has_its_reason(material):
    figure = drawn(architectures, material)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["llama", "bert", "albert"]
    series = {line.get_label(): len(line.get_xdata()) for line in figure.axes[0].lines if not line.get_label().startswith("_")}
    assert series == {"forward": 2, "backward": 2, "generate": 1}
    assert "albert, build: failed: TypeError: made up" in figure.get_supxlabel()
    assert "no generation" not in figure.get_supxlabel()


def test_the_gap_report_has_a_line_for_each_gap_with_its_reason(material):
    table = gap_table(material.of("operator_suite"))
    assert list(table["operator"]) == ["logcumsumexp", "fft.rfft", "sort"]
    assert list(table["status"]) == ["known", "unsupported", "failed"]
    assert list(table["pass"]) == ["backward", "forward", "backward"]
    assert "30 tolerances: a made-up cause" in table["reason"][0] and table["reason"][1] == "RuntimeError: no kernel"
    assert list(count_table(material.of("operator_suite"))["unsupported"]) == ["2"] * 4


def test_the_table_of_families_counts_what_passes(material):
    rows = material.of("architectures")
    assert family_table(rows).to_dict("records") == [
        {"family": "decoder", "architectures": "llama", "pass": "1 of 1", "parameters": "20,480 to 20,480"},
        {"family": "encoder", "architectures": "bert, albert", "pass": "1 of 2", "parameters": "20,480 to 20,480"},
    ]
    assert len(steps_of(rows)) == 7


def test_claims_name_what_does_not_hold(material):
    failed = [claim for holds, claim in operator_claims(material.of("operator_suite")) if not holds]
    assert failed[0].startswith("sort, bf16, backward") and "only 7" in failed[1] and len(failed) == 5
    failed = [claim for holds, claim in architecture_claims(material.of("architectures")) if not holds]
    assert failed == ["albert, build: failed: TypeError: made up", "2 architectures pass"]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert [plot.draw(empty) for plot in PLOTS] == [None] * 3 and {plot.experiment for plot in PLOTS} == set(TITLES)
