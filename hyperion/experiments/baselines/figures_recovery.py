"""Figures of what must not change: a run that goes on after a fault, and the same run made in other ways."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import number
from hyperion.figures.material import Material, measured
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, new_figure
from hyperion.results import Row

_PHASES = ("loader", "forward", "backward", "optimizer", "evaluation", "save")


def recovery(material: Material) -> Figure | None:
    """Every trial where its fault struck, by phase and kind: how many steps were lost, and which runs did not come back."""
    rows = material.of("recovery", metric="steps_lost")
    if not rows:
        return None
    trials = material.samples("recovery")
    kinds = [row.variant for row in rows]
    figure, (axes,) = new_figure(
        "Faults struck, and what they cost", material.machine("recovery"), height=1.6 + 0.62 * len(kinds)
    )
    for (phase, kind), cell in trials.groupby(["phase", "kind"]):
        spread = 0.8 / len(cell)
        for place, trial in enumerate(cell.itertuples()):
            x = _PHASES.index(phase) + (place - (len(cell) - 1) / 2) * spread
            y = kinds.index(kind)
            axes.scatter(
                [x],
                [y],
                s=340,
                color=COLOURS[2] if trial.recovered else COLOURS[1],
                marker="o" if trial.recovered else "X",
                zorder=2,
            )
            axes.annotate(f"{trial.lost}", (x, y), ha="center", va="center", color="white", fontsize=9, fontweight="bold")
    axes.set_xticks(range(len(_PHASES)), _PHASES)
    axes.set_yticks(range(len(kinds)), [f"{row.variant}\nmay lose {row.params['may_lose']}" for row in rows])
    axes.set(xlim=(-0.5, len(_PHASES) - 0.5), ylim=(len(kinds) - 0.5, -0.5), xlabel="phase that the fault struck in")
    lost = int((~trials["recovered"].astype(bool)).sum())
    told = f"{len(trials) - lost} of {len(trials)} runs went on bit for bit as if nothing had happened"
    add_notes(figure, [f"In each circle: optimizer steps done again. {told}{'; crosses did not' if lost else ''}."])
    return figure


def parity_ladder(material: Material) -> Figure | None:
    """How far each rung's losses are from the first one's by step, and from those of the rung before beside what they may be."""
    rows = measured(material.of("parity_ladder", metric="relative_difference"))
    if not rows:
        return None
    steps = [row for row in rows if row.params["beside"] == "the rung before"]
    figure, (left, right) = new_figure("The same training, one thing more at a time", material.machine("parity_ladder"), 2)
    _draw_drift(left, material)
    _draw_rungs(right, steps)
    missing = [row for row in material.of("parity_ladder") if row.value is None]
    add_notes(figure, [f"Not climbed: {row.variant}, {row.value_reason}." for row in missing])
    return figure


def _draw_drift(axes: Axes, material: Material) -> None:
    samples = material.samples("parity_ladder")
    curves, names = samples.pivot(index="step", columns="rung", values="loss"), list(dict.fromkeys(samples["rung"]))
    for place, name in enumerate(names[1:]):
        apart = (curves[name] / curves[names[0]] - 1).abs().to_numpy()
        if apart.any():
            width = max(1.0, 6.5 - 1.2 * place)  # a rung that equals the one before lies on top of it
            axes.plot(curves.index, np.where(apart > 0, apart, np.nan), label=name, linewidth=width, color=COLOURS[place])
    axes.set(yscale="log", xlabel="optimizer step", ylabel="share of the loss", title=f"Distance from the losses of {names[0]}")
    axes.legend(fontsize=8)


def _draw_rungs(axes: Axes, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        if row.check_tolerance:
            axes.plot([place - 0.35, place + 0.35], [row.check_tolerance] * 2, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        if row.value:
            axes.scatter([place], [row.value], s=60, color=COLOURS[place], zorder=2)
            axes.annotate(
                number(row.value, 2), (place, row.value), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8
            )
        else:
            axes.annotate("equal", (place, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8.5, color=MUTED)
    axes.set_xticks(range(len(rows)), [row.variant for row in rows], rotation=20, ha="right", fontsize=8.5)
    axes.set(yscale="log", xlim=(-0.6, len(rows) - 0.2), title="Distance from the rung before; allowed: dashed")
    axes.margins(y=0.15)
