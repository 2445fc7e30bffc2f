"""Figures on runtimes."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from hyperion.figures.bars import value_bars
from hyperion.figures.material import Material, Plot, items, measured
from hyperion.figures.style import absences, add_notes, look, new_figure
from hyperion.results import Row

TITLES = {"runtimes": "Runtimes of trained models"}
_PERCENTILES = ("latency_p50_s", "latency_p95_s", "latency_p99_s")
_COMPILED, _EAGER = "torch.compile", "eager"


def runtime_latency(material: Material) -> Figure | None:
    """Draw the latency percentiles for one example, in one panel per model."""
    rows = [row for row in material.of("runtimes") if row.metric in _PERCENTILES]
    return _panels(material, rows, "Latency of one example", "ms, one example", 1e3)


def runtime_throughput(material: Material) -> Figure | None:
    """Draw the throughput of the best batch size of each runtime, in one panel per model."""
    # The rates of eager mode beside each runtime are not drawn.
    rows = [row for row in material.of("runtimes") if row.metric == "samples_per_s" and "beside" not in row.params]
    # Omit batches that the search tried and rejected because they do not fit or take too long. The row of a runtime that cannot
    # be used has no role. Keep it, because it contains the reason.
    best = [row for row in rows if row.params.get("role") in (None, "best batch")]
    searched = {
        runtime: {row.params["batch"] for row in rows if row.variant == runtime and row.params.get("role") == "search"}
        for runtime in (_COMPILED, _EAGER)
    }
    notes = []
    if searched[_COMPILED] and searched[_COMPILED] < searched[_EAGER]:
        tried = ", ".join(map(str, sorted(searched[_COMPILED])))
        notes.append(f"{_COMPILED}: only the batches {tried} were tried, because each needs a compilation.")
    return _panels(material, best, "Throughput of the best batch", "examples/s", 1.0, notes)


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
        value_bars(axes, rows_of_model, [_name(row) for row in rows_of_model], factor, colours)
        axes.set(xlabel=label, xlim=(0, axes.get_xlim()[1] * 1.3))
        if axes.get_xlim()[1] >= 5000:  # long tick labels would touch each other
            axes.xaxis.set_major_formatter(lambda value, _: items(value))
        axes.set_title(model)
    # Only throughput rows have a limit, so do not add notes about the missing limit of other rows.
    noted = [row for row in rows if row.value is None or row.limit_source]
    add_notes(figure, [*notes, *absences(noted, lambda row: _absent_name(row, known), lambda row: row.variant)])
    return figure


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


PLOTS = (
    Plot("runtime_latency", "runtimes", "Median, 95th and 99th percentile of the latency by runtime.", runtime_latency),
    Plot("runtime_throughput", "runtimes", "Rate of the best batch by runtime.", runtime_throughput),
    Plot("kernel_counts", "runtimes", "Kernels that one call launches, by runtime.", kernel_counts),
)
