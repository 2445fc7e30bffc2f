"""Figures of the image classifier's speed: how soon it is accurate, and its training path beside the plain one."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import items
from hyperion.figures.material import Material, measured
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, errors_of, limit_line, new_figure, whole_numbers
from hyperion.results import Row

LOOPS = {"plain": (COLOURS[1], "plain public loop"), "hyperion": (COLOURS[0], "this library")}


def time_to_accuracy(material: Material) -> Figure | None:
    """Held-out accuracy over seconds of training, a line for each seed, and the accuracy that was to be reached.

    Reads samples of kind "evaluation": columns accuracy, time_s, seed.
    """
    rows = material.of("image_classifier", metric="time_to_accuracy_s")
    samples = material.samples("image_classifier") if rows else pd.DataFrame()
    if not rows or "time_s" not in samples:
        return None
    evaluated = samples[(samples["kind"] == "evaluation") & samples["time_s"].notna()]
    figure, (axes,) = new_figure(f"How soon {rows[0].variant} is accurate", material.machine("image_classifier"), height=3.6)
    seeds = sorted(evaluated["seed"].unique())
    for position, seed in enumerate(seeds):
        curve = evaluated[evaluated["seed"] == seed].sort_values("time_s")
        look = {"color": COLOURS[0], "marker": "o"} if position == 0 else {"color": MUTED, "linewidth": 1.0, "alpha": 0.7}
        axes.plot(curve["time_s"], curve["accuracy"], markersize=4, zorder=3 - min(position, 1), **look)
    target = rows[0].params["target"]
    limit_line(axes, target, f"to be reached: {100 * target:g} %", INK)
    for row in measured(rows)[:1]:
        axes.axvline(row.value, color=COLOURS[2], linewidth=1.4)
        axes.annotate(
            f"after {row.value:.3g} s",
            (row.value, 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            color=COLOURS[2],
        )
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")
    axes.set(xlim=(0, None), ylim=(None, 1.0), xlabel="seconds of training", ylabel="% of held-out images correct")
    told = ["A dot an epoch. Seconds are those of the steps, loader included; compiling, evaluating and saving are not."]
    missed = [row.value_reason for row in rows[:1] if row.value is None]
    add_notes(figure, told + missed + ([f"Grey: other seeds, {len(seeds) - 1} of them."] if len(seeds) > 1 else []))
    return figure


def image_training_speed(material: Material) -> Figure | None:
    """Images per second of both training paths by batch with the ratio above, and their losses over the same batches."""
    rows = measured(material.of("image_training_speed"))
    rates = [row for row in rows if row.metric == "images_per_s"]
    if not rates:
        return None
    title = f"Training {rates[0].variant}, loader included"
    figure, (left, right) = new_figure(title, material.machine("image_training_speed"), 2)
    batches = sorted({row.params["batch"] for row in rates})
    _draw_alone(left, batches, [row for row in rows if row.metric == "share"])
    _draw_rates(left, batches, rates, [row for row in rows if row.metric == "speedup"])
    draw_losses(right, material.samples("image_training_speed"), "image")
    limits = {row.params["batch"]: row.limit for row in rates if row.limit}
    notes = [f"The device's limit for these FLOPs: {items(max(limits.values()))} images/s."] if limits else []
    how = next((row.params for row in rows if row.metric == "speedup"), {})
    if how and not how["replayed"]:
        notes.append("Here the library's steps are not replayed from a graph: both loops do the same, one step at a time.")
    add_notes(figure, notes)
    return figure


def _draw_alone(axes: Axes, batches: list[int], shares: list[Row]) -> None:
    """What would be left if a step took no more than its products, each alone."""
    label: str | None = "its products alone"
    for batch, told in {row.params["batch"]: row.params for row in shares}.items():
        place = batches.index(batch)
        rate = batch / sum(seconds for name, seconds in told.items() if name.endswith("_s"))
        axes.plot([place - 0.4, place + 0.4], [rate, rate], color=INK, linestyle="--", linewidth=1, label=label)
        label = None


def _draw_rates(axes: Axes, batches: list[int], rates: list[Row], ratios: list[Row]) -> None:
    for place, (loop, (colour, label)) in enumerate(LOOPS.items()):
        chosen = [row for row in rates if row.params["loop"] == loop]
        x = [batches.index(row.params["batch"]) + 0.36 * (place - 0.5) for row in chosen]
        axes.bar(x, [row.value for row in chosen], 0.34, color=colour, label=label, yerr=errors_of(chosen), ecolor=INK)
    for ratio in ratios:
        batch = ratio.params["batch"]
        x = batches.index(batch) + 0.18
        top = max(row.ci_high or row.value for row in rates if row.params["batch"] == batch)
        axes.annotate(
            f"{ratio.value:.2f} ×\n[{ratio.ci_low:.2f}, {ratio.ci_high:.2f}]",
            (x, top),
            xytext=(0, 4),
            ha="center",
            textcoords="offset points",
            fontsize=9,
            fontweight="bold",
        )
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.yaxis.set_major_formatter(lambda value, _: items(value))
    axes.margins(y=0.3)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="images/s", ylim=(0, None), title="Speed, in turn; 95 % interval")
    axes.legend(loc="upper right" if len(batches) > 2 else "upper center", ncols=2)


def draw_losses(axes: Axes, samples: pd.DataFrame, item: str) -> None:
    """Losses of both loops over the same batches, in nats per item. Reads samples of kind "parity": columns loop, batch,
    step, loss."""
    told = samples[samples["kind"] == "parity"]
    batch = told["batch"].max()
    for loop, width in (("plain", 4.0), ("hyperion", 1.3)):
        curve = told[(told["loop"] == loop) & (told["batch"] == batch)].sort_values("step")
        colour, label = LOOPS[loop]
        axes.plot(curve["step"], curve["loss"], color=colour, linewidth=width, label=label, alpha=0.55 if width > 2 else 1)
    whole_numbers(axes.xaxis)
    title = f"Same weights, same batches of {batch:,.0f} {item}s"
    axes.set(xlabel="optimizer step", ylabel=f"loss, nats per {item}", title=title)
    axes.legend()
