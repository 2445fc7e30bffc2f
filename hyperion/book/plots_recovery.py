"""Figures of what must not change: a run that goes on after a fault, and the same run made in other ways."""

from matplotlib.figure import Figure

from hyperion.book.material import Material
from hyperion.book.style import COLOURS, add_notes, new_figure

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
            axes.scatter([x], [y], s=340, color=COLOURS[2] if trial.recovered else COLOURS[1],
                         marker="o" if trial.recovered else "X", zorder=2)  # fmt: skip
            axes.annotate(
                f"{trial.lost}", (x, y), ha="center", va="center", color="white", fontsize=9, fontweight="bold"
            )
    axes.set_xticks(range(len(_PHASES)), _PHASES)
    axes.set_yticks(range(len(kinds)), [f"{row.variant}\nmay lose {row.params['may_lose']}" for row in rows])
    axes.set(xlim=(-0.5, len(_PHASES) - 0.5), ylim=(len(kinds) - 0.5, -0.5), xlabel="phase that the fault struck in")
    lost = int((~trials["recovered"].astype(bool)).sum())
    told = f"{len(trials) - lost} of {len(trials)} runs went on bit for bit as if nothing had happened"
    add_notes(figure, [f"In each circle: optimizer steps done again. {told}{'; crosses did not' if lost else ''}."])
    return figure
