"""Figures of distributed training: loss parity, the loss of each rank, resharding, and the failure of a rank."""

from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, Quote, measured, number, select, values
from hyperion.figures.style import COLOURS, GRID, INK, MUTED, add_notes, limit_line, look, new_figure, whole_numbers, write_at
from hyperion.results import Row

_SMALLEST = 1e-9  # a logarithmic axis has no zero, so a difference of zero is drawn at this value
_ZERO = f"A difference of zero is drawn at {_SMALLEST:g}."


def parity(material: Material) -> Figure | None:
    """Plot each strategy's loss by step, and its relative difference from the loss of one device."""
    rows = material.of("parallel_parity", metric="relative_difference")
    if not rows:
        return None
    curves = material.samples("parallel_parity").pivot(index="step", columns="strategy", values="loss")
    ranks = rows[0].params["ranks"]
    figure, (left, right) = new_figure(
        f"{rows[0].params['model']}, one device and {ranks} rank{'s' * (ranks > 1)}", material.machine("parallel_parity"), 2
    )
    for place, strategy in enumerate(curves):
        shown = "one device" if strategy == "single" else strategy.upper()
        left.plot(curves.index, curves[strategy], label=shown, linewidth=3.2 - place, **_line(place))
        if strategy != "single":
            _differences(right, curves.index, curves[strategy], curves["single"], shown, place)
    left.set(xlabel="optimizer step", ylabel="loss, nats per token", title="Losses")
    whole_numbers(left.xaxis)
    left.legend()
    _difference_panel(right, not_none(rows[0].check_tolerance), "Relative difference from one device")
    add_notes(figure, [_ZERO])
    return figure


def distributed_training(material: Material) -> Figure | None:
    """Plot the loss of every training run by step, and each rank's loss on its own examples."""
    rows = measured(material.of("distributed_training"))
    samples = material.samples("distributed_training")
    if not rows or samples.empty:
        return None
    of_ranks = [row for row in rows if row.rank is not None]
    several = len({row.rank for row in of_ranks}) > 1  # a single rank has no difference from the mean of the ranks
    title = "Training on all ranks" if several else "Training on one rank"
    figure, (left, *others) = new_figure(title, material.machine("distributed_training"), 2 if several else 1)
    steps = samples.query("kind == 'step'")
    for place, (name, curve) in enumerate(steps.groupby("training", sort=False)):
        losses = np.asarray(curve["loss"])
        left.plot(curve["step"], losses / losses[0], label=name, **_line(place))
    left.set(
        xlabel="optimizer step",
        ylabel="loss divided by the loss of the first step",
        title="Loss of all ranks together" if several else "Loss",
    )
    whole_numbers(left.xaxis)
    _headroom(left, 0.3)
    left.legend(loc="upper right")
    for right in others:
        _draw_ranks(right, [row for row in of_ranks if row.metric == "training_loss"])
    names = ["The numbers at the bars are ranks."] if several else []
    add_notes(figure, [*names, *_rates_of_ranks(of_ranks), *_memory_of_ranks(of_ranks)])
    return figure


def _draw_ranks(axes: Axes, losses: list[Row]) -> None:
    """Draw each rank's mean loss over the last epoch, as the difference in percent from the mean over all ranks."""
    names = list(dict.fromkeys(row.variant for row in losses))
    for place, name in enumerate(names):
        chosen = _last_epoch([row for row in losses if row.variant == name])
        mean = np.mean(values(chosen))
        x = place + (np.arange(len(chosen)) - (len(chosen) - 1) / 2) * 0.7 / len(chosen)
        percent = [100 * (value / mean - 1) for value in values(chosen)]
        axes.bar(x, percent, width=0.6 / len(chosen), **_line(place))
        for at, high, row in zip(x, percent, chosen, strict=True):
            write_at(
                axes,
                f"{row.rank}",
                (at, high),
                (0, 3 if high >= 0 else -3),
                ha="center",
                va="bottom" if high >= 0 else "top",
                fontsize=8,
            )
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xticks(range(len(names)), names, fontsize=7.5)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.15)
    axes.set(ylabel="difference from the mean of the ranks, %", title="Loss of each rank on its own examples, last epoch")


def _rates_of_ranks(rows: list[Row]) -> list[str]:
    """Return a list with one note on the spread of the ranks' throughputs in the last epoch. It is empty for a single rank."""
    spreads = []
    for name in dict.fromkeys(row.variant for row in rows):
        rates = [row for row in rows if row.variant == name and row.metric in ("tokens_per_s", "images_per_s")]
        last = values(_last_epoch(rates))
        spreads += [max(last) / min(last) - 1] if len(last) > 1 else []
    if not spreads:
        return []
    return [f"Rates of the ranks differ by {number(100 * max(spreads), 2)} % at most: ranks wait for each other in every step."]


def _memory_of_ranks(rows: list[Row]) -> list[str]:
    """Return a list with one note on the ranks' peak memory in the last epoch, or an empty list if it was not measured."""
    ranges: dict[str, str] = {}
    for name in dict.fromkeys(row.variant for row in rows):
        peaks = _last_epoch([row for row in rows if row.variant == name and row.metric in ("peak_memory_gib", "peak_rss_gib")])
        if peaks:
            ends = dict.fromkeys(number(end(values(peaks)), 3) for end in (min, max))
            ranges[name] = " to ".join(ends)
    text = ", ".join(f"{name} {ends}" for name, ends in ranges.items())
    return [f"Peak memory of a rank in the last epoch, GiB: {text}."] if text else []


def _last_epoch(rows: list[Row]) -> list[Row]:
    """Return the last epoch's rows of one training run, sorted by rank."""
    last = max((row.params["epoch"] for row in rows), default=None)
    return sorted((row for row in rows if row.params["epoch"] == last), key=lambda row: not_none(row.rank))


def resharding(material: Material) -> Figure | None:
    """Plot the losses of runs that were resumed on fewer ranks, and their differences from the uninterrupted run."""
    rows = material.of("resharding", metric="relative_difference")
    if not rows:
        return None
    curves = material.samples("resharding").pivot(index="step", columns="ranks", values="loss")
    saved = rows[0].params["saved_by"]
    before = len(curves) - rows[0].params["steps"]
    figure, (left, right) = new_figure(f"A checkpoint of {saved} ranks", material.machine("resharding"), 2)
    left.plot(curves.index, curves[saved], color=INK, linewidth=3, label=f"{saved} ranks, uninterrupted")
    left.axvline(before + 0.5, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    write_at(
        left, "checkpoint", (before + 0.5, 0.98), (4, 0), xycoords=("data", "axes fraction"), va="top", color=MUTED, fontsize=8.5
    )
    after = curves[curves.index > before]
    for place, row in enumerate(rows):
        ranks = row.params["resumed_by"]
        name = f"resumed by {ranks} rank{'s' * (ranks > 1)}"
        left.plot(after.index, after[ranks], label=name, linestyle="none", **look(name, place), fillstyle="none", markersize=7)
        _differences(right, after.index, after[ranks], after[saved], name, place)
    left.set(xlabel="optimizer step", ylabel="loss, nats per token", title="Losses")
    whole_numbers(left.xaxis)
    left.legend()
    _difference_panel(right, not_none(rows[0].check_tolerance), f"Relative difference from the {saved} ranks")
    add_notes(figure, [_ZERO])
    return figure


def rank_failure(material: Material) -> Figure | None:
    """Plot the losses of the killed and resumed run and of the uninterrupted run, and mark the lost steps."""
    rows = material.of("rank_failure", metric="detection_time_s")
    if not rows:
        return None
    samples, detection = material.samples("rank_failure"), rows[0]
    figure, (axes,) = new_figure("A rank is killed", material.machine("rank_failure"))
    alone, resumed = (samples[samples["run"] == run] for run in ("undisturbed", "resumed"))
    axes.plot(alone["step"], alone["loss"], label="undisturbed", linewidth=3.2, **_line(0))
    axes.plot(
        resumed["step"],
        resumed["loss"],
        label="killed, then resumed",
        linestyle="none",
        fillstyle="none",
        markersize=7,
        **look("resumed", 1),
    )
    _headroom(axes, 0.12)  # room for the labels of the vertical lines
    _mark_kill(axes, _sizes(material, detection))
    axes.set(
        xlabel="optimizer step",
        ylabel="loss, nats per token",
        title=f"Rank {detection.params['rank']} killed by {detection.params['signal']}; reported {detection.value:.1f} s later",
    )
    axes.legend()
    whole_numbers(axes.xaxis)
    return figure


def _sizes(material: Material, row: Row) -> dict:
    """Return the options stored for this row's experiment, or {} if the run stored none."""
    stored = material.run.finished(row.notebook, row.experiment) or {}
    return (stored.get("provenance") or {}).get("sizes") or {}


def _mark_kill(axes: Axes, sizes: dict) -> None:
    """Draw lines at the last checkpoint and at the step after which a rank was killed, and shade the steps between them."""
    if not {"kill_after", "checkpoint_every"} <= sizes.keys():
        return
    killed = sizes["kill_after"]
    saved = killed - killed % sizes["checkpoint_every"]
    if saved < killed:
        lost = f"lost and repeated: {killed - saved} steps"
        axes.axvspan(saved + 0.5, killed + 0.5, color=GRID, linewidth=0, zorder=0.5, label=lost)
    marks = [(saved, f"last checkpoint: step {saved}", "right"), (killed, f"killed after step {killed}", "left")]
    for step, text, side in marks if saved else marks[1:]:
        axes.axvline(step + 0.5, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
        write_at(
            axes,
            text,
            (step + 0.5, 0.99),
            (-5 if side == "right" else 5, 0),
            xycoords=("data", "axes fraction"),
            ha=side,
            va="top",
            color=MUTED,
            fontsize=8.5,
        )


def _headroom(axes: Axes, share: float) -> None:
    """Add free space above the curves. `share` is the height of this space divided by the current height of the axis."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + share * (top - bottom))


def _line(place: int) -> dict:
    return {"color": COLOURS[place % len(COLOURS)]}


def _differences(axes: Axes, steps: ArrayLike, losses: ArrayLike, reference: ArrayLike, label: str, place: int) -> None:
    difference = np.maximum(np.abs(np.asarray(losses) / np.asarray(reference) - 1), _SMALLEST)
    axes.plot(steps, difference, label=label, **look(label, place))


def _difference_panel(axes: Axes, tolerance: float, title: str) -> None:
    limit_line(axes, tolerance, f"tolerance {tolerance:g}", MUTED)
    axes.set(yscale="log", xlabel="optimizer step", title=title, ylim=(_SMALLEST / 2, 10 * tolerance))
    whole_numbers(axes.xaxis)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.82))


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield the difference between the loss of each strategy and the loss of one device."""
    for row in select(rows, experiment="parallel_parity", metric="relative_difference"):
        ranks = row.params["ranks"]
        # With one rank, both runs train on one device, so their difference says nothing about parallel training.
        if ranks > 1:
            label = f"{row.variant.upper()} on {ranks} ranks: difference of the loss from one device"
            yield Quote(label, row, "difference", ranks)


TITLES = {
    "parallel_parity": "The same losses on one device and on several",
    "distributed_training": "Training on all ranks",
    "resharding": "Checkpoints on another number of ranks",
    "rank_failure": "Failure of a rank",
}

PLOTS = (
    Plot(
        "parallel_parity",
        "parallel_parity",
        "The losses of one device and of all ranks agree up to rounding (right, logarithmic).",
        parity,
    ),
    Plot(
        "distributed_training",
        "distributed_training",
        "Loss by step, and each rank's loss on its own examples relative to the mean of all ranks.",
        distributed_training,
    ),
    Plot("resharding", "resharding", "A checkpoint resumed by fewer ranks gives the same losses.", resharding),
    Plot(
        "rank_failure",
        "rank_failure",
        "When a rank fails, only the steps after the last checkpoint are lost. The resumed run repeats them.",
        rank_failure,
    ),
)
