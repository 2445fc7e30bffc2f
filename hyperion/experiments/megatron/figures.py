"""Figures of the chapter on megatron-core: differences from the plain loop, the bubble of a pipeline, the loss of a training."""

from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, measured
from hyperion.figures.style import COLOURS, INK, absences, add_notes, errors_of, look, new_figure, whole_numbers

TITLES = {
    "megatron_adaptation": "The adaptation",
    "adaptation_advice": "The advice of the guide",
    "megatron_parity": "Layouts of ranks against a plain loop",
    "pipeline_bubble": "The bubble of a pipeline",
    "layout_speed": "Step time of layouts",
    "megatron_resharding": "Four ranks save, one rank loads",
    "loss_scale_states": "The dynamic loss scale",
    "indexed_tokens": "Files of tokens",
    "megatron_pretraining": "Pre-training",
    "documented_shapes": "Memory of the documented shapes",
    "recommended_layouts": "The recommended layouts",
}
# Differences of zero are drawn here, because the axis is logarithmic.
_FLOOR = 1e-8


def megatron_parity(material: Material) -> Figure | None:
    """Draw the largest difference of losses and of gradient norms for each layout, with the prediction and the tolerance."""
    rows = [row for row in measured(material.of("megatron_parity")) if row.metric == "relative_difference"]
    if not rows:
        return None
    figure, (axes,) = new_figure("Difference from a plain loop", material.machine("megatron_parity"), 1, height=3.8)
    names = list(dict.fromkeys(row.variant for row in rows))
    for place, what in enumerate(dict.fromkeys(row.params["what"] for row in rows)):
        series = [row for row in rows if row.params["what"] == what]
        values = [max(_FLOOR, not_none(row.value)) for row in series]
        axes.plot(values, [names.index(row.variant) for row in series], label=what, linestyle="none", **look(what, place))
    predicted = next((row.predicted for row in rows if row.predicted is not None), None)
    for value, label, style in ((predicted, "predicted", (0, (4, 2))), (rows[0].check_tolerance, "tolerance", (0, (1, 1)))):
        if value is not None:
            axes.axvline(value, color=INK, linestyle=style, linewidth=1.2, label=label)
    axes.set(xscale="log", xlabel="largest relative difference of all steps", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)  # above the axes, so that it hides no line
    add_notes(figure, absences([row for row in material.of("megatron_parity") if row.value is None], lambda row: row.variant))
    return figure


def pipeline_bubble(material: Material) -> Figure | None:
    """Draw the bubble fraction by the number of micro-batches, with (p - 1) / (m + p - 1) as a line."""
    rows = sorted(measured(material.of("pipeline_bubble")), key=lambda row: row.params["micro_batches"])
    if not rows:
        return None
    figure, (axes,) = new_figure("Bubble of a pipeline", material.machine("pipeline_bubble"), 1, height=3.8)
    counts = [row.params["micro_batches"] for row in rows]
    axes.errorbar(counts, [not_none(row.value) for row in rows], errors_of(rows), label="1F1B, measured", **look("measured"))
    predicted = [(row.params["micro_batches"], row.predicted) for row in rows if row.predicted is not None]
    if predicted:
        x, y = zip(*predicted, strict=True)
        axes.plot(x, y, color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="(p - 1) / (m + p - 1)")
    axes.set(xlabel="micro-batches of a step", ylabel="share of the step that a stage waits", xlim=(0, None))
    axes.legend()
    whole_numbers(axes.xaxis)
    return figure


def layout_speed(material: Material) -> Figure | None:
    """Draw the time of a step in each layout and in this library, and beside it the speed-up over the first layout."""
    rows = measured(material.of("layout_speed"))
    times = [row for row in rows if row.metric == "step_time_s"]
    if not times:
        return None
    figure, (left, right) = new_figure("One training, divided in several ways", material.machine("layout_speed"), 2, height=3.8)
    names = [row.variant for row in times]
    colours = [COLOURS["megatron" in name] for name in names]
    lengths = [1e3 * not_none(row.value) for row in times]
    left.barh(range(len(names)), lengths, 0.6, xerr=errors_of(times, 1e3), color=colours, error_kw={"linewidth": 1})
    left.set(xlabel="time of a step (ms)", yticks=range(len(names)), yticklabels=names)
    ratios = [row for row in rows if row.metric == "speedup"]
    places = [names.index(row.variant) for row in ratios]
    right.errorbar([not_none(row.value) for row in ratios], places, xerr=errors_of(ratios), label="measured", fmt="o", color=INK)
    predicted = [(row.predicted, place) for row, place in zip(ratios, places, strict=True) if row.predicted is not None]
    if predicted:
        x, y = zip(*predicted, strict=True)
        right.plot(x, y, label="predicted without communication", linestyle="none", **look("predicted", 1))
    right.set(xlabel=f"times as fast as {ratios[0].params['over']}" if ratios else "", yticks=range(len(names)), yticklabels=[])
    right.set_ylim(left.get_ylim())
    right.legend(loc="lower left", bbox_to_anchor=(0, 1))  # above the axes, so that it hides no point
    for axes in (left, right):
        axes.invert_yaxis()
    return figure


def megatron_pretraining(material: Material) -> Figure | None:
    """Draw the training loss by step, with the entropy of single tokens and the loss on the test split as lines."""
    rows, samples = measured(material.of("megatron_pretraining")), material.samples("megatron_pretraining")
    if not rows or samples.empty:
        return None
    figure, (axes,) = new_figure("Training with megatron-core", material.machine("megatron_pretraining"), 1, height=3.8)
    axes.plot(samples["step"], samples["loss"], color=COLOURS[0], linewidth=1.2, label="training loss")
    for row, style in zip(rows, ((0, (1, 1)), (0, (4, 2))), strict=False):
        label = "entropy of single tokens" if row.variant == "unigram" else "loss on the test split"
        axes.axhline(not_none(row.value), color=INK, linestyle=style, linewidth=1.2, label=label)
    axes.set(xlabel="optimizer step", ylabel="nats per token")
    axes.legend()
    whole_numbers(axes.xaxis)
    return figure


PLOTS = (
    Plot("megatron_parity", "megatron_parity", "Losses and gradient norms of layouts against a plain loop.", megatron_parity),
    Plot("pipeline_bubble", "pipeline_bubble", "Share of a step that a stage waits, by micro-batches.", pipeline_bubble),
    Plot("layout_speed", "layout_speed", "Time of a step in layouts of megatron-core and in this library.", layout_speed),
    Plot(
        "megatron_pretraining", "megatron_pretraining", "Training loss, and the entropy of single tokens.", megatron_pretraining
    ),
)
