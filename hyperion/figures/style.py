"""The style of all figures: colour-blind safe colours, each with a marker, and reproducible PNG bytes."""

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from hyperion.results import Row

DPI = 120
INK, MUTED, GRID = "#1b1f24", "#6a737d", "#e3e6ea"
# Okabe and Ito, Color Universal Design, 2008; yellow is left out because it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5b5b5b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_FIXED = {"fp64": 6, "fp32": 0, "tf32": 5, "fp16": 4, "bf16": 1, "fp8": 3, "int8": 2, "copy": 0, "scale": 4, "add": 2, "triad": 1}
_STYLE: dict[Any, Any] = {
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


def look(name: str, position: int = 0) -> dict[str, Any]:
    """Colour and marker of a named series; dtypes and memory operations look the same in every figure."""
    index = _FIXED.get(name.split("_")[0], position)
    # Past the last colour the pairing shifts, so that an eighth series does not look like the first.
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]}


def styled():
    """Context in which a figure is built and drawn with the book's style."""
    return mpl.rc_context(_STYLE)


def new_figure(
    title: str, machine: str, panels: int = 1, *, lines: int = 1, width: float = 0, height: float = 4.2
) -> tuple[Figure, list[Axes]]:
    """A figure that says what it shows and on which machine, with `lines` rows of `panels` panels. Sizes in inches."""
    figure = Figure(
        figsize=(width or (7.6 if panels == 1 else 10.4), height),
        dpi=DPI,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.04),
    )
    figure.suptitle(f"{title}  ·  {machine}", x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    return figure, list(figure.subplots(lines, panels, squeeze=False).flat)


def add_notes(figure: Figure, notes: Iterable[str], size: float = 8) -> None:
    """Small print under the panels: what is not drawn, and why."""
    width = int(figure.get_figwidth() * 140 / size)
    lines = [line for note in dict.fromkeys(notes) for line in textwrap.wrap(note, width)]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=size, color=MUTED)


def absences(rows: Iterable[Row], name: Callable[[Row], str], limit_name: Callable[[Row], str] | None = None) -> list[str]:
    """Return one note a reason: values that were not measured, and limits that do not exist.

    Args:
        name: name of a row without a value.
        limit_name: name of a row without a limit, `name` unless given.
    """
    missing: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.value is None:
            missing.setdefault(f"not measured ({row.value_reason})", {})[name(row)] = None
        elif row.limit is None:
            reason = row.limit_source.partition(" (")[0].partition("; ")[0]
            missing.setdefault(reason, {})[(limit_name or name)(row)] = None
    return [f"{', '.join(names)}: {reason}." for reason, names in missing.items()]


def errors_of(rows: Sequence[Row], factor: float = 1.0) -> list[list[float]] | None:
    """Return the distances below and above the values for error bars, None when a row has no interval.

    Args:
        factor: converts the rows' unit to that of the axis.
    """
    low, high = [], []
    for row in rows:
        if row.value is None or row.ci_low is None or row.ci_high is None:
            return None
        low.append(factor * (row.value - row.ci_low))
        high.append(factor * (row.ci_high - row.value))
    return [low, high]


def limit_line(axes: Axes, value: float, label: str, colour: str, size: float = 8) -> None:
    """A dashed line across the panel with its name on it, at the left end: curves that rise with size end at the right."""
    axes.axhline(value, color=colour, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1.5)
    write_at(
        axes, label, (0, value), (3, 3), xycoords=("axes fraction", "data"), ha="left", va="bottom", fontsize=size, color=colour
    )


def write_at(axes: Axes, text: str, place: tuple[Any, Any], offset: tuple[float, float], **style: Any) -> None:
    """Write a text at a place of the panel, moved by an offset in points; `style` as in `Axes.annotate`."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", **style)


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, the same for the same figure: no date, no version inside.

    Line drawings need few colours: a palette of 256 makes the file a third as large, for pages that embed it and for git.
    """
    canvas, reduced = FigureCanvasAgg(figure), io.BytesIO()
    with styled():
        canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawn.quantize(256, dither=Image.Dither.NONE).save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def log_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 where it spans little, else at the decades, as plain numbers."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers only, for epochs."""
    axis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))


def spread_labels(axes: Axes, labels: Iterable[tuple[float, str, str]], gap_points: float = 11, size: float = 8.5) -> None:
    """Labels (y, text, colour) at the panel's right edge, moved apart where their lines lie too close to each other."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
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
