"""Figures on quantised weights, decoding, and training with few bits."""

from typing import Any

from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.bars import value_bars
from hyperion.figures.material import Material, Plot, measured
from hyperion.figures.style import absences, add_notes, errors_of, look, new_figure, whole_numbers
from hyperion.results import Row

TITLES = {"quantization": "Quantised weights", "decode_speed": "Decoding one sequence", "qlora": "Training with few bits"}


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
    value_bars(speed, times, names, 1.0)
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
        value_bars(axes, series, [f"{row.variant}, {row.params['mode']}" for row in series], 1e3)
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
    add_notes(figure, [*([note] if note else []), *absences(rows, lambda row: row.variant, _unlimited_name)])
    return figure


def _unlimited_name(row: Row) -> str:
    return f"{row.variant}, {row.params['model']}"


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
    value_bars(states, bytes_rows, [row.variant for row in bytes_rows], 1e-6)
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
    Plot("quantization", "quantization", "Perplexity and time of quantised models by scheme.", quantization),
    Plot("decode_speed", "decode_speed", "Time of a token by model, weights and way to launch.", decode_speed),
    Plot("qlora", "qlora", "Losses and optimizer states with few bits.", qlora),
)
# Folder for tables and figures in a run's benchmarks/, as in `coverage`.
RESULTS_FOLDER = "inference"
