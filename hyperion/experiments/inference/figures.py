"""Figures on runtimes, quantised weights, decoding, and training with few bits."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, items, measured, number
from hyperion.figures.style import COLOURS, absences, add_notes, errors_of, look, new_figure, whole_numbers, write_at
from hyperion.results import Row

TITLES = {
    "runtimes": "Runtimes of trained models",
    "quantization": "Quantised weights",
    "decode_speed": "Decoding one sequence",
    "qlora": "Training with few bits",
}
_PERCENTILES = ("latency_p50_s", "latency_p95_s", "latency_p99_s")
_COMPILED, _EAGER = "torch.compile", "eager"


def runtime_latency(material: Material) -> Figure | None:
    """Draw the latency percentiles for one example, in one panel per model."""
    rows = [row for row in material.of("runtimes") if row.metric in _PERCENTILES]
    return _panels(material, rows, "Latency of one example", "ms, one example", 1e3)


def runtime_throughput(material: Material) -> Figure | None:
    """Draw the throughput of the best batch size of each runtime, in one panel per model."""
    rows = [row for row in material.of("runtimes") if row.metric == "samples_per_s"]
    # Omit batches that the search tried and rejected because they do not fit or take too long. The row of a runtime that cannot
    # be used has no role. Keep it, because it contains the reason.
    best = [row for row in rows if row.params.get("role") in (None, "best batch")]
    searched = {runtime: _searched(rows, runtime) for runtime in (_COMPILED, _EAGER)}
    notes = []
    if searched[_COMPILED] and searched[_COMPILED] < searched[_EAGER]:
        tried = ", ".join(map(str, sorted(searched[_COMPILED])))
        notes.append(f"{_COMPILED}: only the batches {tried} were tried, because each needs a compilation.")
    return _panels(material, best, "Throughput of the best batch", "examples/s", 1.0, notes)


def _searched(rows: list[Row], runtime: str) -> set[int]:
    return {row.params["batch"] for row in rows if row.variant == runtime and row.params.get("role") == "search"}


def kernel_counts(material: Material) -> Figure | None:
    """Draw the number of kernels that one call launches, in one panel per model."""
    rows = [row for row in material.of("runtimes") if row.metric == "kernels_per_call"]
    return _panels(material, rows, "Kernels of one call", "kernels", 1.0)


def _panels(
    material: Material, rows: list[Row], title: str, label: str, factor: float, notes: Sequence[str] = ()
) -> Figure | None:
    known = measured(rows)
    if not known:
        return None
    models = list(dict.fromkeys(row.params["model"] for row in known))
    most = max(len([row for row in known if row.params["model"] == model]) for model in models)
    figure, panels = new_figure(title, material.machine("runtimes"), len(models), height=2.2 + 0.3 * most)
    for axes, model in zip(panels, models, strict=True):
        rows_of_model = [row for row in known if row.params["model"] == model]
        variants = list(dict.fromkeys(row.variant for row in rows_of_model))
        colours = [look(row.variant, variants.index(row.variant))["color"] for row in rows_of_model]
        _bars(axes, rows_of_model, [_name(row) for row in rows_of_model], factor, colours)
        axes.set(xlabel=label, xlim=(0, axes.get_xlim()[1] * 1.3))
        if axes.get_xlim()[1] >= 5000:  # long tick labels would touch each other
            axes.xaxis.set_major_formatter(lambda value, _: items(value))
        axes.set_title(model)
    # Only throughput rows have a limit, so do not add notes about the missing limit of other rows.
    noted = [row for row in rows if row.value is None or row.limit_source]
    add_notes(figure, [*notes, *absences(noted, lambda row: _absent_name(row, known), lambda row: row.variant)])
    return figure


def _bars(axes: Axes, rows: Sequence[Row], names: Sequence[str], factor: float, colours: Sequence[str] | None = None) -> None:
    """Draw a horizontal bar for each row, with its interval and its value.

    Args:
        axes: panel to draw into.
        rows: rows with values.
        names: name of each bar.
        factor: factor that converts the unit of the rows to the unit of the axis.
        colours: colour of each bar. If None, all have the first colour.
    """
    for place, row in enumerate(rows):
        value = not_none(row.value)
        colour = colours[place] if colours else COLOURS[0]
        axes.barh([place], [factor * value], xerr=errors_of([row], factor), height=0.7, color=colour)
        end = value if row.ci_high is None else row.ci_high
        write_at(axes, number(factor * value, 3), (factor * end, place), (4, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _name(row: Row) -> str:
    if row.metric in _PERCENTILES:
        return f"{row.variant}, {row.metric.split('_')[1]}"
    return f"{row.variant}, batch {row.params['batch']}" if row.metric == "samples_per_s" else row.variant


def _absent_name(row: Row, drawn: Sequence[Row]) -> str:
    """Name a row without a value: the runtime, and if it has other values, the model, and if this model has, the percentile."""
    models = {other.params["model"] for other in drawn if other.variant == row.variant}
    model = row.params.get("model")
    if not models or model is None:
        return row.variant
    name = f"{row.variant}, {model}"
    return f"{name}, {row.metric.split('_')[1]}" if model in models and row.metric in _PERCENTILES else name


def quantization(material: Material) -> Figure | None:
    """Draw two quantities of each quantisation scheme: perplexity and speed-up, both relative to the original model.

    Perplexity is plotted against the bytes of the weights.
    """
    rows = material.of("quantization")
    ratios = measured(row for row in rows if row.metric == "perplexity_ratio")
    if not ratios:
        return None
    figure, (quality, speed) = new_figure("Quantised weights", material.machine("quantization"), 2, height=4.6)
    stored = {_scheme(row): not_none(row.value) for row in measured(rows) if row.metric == "weight_bytes"}
    drawn = [row for row in ratios if _scheme(row) in stored]
    for position, row in enumerate(drawn):
        megabytes = stored[_scheme(row)] / 1e6
        percent, error = 100 * (not_none(row.value) - 1), errors_of([row], 100)
        style = look(row.variant, position)
        quality.errorbar([megabytes], [percent], yerr=error, fmt=style["marker"], color=style["color"], label=_scheme_name(row))
    quality.axhline(0, color="0.6", linewidth=0.8)
    quality.set(xlabel="MB of quantised weights", ylabel="perplexity above the original, %")
    quality.legend(fontsize=7.5, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    times = measured(row for row in rows if row.metric == "speedup")
    names = [f"{_scheme_name(row)}, {row.params['model']}" for row in times]
    _bars(speed, times, names, 1.0)
    speed.axvline(1, color="0.6", linewidth=0.8)
    speed.set(xlabel="speed-up over the original", xlim=(0, speed.get_xlim()[1] * 1.2))
    add_notes(figure, absences(_absent(rows, "weight_bytes"), lambda row: row.variant))
    return figure


def decode_speed(material: Material) -> Figure | None:
    """Draw the time per token of each model, variant and mode, with its limit and its prediction."""
    rows = [row for row in material.of("decode_speed") if row.metric == "decode_time_s"]
    known = measured(rows)
    if not known:
        return None
    models = list(dict.fromkeys(row.params["model"] for row in known))
    figure, panels = new_figure("Decoding one sequence", material.machine("decode_speed"), len(models), height=4.2)
    for axes, model in zip(panels, models, strict=True):
        series = [row for row in known if row.params["model"] == model]
        _bars(axes, series, [f"{row.variant}, {row.params['mode']}" for row in series], 1e3)
        for place, row in enumerate(series):
            for bound, colour in ((row.limit, "black"), (row.predicted, "tab:orange")):
                if bound is not None:
                    axes.plot([1e3 * bound] * 2, [place - 0.4, place + 0.4], color=colour, linewidth=1.5)
        axes.set(xlabel="ms per token", xlim=(0, axes.get_xlim()[1] * 1.25))
        axes.set_title(model)
    lines = [
        ("Black: limit by the data sheet's bandwidth.", any(row.limit is not None for row in known)),
        ("Orange: predicted from the measured bandwidth of a copy.", any(row.predicted is not None for row in known)),
    ]
    note = " ".join(text for text, is_drawn in lines if is_drawn)
    add_notes(figure, [*([note] if note else []), *absences(rows, lambda row: row.variant)])
    return figure


def qlora(material: Material) -> Figure | None:
    """Draw the loss curves of the variants, and the bytes of their optimizer states."""
    samples, rows = material.samples("qlora"), material.of("qlora")
    if samples.empty or not len(rows):
        return None
    figure, (curves, states) = new_figure("Training with few bits", material.machine("qlora"), 2, height=4.2)
    for position, name in enumerate(dict.fromkeys(samples["variant"])):
        series = samples[samples["variant"] == name]
        style: dict[str, Any] = look(name, position) | {"marker": ""}
        # The curves of a quantised variant and its twin (the same training without quantisation) overlap, so one is dashed.
        style["linestyle"] = "--" if position % 2 else "-"
        curves.plot(series["step"], series["loss"], label=name, **style)
    curves.set(xlabel="optimizer step", ylabel="training loss, nats per completion token")
    whole_numbers(curves.xaxis)
    curves.legend(fontsize=8)
    bytes_rows = measured(row for row in rows if row.metric == "optimizer_state_bytes")
    _bars(states, bytes_rows, [row.variant for row in bytes_rows], 1e-6)
    states.set(xlabel="MB of optimizer state", xlim=(0, states.get_xlim()[1] * 1.2))
    add_notes(figure, absences(_absent(rows, "loss_difference_nats"), lambda row: row.variant))
    return figure


def _absent(rows: list[Row], metric: str) -> list[Row]:
    return [row for row in rows if row.metric == metric and row.value is None]


def _scheme(row: Row) -> tuple[str, str, str]:
    # The runs contain schemes of the same name for a language model and for a classifier.
    return row.variant, row.params["runtime"], row.params["model"]


def _scheme_name(row: Row) -> str:
    return f"{row.variant} ({row.params['runtime']})"


PLOTS = (
    Plot("runtime_latency", "runtimes", "Median, 95th and 99th percentile of the latency by runtime.", runtime_latency),
    Plot("runtime_throughput", "runtimes", "Rate of the best batch by runtime.", runtime_throughput),
    Plot("kernel_counts", "runtimes", "Kernels that one call launches, by runtime.", kernel_counts),
    Plot("quantization", "quantization", "Perplexity and time of quantised models by scheme.", quantization),
    Plot("decode_speed", "decode_speed", "Time of a token by model, weights and way to launch.", decode_speed),
    Plot("qlora", "qlora", "Losses and optimizer states with few bits.", qlora),
)
