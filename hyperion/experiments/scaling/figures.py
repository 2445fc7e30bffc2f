"""Figures of scaling by number of devices: speed-up, efficiency, and the cost of communication."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
# Values of the parameter `of`: the mean of the ranks, or the rank with the least exposed communication.
MEAN_EXPOSED, LEAST_EXPOSED = "profiled step, mean of the ranks", "profiled step, least of the ranks"
COMPUTING = "without exposed communication, mean of the ranks"  # `of` in rows with the busy time of GPUs on several ranks
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

    The first measure is the share of a profiled step in which a device only communicates. The mean over the ranks is drawn as a
    line. A band connects it to the value of the rank with the least, which runs of earlier versions do not have.

    For the second measure, each device also runs its part of the step alone, without communication. The measure is the difference
    of the two step times, divided by the step time with communication. It is negative if the device alone is slower, for example
    because it updates the whole optimizer state. Runs of earlier versions have only the second measure.
    """
    rows = measured(material.of("scaling"))
    exposed, least = ([row for row in exposed_rows(rows) if row.params.get("of") == of] for of in (MEAN_EXPOSED, LEAST_EXPOSED))
    # Runs of earlier versions store the second measure, the difference of the step times, under the name of a share.
    differences = select(rows, metric="alone_difference") or select(rows, metric="communication_share")
    if not differences and not exposed:
        return None
    figure, panels = new_figure("Cost of communication", material.machine("scaling"), 2, height=5.2)
    for axes, mode in zip(panels, _MODES, strict=True):
        for chosen, what, line in ((exposed, "exposed", "-"), (differences, "difference from alone", ":")):
            _curves(axes, [row for row in chosen if row.params.get("mode") == mode], None, what, line)
        _bands(axes, *([row for row in chosen if row.params.get("mode") == mode] for chosen in (exposed, least)))
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.set(ylabel="fraction of the time of the step", title=f"{mode.capitalize()} scaling")
        # Below the panel, because the curves can be anywhere in it.
        axes.legend(fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    top = max(axes.get_ylim()[1] for axes in panels)
    bottom = min(axes.get_ylim()[0] for axes in panels)
    for axes in panels:
        axes.set_ylim(bottom, top)
    notes = [
        "Dotted, hollow: (step - same step alone) / step, from two timings, with its 95 % interval. Where the interval reaches "
        "zero, the difference is no share of communication."
    ]
    notes += ["Solid, filled: exposed communication of profiled steps, mean of the ranks."] if exposed else []
    notes += (
        ["Band: down to the rank with the least. The exchange itself costs at most this; the rest is waiting."] if least else []
    )
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


def _bands(axes: Axes, means: list[Row], least: list[Row]) -> None:
    """Fill the area between the mean of the ranks and the rank with the least, in the color of each training run."""
    for place, name in enumerate(dict.fromkeys(row.variant for row in means)):
        lower, upper = (
            {row.params["ranks"]: not_none(row.value) for row in select(rows, variant=name)} for rows in (least, means)
        )
        x = sorted(lower.keys() & upper.keys())
        if x:
            color = look(name, place)["color"]
            axes.fill_between(x, [lower[n] for n in x], [upper[n] for n in x], color=color, alpha=0.15, linewidth=0)


def _of(rows: list[Row], metric: str, mode: str) -> list[Row]:
    return [row for row in rows if row.metric == metric and row.params.get("mode") == mode]


def exposed_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the exposed communication of profiled steps."""
    return [row for row in select(rows, experiment="scaling", metric="share") if row.params.get("what") == EXPOSED]


def step_of(row: Row) -> tuple[str, int, str]:
    """Return (training workload, number of ranks, scaling mode) of the step to which a row of the experiment belongs."""
    return row.variant, row.params.get("ranks", 1), row.params.get("mode", _MODES[0])


def busy_shares(rows: Sequence[Row]) -> dict[tuple[str, int, str], float]:
    """Return a dict that maps each step (see `step_of`) to the share of its time in which the GPUs are busy, mean of the ranks.

    Exposed communication does not count. The busy time in rows of earlier versions contains it, so it is subtracted.
    """
    exposed = {step_of(row): not_none(row.value) for row in measured(exposed_rows(rows)) if row.params.get("of") == MEAN_EXPOSED}
    shares = {}
    for row in measured(select(rows, experiment="scaling", metric="share")):
        if BUSY_GPU.items() <= row.params.items():
            contained = row.params.get("ranks", 1) > 1 and row.params.get("of") != COMPUTING
            shares[step_of(row)] = not_none(row.value) - (exposed.get(step_of(row), 0.0) if contained else 0.0)
    return shares


def host_bound_steps(rows: Sequence[Row]) -> dict[tuple[str, int, str], float]:
    """Return the `busy_shares` of the steps whose speed the host limits.

    The rest of a step is communication or waiting. Only the part that the difference from the step alone proves is taken as
    communication: the lower end of its interval. If the GPUs are busy for less than 90 % of a step together with this part, they
    wait for a host: their own, or that of a rank that is slower.
    """
    proven = {step_of(row): row.ci_low or 0.0 for row in measured(select(rows, experiment="scaling", metric="alone_difference"))}
    shares = busy_shares(rows).items()
    return {step: share for step, share in shares if share + max(proven.get(step, 0.0), 0.0) < _BUSY_ENOUGH}


def _idle(rows: Sequence[Row]) -> list[str]:
    """Return a sentence with the steps whose speed the host limits, and during which part of each step the GPUs are busy."""
    steps = [
        f"{variant.replace('_', ' ')} on {ranks}{f' ({mode})' if ranks > 1 else ''}: {percent(share)} %"
        for (variant, ranks, mode), share in host_bound_steps(rows).items()
    ]
    if not steps:
        return []
    why = f"without exposed communication, the GPUs are busy for less than {percent(_BUSY_ENOUGH)} % of a step"
    return [f"The host limits the speed, because {why}. {', '.join(steps)}."]


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
    bound = host_bound_steps(own)

    def steps(row: Row) -> list[tuple]:
        return [(row.variant, 1, _MODES[0]), step_of(row)]

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
        timings = [time for time in times if step_of(time) in steps(row)]
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
