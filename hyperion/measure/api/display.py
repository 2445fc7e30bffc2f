"""Draw the figures for the results of `hyperion.measure`.

This module is imported only when a figure is drawn, because importing matplotlib is slow.
"""

import io
import textwrap

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.style import COLOURS, MARKERS, MUTED, STYLE
from hyperion.measure.api.answers import bytes_scale, estimate_text, flops_text, time_scale
from hyperion.measure.clock.timing import Timing

_MOST_BARS = 12


class AnswerFigure(Figure):
    """A figure that a notebook can display directly. It does not use pyplot, which has global state."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(drawn, format="png", metadata={"Software": None})
        return drawn.getvalue()


def draw_samples(timings: dict[str, Timing], machine: str, verdict: str) -> Figure:
    """Draw the raw samples in the order in which they were taken, with the median and its 95 % interval.

    Args:
        timings: a dict that maps the label of a function to its timing. Each function has its own colour.
        machine: name of the device for the title.
        verdict: text below the figure.
    """
    estimates = {label: timing.estimate for label, timing in timings.items()}
    factor, unit = time_scale(min(estimate.value for estimate in estimates.values()))
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(" and ".join(timings), machine, verdict)
        for position, (label, timing) in enumerate(timings.items()):
            colour, estimate = COLOURS[position % len(COLOURS)], estimates[label]
            axes.plot(timing.samples_s / factor, MARKERS[position % 2], color=colour, markersize=3, alpha=0.45)
            axes.axhspan(estimate.ci_low / factor, estimate.ci_high / factor, color=colour, alpha=0.25, linewidth=0)
            axes.axhline(estimate.value / factor, color=colour, linewidth=1.4, label=f"{label}: {estimate_text(estimate)}")
        cache = "cold" if next(iter(timings.values())).cold else "hot"
        axes.set(xlabel="sample, in the order taken", ylabel=f"{unit} per call, {cache} cache")
        # On an axis with a few slow calls, all other calls would look the same. Cut the slow calls off, and give their number in
        # the title of the legend.
        everything = np.concatenate([timing.samples_s for timing in timings.values()]) / factor
        top = min(1.1 * everything.max(), 3 * max(estimate.ci_high for estimate in estimates.values()) / factor)
        axes.set_ylim(0, top)
        beyond = int((everything > top).sum())
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), title=f"{beyond} slower samples are outside" if beyond else None)
    return figure


def draw_memory(label: str, history: tuple[int, ...], before: int, machine: str, verdict: str) -> Figure:
    """Draw the size of live tensors after each operator, and the size before the call."""
    factor, unit = bytes_scale(max([before, *history, 1]))
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(label, machine, verdict)
        axes.fill_between(range(len(history)), [count / factor for count in history], step="post", color=COLOURS[0], alpha=0.35)
        axes.axhline(before / factor, color=COLOURS[1], linewidth=1.2, label="before the call")
        axes.set(xlabel="operator, in the order called", ylabel=f"{unit} of live tensors")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right")
    return figure


def draw_flops(label: str, by_operator: dict[str, int], by_module: dict[str, int], verdict: str) -> Figure:
    """Draw FLOPs by operator, and by module if there are modules."""
    panels = [("by operator", by_operator)] + ([("by module, submodules included", by_module)] if by_module else [])
    with mpl.rc_context(STYLE):
        figure, all_axes = _figure(label, "FLOPs of one call", verdict, panels=len(panels))
        for axes, (title, counts) in zip(all_axes, panels, strict=True):
            _draw_bars(axes, counts)
            left_out = len(counts) - _MOST_BARS
            axes.set_title(title + (f", {left_out} smaller ones omitted" if left_out > 0 else ""), loc="left", fontsize=10)
    return figure


def _draw_bars(axes: Axes, counts: dict[str, int]) -> None:
    shown = sorted(counts.items(), key=lambda item: item[1], reverse=True)[:_MOST_BARS]
    for place, (_, flops) in enumerate(shown):
        axes.barh(place, flops, color=COLOURS[0])
        axes.annotate(flops_text(flops), (flops, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.margins(x=0.25)


def draw_waterfall(title: str, parts: list[tuple[str, float, float]], machine: str, notes: str) -> Figure:
    """Draw the parts of a step as a waterfall: each bar starts where the previous one ends.

    Args:
        parts: (name, seconds, share of the step) of each part. The parts add up to the step time.
    """
    factor, unit = time_scale(sum(seconds for _, seconds, _ in parts))
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(title, machine, notes, height=0.42 * len(parts) + 1.7)
        left = 0.0
        for place, (_, seconds, share) in enumerate(parts):
            axes.barh(place, seconds / factor, left=left, color=COLOURS[place % len(COLOURS)])
            left += seconds / factor
            axes.annotate(
                f"{100 * share:.1f} %", (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5
            )
        axes.set_yticks(range(len(parts)), [name for name, _, _ in parts])
        axes.set(xlabel=f"{unit} of one step", xlim=(0, left * 1.1))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    return figure


def _figure(title: str, machine: str, notes: str, panels: int = 1, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    figure = AnswerFigure(figsize=(7.6 if panels == 1 else 10.4, height), dpi=120, layout="constrained")
    figure.suptitle(f"{title}  ·  {machine}", x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    lines = [line for note in notes.splitlines() for line in textwrap.wrap(note, int(figure.get_figwidth() * 17))]
    figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=8, color=MUTED)
    return figure, list(figure.subplots(1, panels, squeeze=False).flat)
