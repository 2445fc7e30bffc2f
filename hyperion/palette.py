"""Colours, markers and the matplotlib style of all figures. This module does not import matplotlib, which is slow to import."""

from typing import Any

INK, MUTED, GRID = "#1b1f24", "#6a737d", "#e3e6ea"
# Source: Okabe and Ito, Color Universal Design, 2008. Yellow is omitted because it is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5b5b5b")
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
