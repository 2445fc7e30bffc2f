"""Figures of training steps: host costs, phases of a step, and throughput and memory by batch size."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from hyperion.errors import not_none
from hyperion.figures.material import (
    Material,
    Plot,
    Quote,
    best_rows,
    items,
    measured,
    number,
    number_within,
    percent,
    select,
    values,
)
from hyperion.figures.style import COLOURS, INK, add_notes, errors_of, log_ticks, look, new_figure, write_at
from hyperion.figures.tables import MEMORY_IN_MIB, concatenated
from hyperion.results import Row
from hyperion.results.rows import OUT_OF_MEMORY

PHASES = ("forward", "backward", "optimizer")
_COLOURS: dict[str, str] = dict(zip(PHASES, COLOURS, strict=False))
_BAR = 0.36
_TINY_LAYERS = 2  # number of layers assumed for old operator-count rows that do not record it
_WORDS = {"channels_last": "ch.-last", "compiled": "compiled"}  # short labels for non-default params
# For each metric of a batch size: its column in the flat table, and the factor that converts values to the column's unit.
_BATCH_COLUMNS = {
    "forward_time_s": ("forward_ms", 1e3),
    "backward_time_s": ("backward_ms", 1e3),
    "optimizer_time_s": ("optimizer_ms", 1e3),
    "step_time_s": ("total_ms", 1e3),
    "peak_memory_gib": ("memory_mib", MEMORY_IN_MIB),
    "peak_rss_gib": ("memory_mib", MEMORY_IN_MIB),
    "samples_per_s": ("samples_per_s", 1.0),
}
_REFUSED = OUT_OF_MEMORY.removesuffix(": ")  # value in the flat table if a batch does not fit
_SHARES = {"mfu": ("of the peak (MFU)", COLOURS[5]), "mfu_maf": ("of the fastest product (MAF)", COLOURS[3])}


def operator_cost(material: Material) -> Figure | None:
    """Draw the host time of an operator and of a convolution, and of a Transformer layer in eager and in compiled mode."""
    rows = material.of("operator_cost")
    costs = measured(select(rows, metric="operator_time_s"))
    if not costs:
        return None
    blocks = measured(select(rows, metric="block_time_s"))
    figure, panels = new_figure("Costs of the host", material.machine("operator_cost"), 2 if blocks else 1, height=3.4)
    _draw_costs(panels[0], [(row.variant, row, 1.0) for row in costs], "One operator of an eager step")
    if blocks:
        operator = select(costs, variant="operator")[0]
        layer = operator.params["operators"] / operator.params.get("parts", _TINY_LAYERS)
        eager = f"eager, fp32,\n{number(layer)} operators"
        bars = [(eager, operator, layer), (f"compiled, {blocks[0].dtype}", blocks[0], 1.0)]
        _draw_costs(panels[1], bars, "One transformer layer, forward, backward, update")
    once = [f"Besides its operators, a step takes {_microseconds(row)}." for row in rows if row.metric == "step_overhead_s"]
    add_notes(figure, [*once, *(f"{row.variant}: {row.value_reason}." for row in rows if row.value is None)])
    return figure


def _interval_us(row: Row, times: float = 1.0) -> tuple[float, float, float]:
    """Return (value, lower end, upper end) of a row and its interval in microseconds, multiplied by `times`."""
    value, low, high = (1e6 * times * not_none(seconds) for seconds in (row.value, row.ci_low, row.ci_high))
    return value, low, high


def _microseconds(row: Row, times: float = 1.0) -> str:
    """Format a row's value, multiplied by `times`, in microseconds. The row's interval sets the number of digits."""
    return f"{number_within(*_interval_us(row, times))} µs"


def _draw_costs(axes: Axes, bars: list[tuple[str, Row, float]], title: str) -> None:
    """Draw one bar for each (name, row, factor). Its height is the row's host time times the factor, in microseconds."""
    for place, (_, row, times) in enumerate(bars):
        value, low, high = _interval_us(row, times)
        axes.bar(place, value, 0.5, yerr=[[value - low], [high - value]], color=COLOURS[place])
        write_at(axes, _microseconds(row, times), (place, high), (0, 3), ha="center")
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set(ylabel="microseconds of the host", title=title, xlim=(-0.8, len(bars) - 0.2))
    axes.set_ylim(0, 1.18 * axes.get_ylim()[1])
    axes.grid(False, axis="x")


def model_steps(material: Material) -> Figure | None:
    """Draw the training step of each model in each variant.

    The upper panels show the measured time of each phase, the least time that the device limits allow, and the predicted step
    time as a line. The lower panels show the model FLOPs per second as shares of the peak and of the rate of the fastest matrix
    product.
    """
    every = material.of("model_steps")
    rows = measured(every)
    models = list(dict.fromkeys(row.variant for row in rows if row.metric == "step_time_s"))
    if not models:
        return None
    used = [row for row in rows if row.metric in _SHARES]
    figure, panels = new_figure(
        "A training step in its phases",
        material.machine("model_steps"),
        len(models),
        lines=2 if used else 1,
        width=10.4,
        height=6.4 if used else 4.4,
    )
    for place, model in enumerate(models):
        mine = [row for row in rows if row.variant == model]
        _draw_steps(panels[place], mine)
        if used:
            _draw_shares(panels[len(models) + place], mine)
    panels[0].set_ylabel("ms of one step, median")
    marks = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    if any(row.limit is not None for row in _phases(rows)):
        marks.append(Patch(facecolor="white", edgecolor=INK, hatch="////", linewidth=0.8, label="least time at the limits"))
    if used:
        there = [metric for metric in _SHARES if any(row.metric == metric for row in used)]
        shares = [Patch(color=_SHARES[metric][1], label=_SHARES[metric][0]) for metric in there]
        lower = panels[len(models)]
        lower.set_ylabel("model FLOPs, %")
        lower.set_title(" ")  # leaves one line free for the legend
        legend = lower.legend(handles=shares, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
        legend.set_in_layout(False)  # the legend may extend into the next panel, which is empty there
    # The legend is between the title of the figure, which can be long, and the panels. It extends over the panels to the right.
    for axes in panels[: len(models)]:
        axes.set_title(axes.get_title(loc="left"), pad=26)
    legend = panels[0].legend(handles=marks, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    legend.set_in_layout(False)
    add_notes(figure, [*_notes(rows), *_left_out(every)])
    return figure


def _variants(rows: list[Row]) -> dict[str, list[Row]]:
    """Return a dict that maps the name of each training-step variant to its rows.

    The name states the dtype. If the step is compiled or does not use the default memory format, the name states this, too.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_name_of(row), []).append(row)
    return {name: mine for name, mine in found.items() if select(mine, metric="step_time_s")}


def _name_of(row: Row) -> str:
    # Rows from older versions of the library lack the params "layout" and "mode".
    words = [row.params.get("layout", ""), row.params.get("mode", "")]
    return "\n".join([row.dtype, *(_WORDS[word] for word in words if word in _WORDS)])


def _draw_steps(axes: Axes, rows: list[Row]) -> None:
    variants, tallest = _variants(rows), 0.0
    for x, mine in enumerate(variants.values()):
        phases, step = _phases(mine), select(mine, metric="step_time_s")[0]
        limited = any(row.limit is not None for row in phases)
        place = x - _BAR / 2 if limited else x
        _stack(axes, place, [(row.metric, not_none(row.value)) for row in phases], floor=False)
        if limited:
            _stack(axes, x + _BAR / 2, [(row.metric, row.limit or 0) for row in phases], floor=True)
        top = 1e3 * sum(values(phases))
        if step.predicted is not None:
            ends = [place - _BAR / 2 - 0.06, place + _BAR / 2 + 0.06]
            axes.plot(ends, [1e3 * step.predicted] * 2, color=INK, linewidth=1.6, zorder=4)
            tallest = max(tallest, 1e3 * step.predicted)
        share = "" if step.fraction_of_limit is None else f"\n{percent(step.fraction_of_limit)} %"
        write_at(
            axes,
            f"{number(1e3 * not_none(step.value), 3)}{share}",
            (place, max(top, 1e3 * (step.predicted or 0))),
            (0, 4),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    _name_variants(axes, list(variants))
    axes.set(title=rows[0].variant)
    axes.set_ylim(0, max(axes.get_ylim()[1], tallest) * 1.2)


def _draw_shares(axes: Axes, rows: list[Row]) -> None:
    variants, there = _variants(rows), [metric for metric in _SHARES if select(rows, metric=metric)]
    for x, mine in enumerate(variants.values()):
        for side, metric in zip((-0.5, 0.5) if len(there) > 1 else (0,), there, strict=True):
            for share in values(select(mine, metric=metric)):
                axes.bar([x + side * _BAR], [100 * share], _BAR, color=_SHARES[metric][1])
                write_at(axes, percent(share), (x + side * _BAR, 100 * share), (0, 2), ha="center", va="bottom", fontsize=8)
    _name_variants(axes, list(variants))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)


def _name_variants(axes: Axes, names: list[str]) -> None:
    axes.set_xticks(range(len(names)), names, fontsize=8)
    room = 0.6 if len(names) > 1 else 0.9
    axes.set_xlim(-room, len(names) - 1 + room)
    axes.grid(axis="x", visible=False)


def _phases(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the time of a phase (such as "forward"), in execution order."""
    rows = list(rows)
    return [row for name in PHASES for row in select(rows, metric=f"{name}_time_s")]


def _stack(axes: Axes, x: float, parts: list[tuple[str, float]], floor: bool) -> None:
    bottom = 0.0
    for metric, seconds in (part for part in parts if part[1]):
        colour = _COLOURS[metric.removesuffix("_time_s")]
        style: dict = (
            {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8} if floor else {"color": colour}
        )
        axes.bar([x], [seconds * 1e3], _BAR, bottom=bottom, **style)
        bottom += seconds * 1e3


def _notes(rows: list[Row]) -> list[str]:
    phases = _phases(rows)
    note = f"Batch {', '.join(sorted({str(row.params['batch']) for row in phases}))}."
    if any(row.limit is not None for row in phases):
        note += " Hatched: least time, with model FLOPs at the peak of the format at the device's maximum clock, and optimizer"
        note += " traffic at the memory's limit. Percentages: least time divided by measured time."
    # MFU is defined with the published peak. Its own limit is above 1 if that peak was computed at a lower clock.
    if any(row.limit is not None and row.limit > 1.001 for row in select(rows, metric="mfu")):
        note += " MFU: relative to the published peak, which is at a lower clock for some formats."
    if any(row.predicted is not None for row in select(rows, metric="step_time_s")):
        note += " Black line: predicted time."
    found = next(iter(select(rows, metric="mfu_maf")), None)
    if found is not None:
        note += f" MAF: rate of the fastest product of the format in this run's {found.params['maf']} experiment."
    without = {row.limit_source.removeprefix("no limit: ") for row in phases if row.limit is None}
    return [note] + [f"No least time: {reason}." for reason in sorted(without)]


def _left_out(rows: list[Row]) -> list[str]:
    """Return one sentence for each reason why steps are missing. The sentence names the variants of these steps."""
    missing: dict[str, dict[str, None]] = {}
    for row in select(rows, metric="step_time_s"):
        if row.value is None:
            missing.setdefault(row.value_reason, {})[f"{row.variant} {_name_of(row)}".replace("\n", " ")] = None
    return [f"{', '.join(names)}: {reason}." for reason, names in missing.items()]


def batch_scaling(material: Material) -> Figure | None:
    """Draw two panels by batch size: samples per second, and memory.

    The second panel also shows the line that predicts the largest batch that fits, and the batches that test the prediction.
    """
    rows = material.of("batch_scaling")
    rates = measured(select(rows, metric="samples_per_s"))
    if not rates:
        return None
    figure, (left, right) = new_figure("Throughput and memory by batch size", material.machine("batch_scaling"), 2)
    for position, model in enumerate(dict.fromkeys(row.variant for row in rates)):
        mine = [row for row in rows if row.variant == model]
        _draw_rates(left, select(measured(mine), metric="samples_per_s"), look(model, position))
        _draw_memory(right, mine, look(model, position))
    left.set(xscale="log", yscale="log", xlabel="batch", title="Throughput, dotted: predicted")
    left.set_ylabel("samples/s, median with 95 % interval")
    right.set(xscale="log", xlabel="batch", title="Peak memory; ×: out of memory")
    right.set_ylabel("GiB of device memory" if _on_device(rows) else "GiB resident in the process")
    right.set_ylim(0, right.get_ylim()[1] * 1.15)
    spread_above(right)
    log_ticks(left.yaxis)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(lambda value, _: items(value))
        axes.xaxis.minorticks_off()
    left.legend(loc="best")
    add_notes(figure, _memory_notes(rows))
    return figure


def _draw_rates(axes: Axes, rows: list[Row], style: dict) -> None:
    rows = sorted(rows, key=_batch)
    axes.errorbar([_batch(r) for r in rows], values(rows), errors_of(rows), label=rows[0].variant, **style)
    predicted = [(_batch(row), row.predicted) for row in rows if row.predicted is not None]
    axes.plot([batch for batch, _ in predicted], [rate for _, rate in predicted], ":", color=style["color"], alpha=0.7)


def _draw_memory(axes: Axes, rows: list[Row], style: dict) -> None:
    """Draw the measured peaks by batch size, the line through them, and the tested batch sizes.

    A cross marks a batch that does not fit.
    """
    peaks = [row for row in rows if row.metric in ("peak_memory_gib", "peak_rss_gib")]
    steady = sorted((row for row in measured(peaks) if row.params["step"] != "probe"), key=_batch)
    axes.plot([_batch(row) for row in steady], values(steady), linestyle="none", **style)
    slopes = measured(select(rows, metric="sample_memory_mib"))
    if not slopes or not steady:
        return
    last, last_gib, slope = _batch(steady[-1]), not_none(steady[-1].value), not_none(slopes[0].value) / 1024

    def line(batch: float) -> float:
        return last_gib + slope * (batch - last)

    probes = [row for row in peaks if row.params["step"] == "probe"]
    reach = np.geomspace(_batch(steady[0]), max([_batch(row) for row in probes], default=last), 200)
    axes.plot(reach, [line(batch) for batch in reach], color=style["color"], linewidth=1)
    for largest in values(measured(select(rows, metric="count"))):
        axes.plot([largest / 1.5, largest * 1.5], [line(largest)] * 2, "--", color=style["color"], linewidth=1.2)
    for row in probes:
        if row.value is not None:
            axes.plot([_batch(row)], [row.value], linestyle="none", **style)
            continue
        cross = _batch(row), line(_batch(row))
        axes.plot(*[[at] for at in cross], "x", color=style["color"], markersize=9, markeredgewidth=2.2)
        write_at(axes, f"{_batch(row):,}", cross, (0, 7), ha="center", va="bottom", fontsize=8, color=style["color"])


def spread_above(axes: Axes) -> None:
    """Move a panel's annotations upwards, from left to right, until they do not overlap."""
    figure = axes.get_figure(root=True)
    not_none(figure).draw_without_rendering()  # computes the positions and sizes of the annotations
    placed: list[Bbox] = []
    for text in sorted((text for text in axes.texts if isinstance(text, Annotation)), key=lambda text: text.xy):
        while any(text.get_window_extent().padded(2).overlaps(other) for other in placed):
            x, y = text.xyann
            text.xyann = (x, y + float(text.get_fontsize()))
        placed.append(text.get_window_extent())


def _memory_notes(rows: list[Row]) -> list[str]:
    notes = [
        "Lines: fits through the largest batch of the sweep and a batch that fills half of the limit. Dashes: the predicted "
        "largest batch. Crosses: larger batches that did not fit, drawn at the memory that the line predicts for them."
    ]
    missing = [row for row in rows if row.metric == "count" and row.value is None]
    return notes + [f"{row.variant} has no predicted largest batch: {row.value_reason}." for row in missing]


def _batch(row: Row) -> int:
    return row.params["batch"]


def _on_device(rows: list[Row]) -> bool:
    return any(row.metric == "peak_memory_gib" for row in rows)


def monitor_overhead(material: Material) -> Figure | None:
    """Draw the overhead of `hyperion monitor` on the step time for each pair of blocks, and the mean with its interval."""
    rows, samples = measured(material.of("monitor_overhead")), material.samples("monitor_overhead")
    if not rows:
        return None
    (row,) = rows
    times = {kind: group.sort_values("index")["time_s"].to_numpy() for kind, group in samples.groupby("kind")}
    figure, (axes,) = new_figure("Watching a training step", material.machine("monitor_overhead"), 1, height=3.4)
    differences = 100 * (times["monitor running"] / times["monitor stopped"] - 1)
    axes.plot(range(1, len(differences) + 1), differences, "o", color=COLOURS[0], label="one pair of blocks")
    axes.axhline(100 * not_none(row.value), color=COLOURS[1], label="mean")
    axes.axhspan(100 * not_none(row.ci_low), 100 * not_none(row.ci_high), color=COLOURS[1], alpha=0.2, label="its 95 % interval")
    axes.set(xlabel="pair", ylabel="step time with the monitor\nover that without, minus 1 (%)")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    step = number(1e3 * float(np.median(times["monitor stopped"])))
    add_notes(figure, [f"{row.variant}, batch {_batch(row)}: {step} ms a step. One reading every {row.params['interval_s']} s."])
    return figure


def headlines(rows: list[Row], is_steady: Callable[[Row], bool]) -> Iterator[Quote]:
    """Yield the fastest step of each reference model, over all formats and batch sizes.

    If the samples of the fastest step were not steady, the headlines omit the model. A slower step does not replace the fastest
    one, because a step with another batch size or format is not comparable. Host-bound steps are not yielded.
    """
    steps = [row for row in rows if row.experiment in ("model_steps", "batch_scaling")]
    for row in best_rows(select(steps, metric="samples_per_s"), lambda row: row.variant):
        if not _is_host_bound(row, steps):
            compiled = ", compiled" if row.params.get("mode") == "compiled" else ""
            yield Quote(f"{row.variant}, training, {row.dtype}{compiled}, batch {row.params['batch']:,}", row)


def _is_host_bound(rate: Row, steps: list[Row]) -> bool:
    """Return True if the host, and not the device, limits the time of a step.

    A step counts as host-bound if another step, with at most a quarter of its batch size, takes more than half of its time. If
    the device limited both, the smaller step would take about a quarter of the time or less. The host needs the same time for
    both steps, because it launches the same kernels.
    """

    def kind(row: Row) -> tuple:
        return row.variant, row.dtype, row.params.get("mode"), row.params.get("channels_last")

    times = {r.params["batch"]: not_none(r.value) for r in steps if r.metric == "step_time_s" and kind(r) == kind(rate)}
    batch = rate.params["batch"]
    return batch in times and any(times[b] > times[batch] / 2 for b in times if b <= batch / 4)


def flat_tables(runs: Sequence[Sequence[Row]]) -> dict[str, pd.DataFrame]:
    """Return a dict that maps file paths to flat tables, with one table for each model of `batch_scaling`."""
    models = dict.fromkeys(row.variant for rows in runs for row in rows if row.experiment == "batch_scaling")
    return {f"scaling/{model}_batch_scaling.csv": concatenated(_batch_table(rows, model) for rows in runs) for model in models}


def _batch_table(rows: Iterable[Row], model: str) -> pd.DataFrame:
    lines: dict[int, dict] = {}
    for row in rows:
        if (row.experiment, row.variant) != ("batch_scaling", model) or "batch" not in row.params:
            continue
        if row.metric not in _BATCH_COLUMNS:
            continue
        line = lines.setdefault(row.params["batch"], {"model": model, "batch": row.params["batch"]})
        column, factor = _BATCH_COLUMNS[row.metric]
        if row.value is not None:
            line[column] = factor * row.value
        elif row.value_reason.startswith(OUT_OF_MEMORY):
            line |= dict.fromkeys((name for name, _ in _BATCH_COLUMNS.values()), _REFUSED)
    columns = ["model", "batch", *dict.fromkeys(name for name, _ in _BATCH_COLUMNS.values())]
    return pd.DataFrame([lines[batch] for batch in sorted(lines)], columns=columns)


TITLES = {
    "operator_cost": "Costs of the host",
    "model_steps": "Training steps",
    "batch_scaling": "Batch size",
    "monitor_overhead": "Watching a training step",
}

PLOTS = (
    Plot("operator_cost", "operator_cost", "Host time of an operator and of a layer.", operator_cost),
    Plot(
        "model_steps",
        "model_steps",
        "Time of the phases of a training step in each variant, and FLOPs per second as shares of peak and MAF.",
        model_steps,
    ),
    Plot(
        "batch_scaling",
        "batch_scaling",
        "Samples per second and memory by batch size. The line predicts the largest batch that fits.",
        batch_scaling,
    ),
    Plot(
        "monitor_overhead",
        "monitor_overhead",
        "Difference of the step times with and without `hyperion monitor`, by pair of blocks.",
        monitor_overhead,
    ),
)

# Folder for tables and figures in a run's benchmarks/. The subject `baselines` uses the same folder.
RESULTS_FOLDER = "baseline"
