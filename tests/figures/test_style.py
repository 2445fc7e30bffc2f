"""Notes and legends of a figure fit into it and cover nothing, and logarithmic ticks are plain numbers."""

import pytest

from hyperion.figures.style import add_notes, legend_above_data, log_ticks, new_figure, png, styled

LONG = "resnet18_w8 max-autotune, MMMM WWWW reduce-overhead: not measured (left out: a cold compilation takes long). "


@pytest.mark.parametrize(("text", "size"), [(LONG * 3, 8), (LONG * 3, 11), ("W" * 400, 8), ("short", 8)])
def test_every_line_of_a_note_ends_within_the_figure(text, size):
    with styled():
        figure, _ = new_figure("title", "machine")
        add_notes(figure, [text], size)
        png(figure)
        extent = figure._supxlabel.get_window_extent()
    assert extent.x1 <= figure.bbox.x1
    assert "".join(figure.get_supxlabel().split()) == "".join(text.split())


@pytest.mark.parametrize("notes", [[], ["a note " * 80]])
def test_a_legend_above_the_data_covers_no_point(notes):
    with styled():
        figure, panels = new_figure("title", "machine", 3, height=3.9)
        for axes in panels:
            axes.plot([0, 1, 2], [5, 5, 5], label="a long name of a flat line at the top")
            axes.plot([0, 1, 2], [0, 2, 5], label="rising")
            axes.set_ylim(0, None)
        add_notes(figure, notes)
        for axes in panels:
            legend_above_data(axes, fontsize=8)
        png(figure)
        for axes in panels:
            lowest = axes.get_legend().get_window_extent().y0
            assert lowest > axes.transData.transform((0, 5))[1] and axes.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("ends", "ticks"),
    [
        ((1.1, 2.6), ["1.2", "1.5", "1.8", "2.1", "2.4"]),
        ((0.045, 0.45), ["0.05", "0.1", "0.2"]),
        ((0.8, 4000), ["1", "10", "100", "1,000"]),
    ],
)
def test_logarithmic_ticks_are_plain_numbers_and_more_than_one(ends, ticks):
    with styled():
        _, (axes,) = new_figure("title", "machine")
        axes.set_xscale("log")
        axes.set_xlim(*ends)
        log_ticks(axes.xaxis)
        values = [value for value in axes.xaxis.get_majorticklocs() if ends[0] <= value <= ends[1]]
        assert axes.xaxis.get_major_formatter().format_ticks(values) == ticks
