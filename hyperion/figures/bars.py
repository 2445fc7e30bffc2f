"""Horizontal bars with intervals and values."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from hyperion.errors import not_none
from hyperion.figures.material import number
from hyperion.figures.style import COLOURS, errors_of, write_at
from hyperion.results import Row


def value_bars(
    axes: Axes, rows: Sequence[Row], names: Sequence[str], factor: float, colours: Sequence[str] | None = None
) -> None:
    """Draw a horizontal bar for each row, with its interval and its value.

    Args:
        axes: panel to draw into.
        rows: rows with values.
        names: name of each bar.
        factor: factor that converts the unit of the rows to the unit of the axis.
        colours: colour of each bar. If None, all have the first colour.
    """
    for place, row in enumerate(rows):
        value = not_none(row.value)
        colour = colours[place] if colours else COLOURS[0]
        axes.barh([place], [factor * value], xerr=errors_of([row], factor), height=0.7, color=colour)
        end = value if row.ci_high is None else row.ci_high
        write_at(axes, number(factor * value, 3), (factor * end, place), (4, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
