"""Figures of fine-tuning: completion loss, memory of LoRA and of full fine-tuning, and losses on one and on several devices."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, measured, number, select, values
from hyperion.figures.style import (
    COLOURS,
    INK,
    MUTED,
    add_notes,
    errors_of,
    limit_line,
    look,
    new_figure,
    spread_labels,
    whole_numbers,
)
from hyperion.results import Row

_SMALLEST = 1e-9  # a logarithmic axis has no zero, so a difference of zero is drawn at this value
_MEMORY = (("peak_memory_gib", "device memory"), ("tensor_memory_gib", "bytes of tensors"))


def llama_lora(material: Material) -> Figure | None:
    """Draw two panels: losses and memory.

    The first shows the loss per completion token by step, and the held-out loss before and after training. The second shows the
    peak memory of a LoRA step and of a full fine-tuning step.
    """
    rows = measured(material.of("llama_lora"))
    held_out = sorted(select(rows, metric="validation_loss"), key=lambda row: row.params["step"])
    if not held_out:
        return None
    source = held_out[0].data_source
    title = f"Fine-tuning {held_out[0].params['model']}, data {source}"
    figure, (left, right) = new_figure(title, material.machine("llama_lora"), 2)
    _draw_losses(left, material, held_out)
    _draw_memory(right, rows)
    notes = ["Only tokens of completions carry a loss; prompts and padding do not."]
    if held_out[0].params["model"].startswith("random_"):
        notes.append("Random weights: the decrease of the loss says nothing about a pretrained Llama.")
    missing = [row for row in material.of("llama_lora") if row.value is None and row.metric.endswith("memory_gib")]
    notes += [f"{row.variant}: {row.value_reason}" for row in missing]
    add_notes(figure, notes)
    return figure


def _draw_losses(axes: Axes, material: Material, held_out: list[Row]) -> None:
    samples = material.samples("llama_lora")
    steps = samples.query("kind == 'step'").sort_values("step")
    axes.plot(steps["step"], steps["loss"], color=COLOURS[5], linewidth=1, label="training, each step")
    axes.errorbar(
        [row.params["step"] for row in held_out],
        values(held_out),
        errors_of(held_out),
        label="held-out rows, 95 % interval",
        linestyle="none",
        **look("held", 1),
    )
    levels = [(row.predicted, "random weights:\nln V + 1/2", MUTED) for row in held_out if row.predicted is not None]
    if held_out[0].limit is not None:
        levels.append((held_out[0].limit, "floor", INK))
    for loss, _, colour in levels:
        axes.axhline(loss, color=colour, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1.5)
    axes.set(xlabel="optimizer step", ylabel="nats per completion token", title="Loss on completions")
    axes.margins(y=0.12)
    axes.legend(loc="best")
    # Put the labels outside the panel. Inside, the markers and the first part of the curve would cover the upper label.
    spread_labels(axes, levels, gap_points=22)


def _draw_memory(axes: Axes, rows: list[Row]) -> None:
    """Draw one bar for each method, LoRA and full fine-tuning.

    The bar's height is the measured peak, its dark part the memory of weights, gradients and optimizer moments. A dashed line
    shows the predicted peak.
    """
    # Select the rows of a single step, which have the param "parameters". Other rows contain the peak memory of an epoch.
    rows = [row for row in rows if "parameters" in row.params]
    metric, name = next((m, n) for m, n in _MEMORY if select(rows, metric=m) or m == _MEMORY[-1][0])
    chosen = select(rows, metric=metric)
    for place, row in enumerate(chosen):
        axes.bar(place, not_none(row.value), width=0.5, color=COLOURS[place], alpha=0.55)
        axes.bar(place, not_none(row.limit), width=0.5, color=COLOURS[place])
        if row.predicted is not None:
            axes.hlines(row.predicted, place - 0.33, place + 0.33, color=INK, linestyle=(0, (4, 2)), linewidth=1.4)
    axes.set_xticks(range(len(chosen)), [f"{row.variant}\n{number(row.value, 3)} GiB" for row in chosen])
    axes.set(title=f"Peak of a step: {name}", ylabel="GiB", xlim=(-0.6, len(chosen) - 0.4))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.grid(axis="x", visible=False)
    axes.bar([0], [0], color=MUTED, label="weights, gradients, moments")
    axes.bar([0], [0], color=MUTED, alpha=0.55, label="activations, logits, other")
    axes.plot([], [], color=INK, linestyle=(0, (4, 2)), label="predicted")
    axes.legend(loc="upper left", fontsize=8)


def lora_sharded(material: Material) -> Figure | None:
    """Plot the losses of one device and of all ranks, and their relative difference, by step."""
    rows = measured(material.of("lora_sharded"))
    parity = [row for row in rows if row.params.get("what") == "training loss"]
    if not parity:
        return None
    row, samples = parity[0], material.samples("lora_sharded")
    steps = samples.query("kind == 'step'").sort_values("step")
    ranks = row.params["ranks"]
    title = f"LoRA of {row.params['model']} under FSDP2, {ranks} rank{'s' * (ranks > 1)}"
    figure, (left, right) = new_figure(title, material.machine("lora_sharded"), 2)
    left.plot(steps["step"], steps["alone"], color=COLOURS[0], linewidth=3.2, label="one device")
    left.plot(
        steps["step"],
        steps["sharded"],
        label=f"sharded over {ranks}",
        linestyle="none",
        fillstyle="none",
        markersize=7,
        **look("sharded", 1),
    )
    left.set(xlabel="optimizer step", ylabel="nats per completion token", title="Losses")
    left.legend()
    difference = np.maximum(np.abs(steps["sharded"] / steps["alone"] - 1), _SMALLEST)
    right.plot(steps["step"], difference, color=COLOURS[1], marker="s", linewidth=1)
    tolerance = not_none(row.check_tolerance)
    limit_line(right, tolerance, f"tolerance {tolerance:g}", MUTED)
    right.set(
        yscale="log", xlabel="optimizer step", title="Relative difference from one device", ylim=(_SMALLEST / 2, 10 * tolerance)
    )
    for axes in (left, right):
        whole_numbers(axes.xaxis)
    add_notes(figure, [f"A difference of zero is drawn at {_SMALLEST:g}."])
    return figure


TITLES = {"llama_lora": "Fine-tuning a Llama", "lora_sharded": "LoRA on ranks"}

PLOTS = (
    Plot(
        "llama_lora",
        "llama_lora",
        "Loss on completions before, during and after training; peak memory of a step of LoRA and of full fine-tuning.",
        llama_lora,
    ),
    Plot("lora_sharded", "lora_sharded", "Losses on one device and under FSDP2 agree.", lora_sharded),
)
