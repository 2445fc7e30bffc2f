"""Every figure is drawn from rows, small, and the same each time; what has no rows is not drawn."""

import io

import pytest
from PIL import Image

from hyperion.book.material import Material
from hyperion.book.outline import picture
from hyperion.book.plots import PLOTS, draw
from hyperion.errors import HyperionError
from hyperion.results import Run

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
