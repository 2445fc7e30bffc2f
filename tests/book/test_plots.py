"""Every figure is drawn from rows, small, and the same each time; what has no rows is not drawn."""

import io
from dataclasses import replace

import pytest
from PIL import Image

from hyperion.book.outline import picture
from hyperion.book.plots import all_plots, draw
from hyperion.book.report import report_page
from hyperion.errors import HyperionError
from hyperion.figures.material import Material
from hyperion.results import Run

PLOTS = all_plots()
NAMES = [plot.name for plot in PLOTS]


@pytest.mark.parametrize("plot", PLOTS, ids=NAMES)
def test_a_figure_is_a_readable_picture_under_150_kb(material, cpu_material, plot):
    for source in (material, cpu_material):
        content = picture(plot, source)
        assert len(content) < 150_000
        image = Image.open(io.BytesIO(content))
        assert 800 <= image.width <= 1400 and 250 <= image.height <= 900


@pytest.mark.parametrize("name", NAMES)
def test_without_rows_there_is_no_figure(tmp_path, name):
    assert draw(name, Material(Run.create(tmp_path / "run", {"environment": {}}))) is None


def test_the_same_rows_give_the_same_bytes(material):
    assert draw("gemm", material) == draw("gemm", material)
    assert draw("image_grid", material) == draw("image_grid", material)


@pytest.mark.parametrize("name", ["gemm", "bandwidth"])
def test_published_numbers_are_drawn_only_when_asked(material, name):
    assert draw(name, material) != draw(name, material, published=True)


def test_an_unknown_figure_is_refused_with_the_names(material):
    with pytest.raises(HyperionError, match="no figure 'gem'") as refusal:
        draw("gem", material)
    assert "gemm" in refusal.value.next_step


def with_refused_values(material: Material, every: bool) -> Material:
    """The material with the first value of each experiment's metric refused, or every value."""
    seen, rows = set(), []
    for row in material.rows:
        refused = row.value is not None and (every or (row.experiment, row.metric) not in seen)
        seen.add((row.experiment, row.metric))
        reason = {"value": None, "value_reason": "unexpected: 7 failed its check", "n": None, "ci_low": None, "ci_high": None}
        rows.append(replace(row, **reason) if refused else row)
    found = Material(material.run)
    found.__dict__["rows"] = rows
    return found


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_refused_value_costs_its_figure_at_most_and_not_in_silence(material, name, every, capsys):
    content = draw(name, with_refused_values(material, every))
    assert content or not draw(name, material) or f"no figure {name!r}" in capsys.readouterr().out or every


def test_a_fault_of_a_figure_is_an_error_where_no_value_was_refused(material, monkeypatch, capsys):
    def fail(material):
        raise TypeError("planted")

    monkeypatch.setattr("hyperion.book.plots.all_plots", lambda: [replace(PLOTS[0], draw=fail)])
    with pytest.raises(HyperionError, match="TypeError: planted"):
        draw(PLOTS[0].name, material)
    assert draw(PLOTS[0].name, with_refused_values(material, every=False)) is None
    assert capsys.readouterr().out.startswith(f"WARNING: no figure {PLOTS[0].name!r}")


@pytest.mark.parametrize("every", [False, True])
def test_the_report_is_written_whatever_values_were_refused(material, every, monkeypatch):
    monkeypatch.setattr("hyperion.book.outline.draw", lambda name, material: None)  # see above
    assert "unexpected: 7 failed its check" in report_page(with_refused_values(material, every))
