"""What the figures of quantised weights, of decoding and of training with few bits show."""

from dataclasses import replace

import pytest

from hyperion.experiments.quantization.figures import decode_speed, qlora, quantization
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.quantization import quantization_chapters
from tests.book.made_up.run import GPU


@pytest.fixture
def material(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in quantization_chapters():
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def test_schemes_have_bytes_quality_and_speed(material):
    figure = drawn(quantization, material)
    quality, speed = figure.axes
    assert [text.get_text() for text in quality.get_legend().get_texts()] == [
        "int8 weight-only (PyTorch)",
        "NF4 (PyTorch)",
        "int8 static (ONNX Runtime)",
    ]
    # The bytes are those of the model whose perplexity is drawn, also if a scheme of this name quantised another model.
    assert [marks.lines[0].get_xdata()[0] for marks in quality.containers] == [1.0, 0.6, 2.0]
    assert [bar.get_width() for bar in speed.patches] == [0.9, 0.5]
    assert "fp8: not measured (unavailable: made up)" in figure.get_supxlabel()


def test_each_model_has_a_panel_with_its_limits(material):
    figure = drawn(decode_speed, material)
    small, large = figure.axes
    assert [bar.get_width() for bar in small.patches] == [2.0] and [bar.get_width() for bar in large.patches] == [9.0, 4.0]
    assert [line.get_xdata()[0] for line in large.lines if line.get_color() == "black"] == [1.0, 1.0]
    assert "NF4: not measured" in figure.get_supxlabel()
    # No row has a prediction, so the note does not explain one.
    assert "Black: limit" in figure.get_supxlabel() and "Orange" not in figure.get_supxlabel()


def test_a_missing_limit_is_noted_with_its_model(tmp_path, material):
    run = Run.create(tmp_path / "older", {"environment": GPU})
    rows = [
        replace(row, limit=None, limit_source="no limit: made up") if row.params["model"] == "small" else row
        for row in material.of("decode_speed")
    ]
    run.record(rows[0].notebook, "decode_speed", rows, material.samples("decode_speed"), input_hash="h")
    note = drawn(decode_speed, Material(run)).get_supxlabel()
    assert "original, small: no limit: made up." in note and "large: no limit" not in note


def test_twins_have_curves_and_optimizers_have_bytes(material):
    curves, states = drawn(qlora, material).axes
    assert [line.get_label() for line in curves.lines] == ["LoRA", "QLoRA"]
    assert [round(bar.get_width(), 6) for bar in states.patches] == [8.0, 2.1]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert [function(empty) for function in (quantization, decode_speed, qlora)] == [None] * 3
