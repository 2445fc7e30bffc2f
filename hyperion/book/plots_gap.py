"""The gap waterfall: from the data sheet's peak down to what was measured, one named limit after the other."""

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.book.formats import number
from hyperion.book.style import COLOURS, INK, MUTED, add_notes, new_figure

if TYPE_CHECKING:
    from hyperion.measure.gap import Gap, GapFactor

_LOST, _GAINED, _UNEXPLAINED = COLOURS[1], COLOURS[2], COLOURS[6]
_UNCHANGED = 1e-3  # a factor this close to 1 has no bar that anybody could see


def gap_waterfall(gap: "Gap", machine: str, product: str) -> Figure:
    """A bar for the peak, one for what each known factor takes or adds, and one for what was measured.

    Args:
        gap: of `hyperion.measure.explain_gap`.
        machine: its name, for the title.
        product: what was multiplied, for the title: "matmul 4096 x 4096 x 4096 bf16".
    """
    known = [step for step in gap.factors if step.factor is not None]
    figure, (axes,) = new_figure(f"From peak to measured: {product}", machine, height=1.5 + 0.46 * (len(known) + 2))
    _bar(axes, 0, 0, gap.peak.tflops, INK, f"{number(gap.peak.tflops)} TFLOPS")
    before = gap.peak.tflops
    for place, step in enumerate(known, 1):
        _step(axes, place, before, step, last=step is gap.factors[-1])
        before = step.tflops
    _bar(axes, len(known) + 1, 0, gap.measured_tflops, COLOURS[0], f"{number(gap.measured_tflops)} TFLOPS")
    names = ["data sheet", *(step.name for step in known), "measured"]
    axes.set_yticks(range(len(names)), names)
    highest = max([gap.peak.tflops, gap.measured_tflops, *(step.tflops for step in known)])
    axes.set(xlabel="TFLOPS", xlim=(0, 1.3 * highest), ylim=(len(names) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    add_notes(figure, _notes(gap))
    return figure


def _bar(axes: Axes, place: int, low: float, high: float, colour: str, text: str) -> None:
    axes.barh(place, high - low, left=low, height=0.58, color=colour)
    axes.annotate(
        text, (high, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK
    )  # fmt: skip


def _step(axes: Axes, place: int, before: float, step: "GapFactor", last: bool) -> None:
    colour = _UNEXPLAINED if last else _GAINED if step.factor > 1 else _LOST
    changed = abs(step.factor - 1) > _UNCHANGED
    text = f"× {step.factor:.3f}" if changed else "× 1, not a limit here"
    low, high = sorted((before, step.tflops))
    _bar(axes, place, low, high, colour, text)
    for x, end in ((before, place - 1), (step.tflops, place + 1)):  # thin lines carry the rate from bar to bar
        axes.plot([x, x], [place, end], color=MUTED, linewidth=0.7, zorder=0.8)


def _notes(gap: "Gap") -> list[str]:
    notes = [f"Data sheet: {gap.peak.source}."]
    notes += [f"{step.name.capitalize()}: {step.reason}." for step in gap.factors if step.factor is not None]
    skipped = [f"{step.name} ({step.reason})" for step in gap.factors if step.factor is None]
    if skipped:
        notes.append(f"Not told apart, so part of what is unexplained: {', '.join(skipped)}.")
    return notes
