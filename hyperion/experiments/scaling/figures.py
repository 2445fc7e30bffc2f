"""Figures of scaling by number of devices: speed-up, efficiency, and the cost of communication."""

from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, Quote, measured, percent, select, values
from hyperion.figures.style import INK, MUTED, add_notes, errors_of, look, new_figure
from hyperion.results import BUSY_GPU, Row

_MODES = ("weak", "strong")
_BUSY_ENOUGH = 0.9  # if the GPUs are busy for a smaller share of a step, the host limits the speed
EXPOSED = "exposed communication"  # part of a profiled step; `what` of its rows
MISSING = "missing"  # text in the flat table for a value that was not measured


def scaling(material: Material) -> Figure | None:
    """Plot the speed-up and efficiency of every training run: weak scaling in the upper panels, strong scaling in the lower."""
    rows = measured(material.of("scaling"))
    efficiencies = select(rows, metric="scaling_efficiency")
    if not efficiencies:
        return None
    figure, panels = new_figure("Scaling", material.machine("scaling"), 2, lines=2, height=7.2)
    for line, mode in enumerate(_MODES):
        left, right = panels[2 * line : 2 * line + 2]
        _curves(left, _of(rows, "speedup", mode), 1.0)
        most = max((r.params["ranks"] for r in efficiencies), default=1)
        left.plot([1, most], [1, most], color=INK, linestyle=(0, (5, 3)), linewidth=1.2, label="ideal")
        what = "constant batch per device" if mode == "weak" else "constant total batch"
        left.set(ylabel="speed relative to one device", title=f"Speed-up, {mode} scaling: {what}")
        left.legend()
        _curves(right, _of(rows, "scaling_efficiency", mode), 1.0)
        right.axhline(1, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        right.set(ylabel="speed-up over number of devices", title=f"Efficiency, {mode} scaling", ylim=(0, 1.1))
    add_notes(figure, _idle(rows) + _missing(material))
    return figure


def communication(material: Material) -> Figure | None:
    """Plot two measures of the cost of communication by number of devices.

    The first measure is the share of a profiled step in which a device only communicates.

    For the second measure, each device also runs its part of the step alone, without communication. The measure is the difference
    of the two step times, divided by the step time with communication. It is negative if the device alone is slower, for example
    because it updates the whole optimizer state. Runs of earlier versions have only the second measure.
    """
    rows = measured(material.of("scaling"))
    exposed = [row for row in rows if row.metric == "share" and row.params.get("what") == EXPOSED]
    # Runs of earlier versions store the second measure, the difference of the step times, under the name of a share.
    differences = select(rows, metric="alone_difference") or select(rows, metric="communication_share")
    if not differences and not exposed:
        return None
    figure, panels = new_figure("Cost of communication", material.machine("scaling"), 2)
    for axes, mode in zip(panels, _MODES, strict=True):
        for chosen, what, line in ((exposed, "exposed", "-"), (differences, "difference from alone", ":")):
            _curves(axes, [row for row in chosen if row.params.get("mode") == mode], None, what, line)
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.set(ylabel="fraction of the time of the step", title=f"{mode.capitalize()} scaling")
        axes.legend()
    top = max(axes.get_ylim()[1] for axes in panels)
    bottom = min(axes.get_ylim()[0] for axes in panels)
    for axes in panels:
        axes.set_ylim(bottom, top)
    notes = [
        "Dotted, hollow: (step - same step alone) / step, from two timings, with its 95 % interval. Where the interval reaches "
        "zero, the difference is no share of communication."
    ]
    notes += ["Solid, filled: exposed communication of profiled steps, mean of the ranks."] if exposed else []
    add_notes(figure, notes)
    return figure


def _curves(axes: Axes, rows: list[Row], at_one: float | None, what: str = "", line: str = "") -> None:
    """Draw the values of the rows by number of devices, with one curve per training run.

    Args:
        at_one: value on one device, or None if the quantity has no value on one device.
        what: name of the quantity, for the legend.
        line: matplotlib line style. "" uses the line style of the training run. A dotted line has hollow marks, because a curve
            with one point has no line.
    """
    for place, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        chosen = sorted((row for row in rows if row.variant == name), key=lambda row: row.params["ranks"])
        style: dict[str, Any] = look(name, place) | ({"linestyle": line} if line else {})
        style |= {"fillstyle": "none"} if line == ":" else {}
        x, y = [row.params["ranks"] for row in chosen], values(chosen)
        axes.errorbar(x, y, errors_of(chosen), label=", ".join(filter(None, (name.replace("_", " "), what))), **style)
        if at_one is not None:
            axes.plot([1, x[0]], [at_one, y[0]], **style)
    ranks = sorted({row.params["ranks"] for row in rows} | {1})
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set(xlabel="devices")


def _of(rows: list[Row], metric: str, mode: str) -> list[Row]:
    return [row for row in rows if row.metric == metric and row.params.get("mode") == mode]


def _idle(rows: Sequence[Row]) -> list[str]:
    """Return a sentence with the steps whose speed the host limits, and during which part of each step the GPUs are busy."""
    steps = [
        f"{row.variant.replace('_', ' ')} on {row.params['ranks']}"
        + (f" ({row.params['mode']})" if row.params["ranks"] > 1 else "")
        + f" {percent(not_none(row.value))} %"
        for row in rows
        if is_host_bound(row)
    ]
    if not steps:
        return []
    return [f"The host limits the speed, because the GPUs are busy for less than {percent(_BUSY_ENOUGH)} %: {', '.join(steps)}."]


def is_host_bound(row: Row) -> bool:
    """Return True if this row of the experiment `scaling` says that the GPUs wait for the host during much of a step."""
    is_busy = row.experiment == "scaling" and row.metric == "share" and BUSY_GPU.items() <= row.params.items()
    return is_busy and not_none(row.value) < _BUSY_ENOUGH


def _missing(material: Material) -> list[str]:
    """Return one sentence for each reason why measurements are missing."""
    absent = [row for row in material.of("scaling", metric="scaling_efficiency") if row.value is None]
    reasons: dict[tuple, list[str]] = {}
    for row in absent:
        reasons.setdefault((row.params["ranks"], row.value_reason), []).append(row.variant)
    return [
        f"Missing: {', '.join(dict.fromkeys(names)).replace('_', ' ')} on {ranks} devices ({reason})."
        for (ranks, reason), names in reasons.items()
    ]


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield the efficiencies of each training on the largest number of devices: first weak, then strong scaling.

    Both are reported, because the efficiency of weak scaling is usually higher. In weak scaling, the work grows with the number
    of devices while the communication stays the same. An efficiency is left out if the host limits the speed of its step or of
    the step on one device. It is also left out if no steps of its training were traced, as in runs of earlier versions, because
    only a trace shows whether the host limits the speed.
    """
    own = select(rows, experiment="scaling")
    traced = {row.variant for row in own if row.params.get("what") in (EXPOSED, BUSY_GPU["what"])}
    bound = [(row.variant, row.params["ranks"], row.params["mode"]) for row in rows if is_host_bound(row)]

    def steps(row: Row) -> list[tuple]:
        return [(row.variant, 1, _MODES[0]), (row.variant, row.params["ranks"], row.params["mode"])]

    cells = [
        row
        for row in select(own, metric="scaling_efficiency")
        if row.variant in traced and not any(step in bound for step in steps(row))
    ]
    most = max((row.params["ranks"] for row in cells), default=0)
    largest = [row for row in cells if row.params["ranks"] == most]
    order = list(dict.fromkeys(row.variant for row in largest))
    times = select(own, metric="step_time_s")
    for row in sorted(largest, key=lambda row: (order.index(row.variant), row.params["mode"] != "weak")):
        name = f"{row.params['model']}, {row.params['strategy'].upper()}"
        timings = [time for time in times if (time.variant, time.params["ranks"], time.params["mode"]) in steps(row)]
        yield Quote(f"{name}: {row.params['mode']} scaling to {most} devices", row, timings=timings)


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return a dict that maps the path of the flat table to the table: speed-up and efficiency by number of devices.

    The values are means over the runs. A value that was not measured is `MISSING`.
    """
    rows = [row for own in runs for row in own if row.experiment == "scaling" and "mode" in row.params]
    trainings = list(dict.fromkeys(row.variant for row in rows))
    lines = []
    for mode in dict.fromkeys(row.params["mode"] for row in rows):
        for ranks in sorted({row.params["ranks"] for row in rows}):
            line = {"gpus": ranks, "ideal": ranks, "mode": mode}
            for training in trainings:
                line |= _scaling_cells(training, [row for row in rows if row.variant == training], mode, ranks)
            lines.append(line)
    columns = [f"{training}_{what}" for what in ("speedup", "efficiency") for training in trainings]
    columns += ["mode", *(f"{training}_{what}" for what in ("n_runs", "stdev") for training in trainings)]
    return {"scaling/scaling_analysis.csv": pd.DataFrame(lines, columns=["gpus", "ideal", *columns])}


def _scaling_cells(training: str, rows: list[Row], mode: str, ranks: int) -> dict:
    """Return the mean speed-up and efficiency of a training workload, the number of runs, and the deviation of the speed-up."""

    def of(metric: str) -> list[float]:
        own = [row for row in rows if row.metric == metric and row.params["ranks"] == ranks and row.value is not None]
        # One rank is the baseline, so its speed-up and efficiency are 1 in both modes.
        return [1.0 for _ in own] if ranks == 1 else [float(row.value or 0) for row in own if row.params["mode"] == mode]

    speedups = of("step_time_s" if ranks == 1 else "speedup")
    efficiencies = of("step_time_s" if ranks == 1 else "scaling_efficiency")
    return {
        f"{training}_speedup": mean(speedups) if speedups else MISSING,
        f"{training}_efficiency": mean(efficiencies) if efficiencies else MISSING,
        f"{training}_n_runs": len(speedups),
        f"{training}_stdev": stdev(speedups) if len(speedups) > 1 else MISSING,
    }


TITLES = {"scaling": "Scaling"}

PLOTS = (
    Plot("scaling", "scaling", "Speed-up and efficiency of the same training on more devices, with the ideal line.", scaling),
    Plot(
        "communication",
        "scaling",
        "Communication that no computation hides, and the difference between a step and the same step of a device alone.",
        communication,
    ),
)
