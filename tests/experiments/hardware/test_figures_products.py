"""What the figures of products show: limits, shapes, shares, and notes on what is not there."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from hyperion.book.outline import headlines
from hyperion.experiments.hardware.figures_products import best_products, operand_data
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.products import DATA, GPU, LIMITS, SHAPES, UNSUPPORTED, best_rows, data_rows
from tests.book.made_up.run import GPU as ENVIRONMENT


def drawn(function, folder, experiment, rows):
    run = Run.create(folder / "run", {"environment": ENVIRONMENT})
    run.record(LIMITS, experiment, rows, pd.DataFrame({"time_s": [0.1]}), input_hash="h")
    with styled():
        return function(Material(run))


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    legends = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    return " | ".join([*found, *legends, figure.get_supxlabel(), figure.get_suptitle()])


def bars(axes):
    """Widths of the filled bars by their line."""
    return {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in axes.patches if bar.get_facecolor()[3] > 0}


@pytest.fixture
def random():
    return np.random.default_rng(7)


def test_each_format_has_its_best_its_limit_its_shape_and_its_share(tmp_path, random):
    rows = best_rows(random, limited=True)
    figure = drawn(best_products, tmp_path, "best_products", rows)
    fastest = [row for row in rows if row.variant == "fastest found"]
    rates, shares = figure.axes
    assert [label.get_text() for label in rates.get_yticklabels()] == list(GPU)
    assert [bars(rates)[place] for place in range(len(GPU))] == pytest.approx([row.value for row in fastest])
    outlines = [bar.get_width() for bar in rates.patches if bar.get_facecolor()[3] == 0]
    assert outlines == pytest.approx([limit for limit, *_ in GPU.values()])
    assert [bars(shares)[place] for place in range(len(GPU))] == pytest.approx([100 * row.fraction_of_limit for row in fastest])
    shown = texts(figure)
    assert "at 8192×4096×8192" in shown and "% of 66.90" in shown
    assert "fp64 301 of 512, fp32 344 of 512: limit of 5 s" in shown and "int8: all shapes seen" in shown
    assert "not measured" not in shown


def test_given_shapes_are_marked_at_their_own_share(tmp_path, random):
    rows = best_rows(random, limited=True)
    figure = drawn(best_products, tmp_path, "best_products", rows)
    marks = [line for line in figure.axes[1].lines if len(line.get_xdata()) == len(GPU)]
    for line, name in zip(marks, SHAPES, strict=True):
        wanted = [100 * row.fraction_of_limit for row in rows if row.params.get("shape") == name]
        assert list(line.get_xdata()) == pytest.approx(wanted) and name in line.get_label()


def test_a_cpu_without_limits_has_one_panel_and_says_what_it_does_not_multiply(tmp_path, random):
    figure = drawn(best_products, tmp_path, "best_products", best_rows(random, limited=False))
    assert len(figure.axes) == 1 and "int8" not in figure.axes[0].get_xlabel()
    shown = " ".join(texts(figure).split())
    assert "fp32; bf16: no limit" in shown
    assert all(f"{dtype}: not measured ({reason})" in shown for dtype, reason in UNSUPPORTED.items())
    assert len(figure.axes[0].lines) >= len(SHAPES)


def test_where_nothing_was_found_there_is_no_figure(tmp_path, random):
    missing = [row for row in best_rows(random, limited=False) if row.value is None]
    assert drawn(best_products, tmp_path, "best_products", missing) is None


def test_a_refused_given_shape_is_told_and_not_drawn(tmp_path, random):
    rows = best_rows(random, limited=True)
    place = next(i for i, row in enumerate(rows) if (row.variant, row.dtype) == ("given shape", "int8"))
    no_value = {"value": None, "value_reason": "refused: sizes", "n": None, "ci_low": None, "ci_high": None}
    rows[place] = replace(rows[place], **no_value)
    figure = drawn(best_products, tmp_path, "best_products", rows)
    assert f"int8 {rows[place].params['shape']}: not measured (refused: sizes)." in texts(figure)


def test_power_and_clock_stand_beside_the_rates_of_each_alone(tmp_path, random):
    figure = drawn(operand_data, tmp_path, "operand_data", data_rows(random, limited=True))
    rates, power, clock = figure.axes
    assert [label.get_text() for label in rates.get_yticklabels()] == list(DATA)
    assert list(bars(power).values()) == pytest.approx([watts for _, watts, _ in DATA.values()])
    assert list(bars(clock).values()) == pytest.approx([mhz for *_, mhz in DATA.values()])
    shown = " ".join(texts(figure).split())  # notes are wrapped
    assert "×1.3" in shown and "8192³ in bf16" in shown and "1,070 TFLOPS" in shown and "speed relative to normal data" in shown


def test_a_cpu_that_tells_no_power_gets_the_reason(tmp_path, random):
    figure = drawn(operand_data, tmp_path, "operand_data", data_rows(random, limited=False))
    shown = " ".join(texts(figure).split())
    assert len(figure.axes) == 1 and "rights that an ordinary user has not" in shown and "clock is not shown" in shown


def test_zeros_make_no_headline(tmp_path, random):
    """Nobody's best product is one of zeros: rows of other data have warm caches, and those are nobody's ceiling."""
    run = Run.create(tmp_path / "run", {"environment": ENVIRONMENT})
    for experiment, rows in (("best_products", best_rows(random, True)), ("operand_data", data_rows(random, True))):
        run.record(LIMITS, experiment, rows, pd.DataFrame({"time_s": [0.1]}), input_hash="h")
    quoted = [headline.row for headline in headlines(Material(run))]
    assert quoted and {row.experiment for row in quoted} == {"best_products"}
