"""The gap waterfall: from the data sheet's peak down to what was measured, one named limit after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import number
from hyperion.figures.material import Material, measured
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, new_figure
from hyperion.results import Row

if TYPE_CHECKING:
    from hyperion.measure.products.gap import Gap, GapFactor

_LOST, _GAINED, _UNEXPLAINED = COLOURS[1], COLOURS[2], COLOURS[6]
_UNCHANGED = 1e-3  # a factor this close to 1 has no bar that anybody could see


@dataclass(frozen=True)
class _Peak:
    tflops: float
    source: str


@dataclass(frozen=True)
class _Factor:
    name: str
    factor: float | None
    tflops: float
    reason: str


@dataclass(frozen=True)
class GapRows:
    """What rows of the experiment gemm_gap say of one product, as `hyperion.measure.Gap` has it.

    Args:
        dtype: of the product.
        product: its sizes, in words.
    """

    dtype: str
    product: str
    peak: _Peak
    measured_tflops: float
    factors: tuple[_Factor, ...]


def gaps_of(rows: list[Row]) -> list[GapRows]:
    """One gap a format: of the fastest product that a search found, or of the fastest square where there was no search."""
    wholes = {}
    for row in measured(rows):
        if row.params.get("step") == 0 and (row.dtype not in wholes or row.params["of"] != "gemm"):
            wholes[row.dtype] = row
    return [_gap_of(whole, rows) for whole in wholes.values()]


def gemm_gap(material: Material, dtype: str = "") -> Figure | None:
    """The waterfalls of all formats side by side, or that of one format with all its reasons.

    Args:
        dtype: the one format.
    """
    rows = material.of("gemm_gap", metric="share")
    gaps = [gap for gap in gaps_of(rows) if dtype in ("", gap.dtype)]
    if not gaps:
        return None
    machine = material.machine("gemm_gap")
    if len(gaps) == 1:
        return gap_waterfall(gaps[0], machine, gaps[0].product, [] if dtype else _absences(gaps, rows))
    columns = 2 if len(gaps) <= 4 else 3
    lines = -(-len(gaps) // columns)
    figure, panels = new_figure("From peak to measured", machine, columns, lines=lines, height=1.1 + 2.1 * lines)
    for axes, gap in zip(panels, gaps, strict=False):
        _draw_waterfall(axes, gap, plain=True)
        axes.set_title(gap.product)
    for axes in panels[len(gaps) :]:
        axes.set_visible(False)
    add_notes(figure, _shared_notes(gaps, rows))
    return figure


def gap_waterfall(gap: "Gap | GapRows", machine: str, product: str, more: Sequence[str] = ()) -> Figure:
    """A bar for the peak, one for what each known factor takes or adds, and one for what was measured.

    Args:
        gap: of `hyperion.measure.explain_gap`, or what rows say of one.
        machine: its name, for the title.
        product: what was multiplied, for the title: "matmul 4096 x 4096 x 4096 bf16".
        more: further notes.
    """
    known = [step for step in gap.factors if step.factor is not None]
    figure, (axes,) = new_figure(f"From peak to measured: {product}", machine, height=1.5 + 0.46 * (len(known) + 2))
    _draw_waterfall(axes, gap)
    add_notes(figure, [*_notes(gap), *more])
    return figure


def _gap_of(whole: Row, rows: list[Row]) -> GapRows:
    same = {name: whole.params[name] for name in ("of", "m", "n", "k")}
    steps = [
        row for row in rows if row.dtype == whole.dtype and same.items() <= row.params.items() and row.params.get("step", 0) > 0
    ]
    peak = _Peak(whole.params["peak_tflops"], whole.limit_source)
    factors, rate = [], peak.tflops
    for row in sorted(steps, key=lambda row: row.params["step"]):
        rate *= 1.0 if row.value is None else row.value
        factors.append(_Factor(row.variant, row.value, rate, row.value_reason or row.limit_source))
    product = f"{' x '.join(str(same[side]) for side in 'mnk')} {whole.dtype}"
    return GapRows(whole.dtype, product, peak, whole.value * peak.tflops, tuple(factors))


def _shared_notes(gaps: list[GapRows], rows: list[Row]) -> list[str]:
    """What was not told apart, once for all formats that share the reason; then `_absences`."""
    notes = ["From the data sheet's peak each bar takes what a known limit costs; what is left over is unexplained."]
    skipped: dict[str, list[str]] = {}
    for gap in gaps:
        for step in (step for step in gap.factors if step.factor is None):
            skipped.setdefault(f"{step.name} ({step.reason})", []).append(gap.dtype)
    for what, dtypes in skipped.items():
        of = "" if len(dtypes) == len(gaps) else f" of {', '.join(dtypes)}"
        notes.append(f"Not told apart, so part of what is unexplained{of}: {what}.")
    return notes + _absences(gaps, rows)


def _absences(gaps: list[GapRows], rows: list[Row]) -> list[str]:
    """The formats that have no waterfall, and why."""
    absent: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.variant == "measured / peak" and row.value is None and row.dtype not in {gap.dtype for gap in gaps}:
            absent.setdefault(row.value_reason, {})[row.dtype] = None
    return [f"{', '.join(dtypes)}: {reason}." for reason, dtypes in absent.items()]


def _draw_waterfall(axes: Axes, gap: "Gap | GapRows", plain: bool = False) -> None:
    """The bars; `plain` leaves words out of small panels."""
    known = [step for step in gap.factors if step.factor is not None]
    unit = "" if plain else " TFLOPS"
    _bar(axes, 0, 0, gap.peak.tflops, INK, number(gap.peak.tflops) + unit)
    before = gap.peak.tflops
    for place, step in enumerate(known, 1):
        _step(axes, place, before, step, last=step is gap.factors[-1], unchanged="× 1" if plain else "× 1, not a limit here")
        before = step.tflops
    _bar(axes, len(known) + 1, 0, gap.measured_tflops, COLOURS[0], number(gap.measured_tflops) + unit)
    names = ["data sheet", *(step.name for step in known), "measured"]
    axes.set_yticks(range(len(names)), names)
    highest = max([gap.peak.tflops, gap.measured_tflops, *(step.tflops for step in known)])
    axes.set(xlabel="TFLOPS", xlim=(0, (1.45 if plain else 1.3) * highest), ylim=(len(names) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)


def _bar(axes: Axes, place: int, low: float, high: float, colour: str, text: str) -> None:
    axes.barh(place, high - low, left=low, height=0.58, color=colour)
    axes.annotate(text, (high, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _step(axes: Axes, place: int, before: float, step: "GapFactor | _Factor", last: bool, unchanged: str) -> None:
    colour = _UNEXPLAINED if last else _GAINED if step.factor > 1 else _LOST
    changed = abs(step.factor - 1) > _UNCHANGED
    text = f"× {step.factor:.3f}" if changed else unchanged
    low, high = sorted((before, step.tflops))
    _bar(axes, place, low, high, colour, text)
    for x, end in ((before, place - 1), (step.tflops, place + 1)):  # thin lines carry the rate from bar to bar
        axes.plot([x, x], [place, end], color=MUTED, linewidth=0.7, zorder=0.8)


def _notes(gap: "Gap | GapRows") -> list[str]:
    notes = [f"Data sheet: {gap.peak.source}."]
    notes += [f"{step.name.capitalize()}: {step.reason}." for step in gap.factors if step.factor is not None]
    skipped = [f"{step.name} ({step.reason})" for step in gap.factors if step.factor is None]
    if skipped:
        notes.append(f"Not told apart, so part of what is unexplained: {', '.join(skipped)}.")
    return notes
