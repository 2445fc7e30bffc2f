"""The data figures name their source and hide no token."""

from hyperion.book.plots_data import image_grid, token_histogram
from hyperion.book.style import styled


def test_the_histogram_shows_blanks_and_counts_all(material):
    with styled():
        figure = token_histogram(material)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "␣the" and "⏎" in labels and len(labels) == 20
    samples = material.samples("text_pipeline")
    assert f"{samples['count'].sum():,.0f} tokens" in figure.get_supxlabel()
    assert "source mirror" in figure.get_suptitle()


def test_the_grid_has_a_column_a_class(material):
    with styled():
        figure = image_grid(material)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert len(labels) == 10 and labels[0] == "airplane"
