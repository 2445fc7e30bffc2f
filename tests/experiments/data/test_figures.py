"""The data figures name their source and hide no token."""

from hyperion.experiments.data.figures import image_grid, loader_speed, token_histogram, tokenizer_speed
from hyperion.figures.style import styled


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


def test_the_tokenizers_stand_beside_each_other_with_their_ratio(material):
    with styled():
        figure = tokenizer_speed(material)
    assert len(figure.axes[0].patches) == 4
    assert "× as fast as datasets.map" in figure.get_supxlabel() and "On 2 cores" in figure.get_supxlabel()


def test_each_loader_has_a_bar_and_says_its_threads(material):
    with styled():
        figure = loader_speed(material)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == 4 and "packed, from its file, ahead, 2 threads" in labels
    assert len(figure.axes[1].patches) == 2
