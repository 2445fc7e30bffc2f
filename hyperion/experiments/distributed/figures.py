"""Figures of distributed training: the same losses on one device and on many, resumed by fewer, and after a kill."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import number
from hyperion.figures.material import Material, measured
from hyperion.figures.plot import Plot
from hyperion.figures.style import COLOURS, GRID, INK, MUTED, add_notes, limit_line, look, new_figure, whole_numbers
from hyperion.results import Row

_SMALLEST = 1e-9  # where a difference of exactly zero is drawn on a logarithmic axis
_ZERO = f"A distance of exactly zero is drawn at {_SMALLEST:g}."


def parity(material: Material) -> Figure | None:
    """Losses of every strategy, and their relative distance from one device's, step by step."""
    rows = material.of("parallel_parity", metric="relative_difference")
    if not rows:
        return None
    curves = material.samples("parallel_parity").pivot(index="step", columns="strategy", values="loss")
    ranks = rows[0].params["ranks"]
    figure, (left, right) = new_figure(
        f"{rows[0].params['model']}, one device and {ranks} ranks", material.machine("parallel_parity"), 2
    )
    for place, strategy in enumerate(curves):
        shown = "one device" if strategy == "single" else strategy.upper()
        left.plot(curves.index, curves[strategy], label=shown, linewidth=3.2 - place, **_line(place))
        if strategy != "single":
            _differences(right, curves.index, curves[strategy], curves["single"], shown, place)
    left.set(xlabel="optimizer step", ylabel="loss, nats per token", title="Losses")
    whole_numbers(left.xaxis)
    left.legend()
    _difference_panel(right, rows[0].check_tolerance, "Relative distance from one device")
    add_notes(figure, [_ZERO])
    return figure


def distributed_training(material: Material) -> Figure | None:
    """Loss of every training by step, and each rank's own loss beside it: what ranks that wait for each other differ in."""
    rows = measured(material.of("distributed_training"))
    samples = material.samples("distributed_training")
    if not rows or samples.empty:
        return None
    figure, (left, right) = new_figure("Training on all ranks", material.machine("distributed_training"), 2)
    steps = samples[samples["kind"] == "step"]
    for place, (name, curve) in enumerate(steps.groupby("training", sort=False)):
        left.plot(curve["step"], curve["loss"] / curve["loss"].iloc[0], label=name, **_line(place))
    left.set(xlabel="optimizer step", ylabel="loss over that of the first step", title="Loss of all ranks together")
    whole_numbers(left.xaxis)
    _headroom(left, 0.3)
    left.legend(loc="upper right")
    of_ranks = [row for row in rows if row.rank is not None]
    _draw_ranks(right, [row for row in of_ranks if row.metric == "training_loss"])
    add_notes(figure, ["The numbers are ranks.", *_rates_of_ranks(of_ranks), *_memory_of_ranks(of_ranks)])
    return figure


def _draw_ranks(axes: Axes, losses: list[Row]) -> None:
    """How far each rank's mean loss over the last epoch, on examples of its own, lies from the mean of all ranks."""
    names = list(dict.fromkeys(row.variant for row in losses))
    for place, name in enumerate(names):
        chosen = _last_epoch([row for row in losses if row.variant == name])
        mean = np.mean([row.value for row in chosen])
        x = place + (np.arange(len(chosen)) - (len(chosen) - 1) / 2) * 0.7 / len(chosen)
        percent = [100 * (row.value / mean - 1) for row in chosen]
        axes.bar(x, percent, width=0.6 / len(chosen), **_line(place))
        for at, high, row in zip(x, percent, chosen, strict=True):
            axes.annotate(
                f"{row.rank}",
                (at, high),
                xytext=(0, 3 if high >= 0 else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if high >= 0 else "top",
                fontsize=8,
            )
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=7.5)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.15)
    axes.set(ylabel="% from the mean of the ranks", title="Loss of each rank on its own examples, last epoch")


def _rates_of_ranks(rows: list[Row]) -> list[str]:
    """A sentence on how far the ranks' rates in the last epoch lie apart; nothing of a single rank."""
    apart = []
    for name in dict.fromkeys(row.variant for row in rows):
        rates = [row for row in rows if row.variant == name and row.metric in ("tokens_per_s", "images_per_s")]
        values = [row.value for row in _last_epoch(rates)]
        apart += [max(values) / min(values) - 1] if len(values) > 1 else []
    if not apart:
        return []
    return [f"Their rates, {number(100 * max(apart), 2)} % apart at most, tell nothing: they wait for each other in every step."]


def _memory_of_ranks(rows: list[Row]) -> list[str]:
    """A sentence on what each rank took at most in the last epoch; nothing when no rank could tell."""
    told: dict[str, str] = {}
    for name in dict.fromkeys(row.variant for row in rows):
        peaks = _last_epoch([row for row in rows if row.variant == name and row.metric in ("peak_memory_gib", "peak_rss_gib")])
        if peaks:
            ends = dict.fromkeys(number(end([row.value for row in peaks]), 3) for end in (min, max))
            told[name] = " to ".join(ends)
    said = ", ".join(f"{name} {ends}" for name, ends in told.items())
    return [f"Peak memory of a rank in that epoch, GiB: {said}."] if said else []


def _last_epoch(rows: list[Row]) -> list[Row]:
    """Of rows of one training: those of its last epoch, by rank."""
    last = max((row.params["epoch"] for row in rows), default=None)
    return sorted((row for row in rows if row.params["epoch"] == last), key=lambda row: row.rank)


def resharding(material: Material) -> Figure | None:
    """Losses after a checkpoint, gone on with by other numbers of ranks, and their distance from the run that saved it."""
    rows = material.of("resharding", metric="relative_difference")
    if not rows:
        return None
    curves = material.samples("resharding").pivot(index="step", columns="ranks", values="loss")
    saved = rows[0].params["saved_by"]
    before = len(curves) - rows[0].params["steps"]
    figure, (left, right) = new_figure(f"A checkpoint of {saved} ranks", material.machine("resharding"), 2)
    left.plot(curves.index, curves[saved], color=INK, linewidth=3, label=f"{saved} ranks, not interrupted")
    left.axvline(before + 0.5, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    left.annotate(
        "checkpoint",
        (before + 0.5, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
        color=MUTED,
        fontsize=8.5,
    )
    after = curves[curves.index > before]
    for place, row in enumerate(rows):
        ranks = row.params["resumed_by"]
        name = f"resumed by {ranks}"
        left.plot(after.index, after[ranks], label=name, linestyle="none", **look(name, place), fillstyle="none", markersize=7)
        _differences(right, after.index, after[ranks], after[saved], name, place)
    left.set(xlabel="optimizer step", ylabel="loss, nats per token", title="Losses")
    whole_numbers(left.xaxis)
    left.legend()
    _difference_panel(right, rows[0].check_tolerance, f"Relative distance from the {saved} ranks")
    add_notes(figure, [_ZERO])
    return figure


def rank_failure(material: Material) -> Figure | None:
    """Losses of a run that was killed and resumed over those of one that was left alone, with the steps it lost."""
    rows = material.of("rank_failure", metric="detection_time_s")
    if not rows:
        return None
    samples, told = material.samples("rank_failure"), rows[0]
    figure, (axes,) = new_figure("A rank is killed", material.machine("rank_failure"))
    alone, resumed = (samples[samples["run"] == run] for run in ("undisturbed", "resumed"))
    axes.plot(alone["step"], alone["loss"], label="left alone", linewidth=3.2, **_line(0))
    axes.plot(
        resumed["step"],
        resumed["loss"],
        label="killed, then resumed",
        linestyle="none",
        fillstyle="none",
        markersize=7,
        **look("resumed", 1),
    )
    _headroom(axes, 0.12)  # for the names of the lines
    _mark_kill(axes, _sizes(material, told))
    axes.set(
        xlabel="optimizer step",
        ylabel="loss, nats per token",
        title=f"Rank {told.params['rank']} ended by {told.params['signal']}; the launcher said so {told.value:.1f} s later",
    )
    axes.legend()
    whole_numbers(axes.xaxis)
    return figure


def _sizes(material: Material, row: Row) -> dict:
    """The sizes that the experiment of a row was run with, as its provenance has them; none in runs that kept none."""
    stored = material.run.finished(row.notebook, row.experiment) or {}
    return (stored.get("provenance") or {}).get("sizes") or {}


def _mark_kill(axes: Axes, sizes: dict) -> None:
    """Lines at the last checkpoint before the kill and at the kill, the steps between them shaded."""
    if not {"kill_after", "checkpoint_every"} <= sizes.keys():
        return
    killed = sizes["kill_after"]
    saved = killed - killed % sizes["checkpoint_every"]
    if saved < killed:
        lost = f"lost and made again: {killed - saved} steps"
        axes.axvspan(saved + 0.5, killed + 0.5, color=GRID, linewidth=0, zorder=0.5, label=lost)
    marks = [(saved, f"last checkpoint: step {saved}", "right"), (killed, f"killed after step {killed}", "left")]
    for step, text, side in marks if saved else marks[1:]:
        axes.axvline(step + 0.5, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            text,
            (step + 0.5, 0.99),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if side == "right" else 5, 0),
            textcoords="offset points",
            ha=side,
            va="top",
            color=MUTED,
            fontsize=8.5,
        )


def _headroom(axes: Axes, share: float) -> None:
    """Room above the curves, as a share of their height."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + share * (top - bottom))


def _line(place: int) -> dict:
    return {"color": COLOURS[place % len(COLOURS)]}


def _differences(axes: Axes, steps, values: pd.Series, reference: pd.Series, label: str, place: int) -> None:
    distance = np.maximum(np.abs(values / reference - 1), _SMALLEST)
    axes.plot(steps, distance, label=label, **look(label, place))


def _difference_panel(axes: Axes, tolerance: float, title: str) -> None:
    limit_line(axes, tolerance, f"tolerance {tolerance:g}", MUTED)
    axes.set(yscale="log", xlabel="optimizer step", title=title, ylim=(_SMALLEST / 2, 10 * tolerance))
    whole_numbers(axes.xaxis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.82))


TITLES = {
    "parallel_parity": "One device and many: the same losses",
    "distributed_training": "Training on all ranks",
    "resharding": "Checkpoints across numbers of ranks",
    "rank_failure": "A rank dies",
}

PLOTS = (
    Plot(
        "parallel_parity",
        "parallel_parity",
        "The losses of one device and of all ranks lie on each other; their distance shows on a logarithmic axis only.",
        parity,
    ),
    Plot(
        "distributed_training",
        "distributed_training",
        "Loss by step, and how far each rank's loss on its own examples lies from that of all ranks together.",
        distributed_training,
    ),
    Plot("resharding", "resharding", "A checkpoint goes on with fewer ranks: the next losses are the same.", resharding),
    Plot(
        "rank_failure",
        "rank_failure",
        "A run loses to the death of a rank only the steps after its last checkpoint; the resumed run makes them again.",
        rank_failure,
    ),
)
