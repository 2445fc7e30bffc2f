"""Style of all figures.

The colours are distinguishable by colour-blind readers, and each colour has its own marker. The same figure always gives the same
PNG file.
"""

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from hyperion.results import Row

INK, MUTED, GRID = "#1b1f24", "#6a737d", "#e3e6ea"
# Source: Okabe and Ito, Color Universal Design, 2008. Yellow is omitted because it is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5b5b5b")
# Font size in points. Most pages show the summary of a run at half its size, at which the letters are 10 pixels high.
SUMMARY_LETTERING = 11
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Parameters for matplotlib.rc_context.
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#b4bac2",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "errorbar.capsize": 2.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
DPI = 120
_MARGIN = 0.012  # distance of the title and the notes from the edges, as a share of the figure's width
# Index of the colour and marker of each number format and memory operation.
_FIXED = {"fp64": 6, "fp32": 0, "tf32": 5, "fp16": 4, "bf16": 1, "fp8": 3, "int8": 2, "copy": 0, "scale": 4, "add": 2, "triad": 1}


def look(name: str, position: int = 0) -> dict[str, Any]:
    """Return the colour and marker of a series as keyword arguments for `Axes.plot`.

    A number format or memory operation has the same colour and marker in every figure.

    Args:
        name: name of the series, for example a number format.
        position: number of the series in the figure, which selects the style if the name is neither a number format nor a memory
            operation.
    """
    index = _FIXED.get(name.split("_")[0], position)
    # Once all colours are used, they repeat with other markers, so that the eighth series does not look like the first.
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]}


def styled() -> AbstractContextManager[None]:
    """Return a context manager in whose `with` block figures are created and drawn in the style of the book."""
    return mpl.rc_context(STYLE)


def new_figure(
    title: str, machine: str, panels: int = 1, *, lines: int = 1, width: float = 0, height: float = 4.2
) -> tuple[Figure, list[Axes]]:
    """Return a new figure with a title, and the list of its panels.

    Args:
        title: what the figure shows.
        machine: name of the machine on which the values were measured, which is added to the title.
        panels: number of panels in each row.
        lines: number of rows.
        width, height: size in inches. A width of 0 selects a default width.
    """
    figure = Figure(
        figsize=(width or (7.6 if panels == 1 else 10.4), height),
        dpi=DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.04),
    )
    figure.suptitle(f"{title}  ·  {machine}", x=_MARGIN, ha="left", fontsize=11.5, fontweight="bold")
    return figure, list(figure.subplots(lines, panels, squeeze=False).flat)


def add_notes(figure: Figure, notes: Iterable[str], size: float = 8) -> None:
    """Write notes in small type below the panels, for example about values that are not drawn."""
    lines = [line for note in dict.fromkeys(notes) for line in _wrapped(note, size, figure.get_figwidth())]
    if lines:
        figure.supxlabel("\n".join(lines), x=_MARGIN, ha="left", fontsize=size, color=MUTED)


def _wrapped(note: str, size: float, width_in: float) -> list[str]:
    """Break a note into lines that fit into a figure of this width."""
    room = DPI * width_in * (1 - 1.3 * _MARGIN)  # pixels
    renderer = RendererAgg(1, 1, DPI)  # it measures the text exactly as the PNG shows it
    font = FontProperties(family=STYLE["font.family"], size=size)
    # The number of characters that usually fit. Lines with many wide letters need fewer.
    for characters in range(int(width_in * 140 / size), 0, -1):
        lines = textwrap.wrap(note, characters)
        if all(renderer.get_text_width_height_descent(line, font, ismath=False)[0] <= room for line in lines):
            break
    return lines


def absences(rows: Iterable[Row], name: Callable[[Row], str], limit_name: Callable[[Row], str] | None = None) -> list[str]:
    """Return one note for each reason why values were not measured or limits do not exist.

    Args:
        rows: rows to report on.
        name: function that returns the name of a row without a value, for the note.
        limit_name: function that returns the name of a row without a limit, for the note. None uses `name`.
    """
    missing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.value is None:
            missing.setdefault(f"not measured ({row.value_reason})", {})[name(row)] = None
        elif row.limit is None:
            reason = row.limit_source.partition(" (")[0].partition("; ")[0]
            missing.setdefault(reason, {})[(limit_name or name)(row)] = None
    return [f"{'; '.join(names)}: {reason}." for reason, names in missing.items()]


def errors_of(rows: Sequence[Row], factor: float = 1.0) -> list[list[float]] | None:
    """Return the lengths of the error bars below and above the values. Return None if any row has no interval.

    Args:
        rows: rows with the values.
        factor: factor that converts the unit of the rows to the unit of the axis.
    """
    low, high = [], []
    for row in rows:
        if row.value is None or row.ci_low is None or row.ci_high is None:
            return None
        low.append(factor * (row.value - row.ci_low))
        high.append(factor * (row.ci_high - row.value))
    return [low, high]


def limit_line(axes: Axes, value: float, label: str, colour: str, size: float = 8) -> None:
    """Draw a labelled dashed horizontal line across the panel.

    The line shows a limit of the measured values, such as the data-sheet bandwidth. Its label is at the left end, because most
    curves rise towards the right and come close to the limit there, where they would collide with the label.
    """
    axes.axhline(value, color=colour, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1.5)
    write_at(
        axes, label, (0, value), (3, 3), xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=size, color=colour
    )


def write_at(axes: Axes, text: str, place: tuple[Any, Any], offset: tuple[float, float], **style: Any) -> None:
    """Write text into the panel.

    Args:
        axes: panel to write into.
        text: text to write.
        place: (x, y) of the text in axis units.
        offset: distance of the text from this place, as (x, y) in points.
        style: options of `Axes.annotate`.
    """
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **style)


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG without date and version, so that the same figure gives the same bytes.

    The PNG has a palette of 256 colours, which suffices for line drawings and makes the file three times smaller.
    """
    canvas, reduced = FigureCanvasAgg(figure), io.BytesIO()
    with styled():
        canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawn.quantize(256, dither=Image.Dither.NONE).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def log_ticks(axis: Axis) -> None:
    """Set the ticks of a logarithmic axis and label them with plain numbers.

    The ticks are at 1, 2 and 5 in each decade if the axis spans less than a factor of 200, else at the decades. If it spans less
    than a factor of 4, the ticks have equal distances, because it may contain only one of these numbers.
    """
    low, high = sorted(axis.get_view_interval())
    axis.set_minor_formatter(NullFormatter())
    if high < 4 * low:
        axis.set_major_locator(MaxNLocator(nbins=5))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def whole_numbers(axis: Axis) -> None:
    """Set the ticks of an axis to whole numbers only, for example for epochs."""
    axis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))


def legend_above_data(axes: Axes, **options: Any) -> None:
    """Draw a legend in the upper left corner of the panel, and extend the y axis so that the legend covers no data.

    Call this after everything else is drawn, including the notes, because it depends on the height of the panel.

    Args:
        axes: panel with a linear y axis.
        options: options of `Axes.legend`.
    """
    legend = axes.legend(loc="upper left", **options)
    figure = axes.get_figure(root=True)
    assert figure is not None
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)  # sets the size of the panel, of which the legend takes a share
    bottom, _ = axes.get_ylim()
    highest = axes.dataLim.y1
    share = min(0.6, 1.1 * (axes.bbox.y1 - legend.get_window_extent().y0) / axes.bbox.height)
    axes.set_ylim(bottom, bottom + (highest - bottom) / (1 - share))


def spread_labels(axes: Axes, labels: Iterable[tuple[float, str, str]], gap_points: float = 11, size: float = 8.5) -> None:
    """Write labels at the right edge of the panel. Overlapping labels are moved apart.

    Args:
        axes: panel to write into.
        labels: (y, text, colour) of each label.
        gap_points: minimum distance between two labels in points.
        size: font size.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)  # sets the size of the panel and hence the positions of the labels
    scale = 72 / figure.dpi
    placed: float | None = None
    for y, text, colour in sorted(labels):
        wanted = axes.transData.transform((1, y))[1] * scale
        shifted = wanted if placed is None else max(wanted, placed + gap_points)
        placed = shifted
        write_at(
            axes,
            text,
            (1, y),
            (4, shifted - wanted),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=size,
            color=colour,
            annotation_clip=False,
        )


def name_bars(axes: Axes, names: Sequence[str], label: str, room: float = 1.5) -> None:
    """Name horizontal bars from top to bottom, and make room for text to the right of each bar.

    Args:
        axes: panel with the bars, which are at 0, 1, 2, ….
        names: names of the bars.
        label: label of the x axis.
        room: factor by which the x axis is extended.
    """
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=label, xlim=(0, axes.get_xlim()[1] * room))
