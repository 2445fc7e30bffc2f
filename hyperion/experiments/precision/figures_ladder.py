"""The training ladder as steps: what each rung takes off a step's time and memory, and how far it moves the loss."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.precision.tables_ladder import EXPERIMENT, Step, ladders
from hyperion.figures.formats import memory_unit, number
from hyperion.figures.material import Material
from hyperion.figures.style import COLOURS, GRID, INK, MUTED, add_notes, new_figure

_LESS, _MORE = COLOURS[2], COLOURS[1]


def training_ladder(material: Material) -> Figure | None:
    """A line for each model: time, memory, and distance of the loss from the first rung's."""
    models = ladders(material.of(EXPERIMENT))
    if not models:
        return None
    rungs = max(map(len, models.values()))
    figure, panels = new_figure(
        "A training step, rung by rung",
        material.machine(EXPERIMENT),
        3,
        lines=len(models),
        width=11.4,
        height=1.2 + len(models) * (0.9 + 0.24 * rungs),
    )
    for place, (model, steps) in enumerate(models.items()):
        time, memory, loss = panels[3 * place : 3 * place + 3]
        _draw_steps(time, steps, [1e3 * step.time.value for step in steps], "ms a step")
        per_gib, unit = memory_unit([step.memory.value for step in steps if step.memory])
        held = [step.memory and per_gib * step.memory.value for step in steps]
        _draw_steps(memory, steps, held, f"{unit} at the fullest moment")
        _draw_losses(loss, steps)
        time.set_yticks(range(len(steps)), [step.name for step in steps])
        time.set_title(model)
    notes = ["Each rung adds to the one above it; bars reach from that one's value to its own, the percentage is the change."]
    notes.append("Losses compared with the first rung's: circles early, squares late; bars: what other rounding explains.")
    notes += [f"{name}: {reason}." for name, reason in _absent(material).items()]
    add_notes(figure, notes)
    return figure


def _draw_steps(axes: Axes, steps: list[Step], values: list[float | None], label: str) -> None:
    before: float | None = None
    for place, value in enumerate(values):
        if value is None:
            axes.annotate("not counted", (0, place), va="center", fontsize=8, color=MUTED)
            continue
        start = 0.0 if before is None else before
        colour = GRID if before is None else _LESS if value <= start else _MORE
        axes.barh(place, value - start, left=start, height=0.62, color=colour)
        axes.plot([value, value], [place - 0.31, place + 0.31], color=INK, linewidth=1.6)
        change = "" if before is None else f"  {100 * (value / before - 1):+.0f} %"
        axes.annotate(
            f"{number(value, 3)}{change}",
            (max(value, start), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        before = value
    _finish(axes, steps, label)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.45)


def _draw_losses(axes: Axes, steps: list[Step]) -> None:
    for place, step in enumerate(steps):
        for row, marker, height in ((step.early, "o", -0.14), (step.late, "s", 0.14)):
            if row is None:
                continue
            axes.plot(100 * row.value, place + height, marker, color=INK, markersize=4.5)
            axes.plot(100 * row.check_tolerance, place + height, "|", color=_MORE, markersize=9, markeredgewidth=2)
    axes.set_xscale("symlog", linthresh=1e-4)
    _finish(axes, steps, "% between losses; bars: allowed")
    axes.set_xlim(left=0)


def _finish(axes: Axes, steps: list[Step], label: str) -> None:
    axes.set_yticks(range(len(steps)), [""] * len(steps))
    axes.set_ylim(len(steps) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def _absent(material: Material) -> dict[str, str]:
    rows = material.of(EXPERIMENT, metric="step_time_s", value=None)
    return {row.params["rung"]: row.value_reason for row in rows}
