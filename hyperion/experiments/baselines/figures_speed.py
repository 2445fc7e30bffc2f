"""Figures and a table of training speed: this library's training loops compared with plain public ones."""

from collections.abc import Iterable
from textwrap import fill

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, items, measured, number
from hyperion.figures.style import COLOURS, INK, add_notes, errors_of, legend_above_data, new_figure, whole_numbers, write_at
from hyperion.results import Row

# Colour and label of each loop. The captured loop exists only on devices that can capture a step as a graph.
_LOOPS = {
    "plain": (COLOURS[1], "plain public loop"),
    "plain, captured": (COLOURS[3], "plain loop in a graph"),
    "hyperion": (COLOURS[0], "this library"),
}
_SHORT = {"plain": "plain", "plain, captured": "graph"}  # names of the other loops in the speed-up labels
# Colour of each part of a roof, an estimate of the least step time. In older stored results each matrix product was timed alone,
# and attention was a separate part.
_PARTS = {"products": COLOURS[6], "attention": COLOURS[2], "activations": COLOURS[5], "logits": COLOURS[4], "optimizer": INK}
_FACTORS = "Factors: the step time of a loop divided by that of this library."
# Label of a share, by the param "what" of its row.
_OWN = "of the roof of its own products"
_ROOFS = {"of the step's roof": "roof", _OWN: "roof of its\nown products"}


def image_training_speed(material: Material) -> Figure | None:
    """Draw each loop's images per second by batch size, the speed-ups, and the losses of two loops on the same batches."""
    rows = _of_loops(material, "image_training_speed")
    rates = [row for row in rows if row.metric == "images_per_s"]
    if not rates:
        return None
    title = f"Training {rates[0].variant}, loader included"
    figure, (left, right) = new_figure(title, material.machine("image_training_speed"), 2)
    batches = sorted({row.params["batch"] for row in rates})
    _draw_alone(left, batches, [row for row in rows if row.metric == "share"])
    _draw_rates(left, batches, rates, [row for row in rows if row.metric == "speedup"])
    _draw_losses(right, material.samples("image_training_speed"), "image")
    limits = {row.params["batch"]: row.limit for row in rates if row.limit}
    notes = [f"At the device's peak, these FLOPs would allow {number(max(limits.values()))} images/s."] if limits else []
    how = next((row.params for row in rows if row.metric == "speedup"), {})
    if how and not how["replayed"]:
        notes.append(
            "On this device the library's steps are not replayed from a graph. Both loops run the same operators one by one."
        )
    add_notes(figure, notes)
    legend_above_data(left, ncols=2, fontsize=8)
    return figure


def _draw_alone(axes: Axes, batches: list[int], shares: list[Row]) -> None:
    """Draw the throughput of a hypothetical training step that computes only its matrix products.

    Each matrix product was timed alone. The time of the hypothetical step is the sum of these times.
    """
    for index, (batch, params) in enumerate({row.params["batch"]: row.params for row in shares}.items()):
        place = batches.index(batch)
        rate = batch / sum(seconds for name, seconds in params.items() if name.endswith("_s"))
        label = None if index else "only its matrix products"
        axes.plot([place - 0.4, place + 0.4], [rate, rate], color=INK, linestyle="--", linewidth=1, label=label)


def _draw_rates(axes: Axes, batches: list[int], rates: list[Row], ratios: list[Row]) -> None:
    """Draw one bar for each loop and batch size, labelled with the speed-ups of this library's loop over the others."""
    loops = [loop for loop in _LOOPS if any(row.params["loop"] == loop for row in rates)]
    spacing = 0.72 / len(loops)
    for place, loop in enumerate(loops):
        colour, label = _LOOPS[loop]
        chosen = [row for row in rates if row.params["loop"] == loop]
        x = [batches.index(row.params["batch"]) + spacing * (place - (len(loops) - 1) / 2) for row in chosen]
        width, heights = spacing - 0.02, [not_none(row.value) for row in chosen]
        axes.bar(x, heights, width, color=colour, label=label, yerr=errors_of(chosen), ecolor=INK)
    for place, batch in enumerate(batches):
        of_batch = [ratio for ratio in ratios if ratio.params["batch"] == batch]
        lines = [
            f"{ratio.value:.2f} × {_SHORT[ratio.params['over']]} [{ratio.ci_low:.2f}, {ratio.ci_high:.2f}]" for ratio in of_batch
        ]
        top = max(row.ci_high or not_none(row.value) for row in rates if row.params["batch"] == batch)
        ours = place + spacing * (len(loops) - 1) / 2  # the last bar of the group
        write_at(axes, "\n".join(lines), (ours, top), (0, 4), ha="center", fontsize=8)
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.yaxis.set_major_formatter(lambda value, _: items(value))
    axes.margins(y=0.3)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="images/s", ylim=(0, None), title="Loops, timed alternately; 95 % interval")


def _draw_losses(axes: Axes, samples: pd.DataFrame, item: str) -> None:
    """Draw the losses of both training loops on the same batches, in nats per token or per image.

    The losses come from the samples whose "kind" is "parity". The columns "loop", "batch", "step" and "loss" are used.
    """
    samples = samples.query("kind == 'parity'")
    batch = max(samples["batch"])
    for loop, width in (("plain", 4.0), ("hyperion", 1.3)):
        curve = samples.query("loop == @loop and batch == @batch").sort_values("step")
        colour, label = _LOOPS[loop]
        axes.plot(curve["step"], curve["loss"], color=colour, linewidth=width, label=label, alpha=0.55 if width > 2 else 1)
    whole_numbers(axes.xaxis)
    title = f"Same weights, same batches of {batch:,.0f} {item}s"
    axes.set(xlabel="optimizer step", ylabel=f"loss, nats per {item}", title=title)
    axes.legend()


def language_speed(material: Material) -> Figure | None:
    """Draw the step time of each loop, the estimated least step times (roofs) by part, and the losses of two loops."""
    rows = _of_loops(material, "language_training_speed")
    times = {row.params["loop"]: row for row in rows if row.metric == "step_time_s"}
    if not {"plain", "hyperion"} <= times.keys():
        return None
    ours = times["hyperion"]
    title = f"Training {ours.variant}, {ours.params['batch']:,} tokens a step"
    figure, (left, right) = new_figure(title, material.machine("language_training_speed"), 2)
    shares = [row for row in rows if row.metric == "share"]
    _draw_steps(left, times, shares, [row for row in rows if row.metric == "speedup"])
    _draw_losses(right, material.samples("language_training_speed"), "token")
    add_notes(figure, _notes(shares, compiled=ours.params["compiled"]))
    return figure


def _notes(shares: list[Row], compiled: bool) -> list[str]:
    notes = [] if compiled else ["Neither loop is compiled here. Both run the same operators one by one."]
    if not shares:
        return [*notes, _FACTORS, "There is no roof, because this run has measured no ceilings."]
    params = {name: value for row in shares for name, value in row.params.items()}
    ways = []
    if "gemm_tflops" in params:
        fastest = number(params["gemm_tflops"])
        ways.append(f"Roof: all products at the highest rate that this run has measured, {fastest} TFLOPS.")
    if any(row.params["what"] == _OWN for row in shares):
        alone = "each timed alone" if "attention_s" in params else "timed one after the other, alternating with the steps"
        ways.append(f"Roof of its own products: the products of the step, {alone}.")
    return [
        *notes,
        "A roof is the time of the matrix products plus the time of all other bytes at the rate of the fastest stream, "
        f"{number(params['bandwidth_gb_s'])} GB/s. {' '.join(ways)} Percentages: each roof as a share of the step "
        f"time. {_FACTORS}",
    ]


def speed_ladder_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a table with one line for each rung of the speed ladder at each batch size, with 95 % intervals.

    A rung is a training step that adds one change to the previous rung. The first rung is the plain loop, and the last rung is
    this library's loop. If a rung was not timed, its line gives the reason. The next rung is then compared with the last timed
    rung.
    """
    ladder = [row for row in rows if "rung" in row.params]
    ratios = {(row.params["batch"], row.params["rung"]): row for row in ladder if row.metric == "speedup"}
    lines, first = [], {}
    for row in (row for row in ladder if row.metric == "step_time_s"):
        batch, ratio = row.params["batch"], ratios.get((row.params["batch"], row.params["rung"]))
        line = {"batch": f"{batch:,}", "rung": row.params["rung"], "adds": row.params["adds"]}
        if row.value is None:
            lines.append(
                line | {"ms a step": "", "× the rung before [95 %, one launch]": f"not timed: {row.value_reason}", "× plain": ""}
            )
            continue
        gain = "" if ratio is None else f"{ratio.value:.3f} [{ratio.ci_low:.3f}, {ratio.ci_high:.3f}]"
        whole = first.setdefault(batch, row.value) / row.value
        lines.append(
            line
            | {"ms a step": number(1e3 * row.value, 4), "× the rung before [95 %, one launch]": gain, "× plain": f"{whole:.3f}"}
        )
    return pd.DataFrame(lines)


def _of_loops(material: Material, experiment: str) -> list[Row]:
    """Return the measured rows that compare whole loops, without the rows of the speed ladder, which have their own table."""
    return [row for row in measured(material.of(experiment)) if "rung" not in row.params]


def _draw_steps(axes: Axes, times: dict[str, Row], shares: list[Row], ratios: list[Row]) -> None:
    names, drawn = [], set()
    for what, name in _ROOFS.items():
        for row in [row for row in shares if row.params["what"] == what][:1]:
            bottom = 0.0
            for part, colour in _PARTS.items():
                height = 1e3 * row.params.get(f"{part}_s", 0.0)
                label = part if height and part not in drawn else None
                axes.bar([len(names)], [height], 0.6, bottom=[bottom], color=colour, label=label)
                bottom, drawn = bottom + height, drawn | {part} if height else drawn
            _annotate(axes, len(names), bottom, f"{bottom:.3g} ms")
            names.append(name)
    for loop in (loop for loop in reversed(_LOOPS) if loop in times):
        row, (colour, label) = times[loop], _LOOPS[loop]
        at, height = len(names), 1e3 * not_none(row.value)
        errors = errors_of([row])
        axes.bar([at], [height], 0.6, color=colour, yerr=errors and [[1e3 * e[0]] for e in errors], ecolor=INK)
        lines = [f"{height:.3g} ms"]
        of_loop = [share for share in shares if share.params["loop"] == loop]
        if of_loop:
            lines.append(", ".join(f"{100 * not_none(share.value):.0f} %" for share in of_loop))
        for ratio in (ratio for ratio in ratios if ratio.params["over"] == loop):
            lines[:0] = [f"{ratio.value:.3f} ×", f"[{ratio.ci_low:.3f}, {ratio.ci_high:.3f}]"]
        _annotate(axes, at, 1e3 * (row.ci_high or not_none(row.value)), "\n".join(lines))
        names.append(label)
    axes.set_xticks(range(len(names)), [name if "\n" in name else fill(name, 12) for name in names])
    axes.margins(y=0.5)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="ms per step", ylim=(0, None), title="Time of a step, loops timed alternately; 95 % interval")
    if shares:
        axes.legend(loc="upper left")


def _annotate(axes: Axes, x: float, y: float, text: str) -> None:
    write_at(axes, text, (x, y), (0, 4), ha="center", fontsize=8, fontweight="bold")
