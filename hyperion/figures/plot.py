"""A figure: its name, the experiment it belongs to, its caption, and how it is drawn."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

# The experiment of a figure that spans the run.
ALL = "all"


@dataclass(frozen=True)
class Plot:
    """One figure.

    Args:
        name: stem of its file.
        experiment: the experiment it belongs to; `ALL` for one that spans the run.
        caption: what the reader should see in it.
        draw: draw it from a run's rows; return None when the run has nothing for it.
        published: whether `draw` accepts `published=True`, to add another machine's published numbers.
    """

    name: str
    experiment: str
    caption: str
    draw: Callable[..., Figure | None]
    published: bool = False
