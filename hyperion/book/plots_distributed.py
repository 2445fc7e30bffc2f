"""Figures of distributed training: the same losses on one device and on many, resumed by fewer, and after a kill."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hyperion.book.material import Material, measured
from hyperion.book.style import COLOURS, INK, MUTED, add_notes, limit_line, look, new_figure, whole_numbers

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
    left.legend()
    _difference_panel(right, rows[0].check_tolerance, "Relative distance from one device")
    add_notes(figure, [_ZERO])
    return figure


def distributed_training(material: Material) -> Figure | None:
    """Loss of every training by step, and what each rank did of it."""
    rows = measured(material.of("distributed_training"))
    samples = material.samples("distributed_training")
    if not rows or samples.empty:
        return None
    figure, (left, right) = new_figure("Training on all ranks", material.machine("distributed_training"), 2)
    steps = samples[samples["kind"] == "step"]
    for place, (name, curve) in enumerate(steps.groupby("training", sort=False)):
        left.plot(curve["step"], curve["loss"] / curve["loss"].iloc[0], label=name, **_line(place))
    left.set(xlabel="optimizer step", ylabel="loss over that of the first step", title="Loss of all ranks together")
    left.legend()
    rates = [r for r in rows if r.metric in ("tokens_per_s", "images_per_s") and r.rank is not None]
    last = {r.variant: max(x.params["epoch"] for x in rates if x.variant == r.variant) for r in rates}
    names = list(last)
    for place, name in enumerate(names):
        chosen = sorted((r for r in rates if r.variant == name and r.params["epoch"] == last[name]), key=lambda r: r.rank)
        mean = np.mean([r.value for r in chosen])
        x = place + (np.arange(len(chosen)) - (len(chosen) - 1) / 2) * 0.7 / len(chosen)
        right.bar(x, [r.value / mean for r in chosen], width=0.6 / len(chosen), color=COLOURS[place % len(COLOURS)])
        for at, row in zip(x, chosen, strict=True):
            right.annotate(f"{row.rank}", (at, 0.02), ha="center", color="white", fontsize=8)
    right.axhline(1, color=INK, linestyle=(0, (5, 3)), linewidth=1)
    right.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=7.5)
    right.grid(axis="x", visible=False)
    right.set(ylabel="rate over the mean of the ranks", title="Throughput of each rank, last epoch", ylim=(0, 1.3))
    add_notes(figure, ["The number in a bar is its rank."])
    return figure


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
    left.annotate("checkpoint", (before + 0.5, 0.98), xycoords=("data", "axes fraction"), xytext=(4, 0),
                  textcoords="offset points", va="top", color=MUTED, fontsize=8.5)  # fmt: skip
    after = curves[curves.index > before]
    for place, row in enumerate(rows):
        ranks = row.params["resumed_by"]
        name = f"resumed by {ranks}"
        left.plot(after.index, after[ranks], label=name, linestyle="none", **look(name, place), fillstyle="none", markersize=7)
        _differences(right, after.index, after[ranks], after[saved], name, place)
    left.set(xlabel="optimizer step", ylabel="loss, nats per token", title="Losses")
    left.legend()
    _difference_panel(right, rows[0].check_tolerance, f"Relative distance from the {saved} ranks")
    add_notes(figure, [_ZERO])
    return figure


def rank_failure(material: Material) -> Figure | None:
    """Losses of a run that was killed and resumed over those of one that was left alone."""
    rows = material.of("rank_failure", metric="detection_time_s")
    if not rows:
        return None
    samples, told = material.samples("rank_failure"), rows[0]
    figure, (axes,) = new_figure("A rank is killed", material.machine("rank_failure"))
    alone, resumed = (samples[samples["run"] == run] for run in ("undisturbed", "resumed"))
    axes.plot(alone["step"], alone["loss"], label="left alone", linewidth=3.2, **_line(0))
    axes.plot(resumed["step"], resumed["loss"], label="killed, then resumed", linestyle="none", fillstyle="none",
              markersize=7, **look("resumed", 1))  # fmt: skip
    axes.set(
        xlabel="optimizer step", ylabel="loss, nats per token",
        title=f"Rank {told.params['rank']} ended by {told.params['signal']}; the launcher said so {told.value:.1f} s later",
    )  # fmt: skip
    axes.legend()
    whole_numbers(axes.xaxis)
    return figure


def _line(place: int) -> dict:
    return {"color": COLOURS[place % len(COLOURS)]}


def _differences(axes, steps, values: pd.Series, reference: pd.Series, label: str, place: int) -> None:
    distance = np.maximum(np.abs(values / reference - 1), _SMALLEST)
    axes.plot(steps, distance, label=label, **look(label, place))


def _difference_panel(axes, tolerance: float, title: str) -> None:
    limit_line(axes, tolerance, f"tolerance {tolerance:g}", MUTED)
    axes.set(yscale="log", xlabel="optimizer step", title=title, ylim=(_SMALLEST / 2, 10 * tolerance))
    whole_numbers(axes.xaxis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.82))
