"""Figures for the chapter on serving: throughput and latencies by number of users, memory in the soak test, and cache size."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hyperion.errors import not_none
from hyperion.experiments.serving.metrics import GROWTH_CHECK, NOT_OBSERVED
from hyperion.figures.material import Material, Plot, measured, number
from hyperion.figures.style import (
    COLOURS,
    INK,
    MUTED,
    absences,
    add_notes,
    errors_of,
    legend_above_data,
    look,
    new_figure,
    whole_numbers,
)
from hyperion.results import Row
from hyperion.units import KIB, MIB

TITLES = {
    "server_answers": "Answers of a server",
    "kv_cache_memory": "Memory of the cache, and a step of decoding",
    "server_load": "A server under load",
    "server_soak": "What clients do to a server",
}


def kv_cache_memory(material: Material) -> Figure | None:
    """Draw the size of the cache against its number of tokens, with the prediction as a line."""
    rows = [row for row in measured(material.of("kv_cache_memory")) if row.metric == "kv_cache_bytes"]
    if not rows:
        return None
    figure, (axes,) = new_figure("Keys and values", material.machine("kv_cache_memory"), 1, height=3.8)
    for place, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        series = [row for row in rows if row.variant == name]
        marks = look(name, place) | {"fillstyle": "none", "markersize": 8 + 4 * place, "linestyle": "none"}
        axes.plot([row.params["tokens"] for row in series], [not_none(row.value) / MIB for row in series], label=name, **marks)
    predicted = sorted((row.params["tokens"], row.predicted) for row in rows if row.predicted is not None)
    if predicted:
        tokens, sizes = zip(*predicted, strict=True)
        axes.plot(tokens, [size / MIB for size in sizes], color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="predicted")
    axes.set(xlabel="tokens in the cache", ylabel="MiB", xlim=(0, None), ylim=(0, None))
    axes.legend()
    absent = [row for row in material.of("kv_cache_memory") if row.metric == "kv_cache_bytes"]
    add_notes(figure, absences([row for row in absent if row.value is None], lambda row: row.variant))
    return figure


def server_load(material: Material) -> Figure | None:
    """Draw throughput, time to first token and time per output token against the number of users.

    Hollow marks show the open loop.
    """
    rows = material.of("server_load")
    rates = [row for row in measured(rows) if row.metric == "output_tokens_per_s"]
    if not rates:
        return None
    figure, panels = new_figure("Server under load", material.machine("server_load"), 3, height=3.9)
    users = sorted({row.params["users"] for row in rates if "users" in row.params})
    _draw_throughput(panels[0], [row for row in rates if "users" in row.params])
    for axes, metric, title in ((panels[1], "ttft_s", "Time to first token"), (panels[2], "tpot_s", "Time per output token")):
        _draw_percentiles(axes, [row for row in measured(rows) if row.metric == metric], users, title)
    for axes in panels:
        axes.set_xlabel("users (closed loop)")
    notes = [
        "Bars: 95 % intervals between runs. Percentiles over the requests of a run; hollow marks: open loop, at the share of "
    ]
    shares = sorted({row.params["load"] for row in rates if "load" in row.params})
    notes[0] += f"{', '.join(f'{100 * share:g} %' for share in shares) or 'no'} of the throughput of the most users."
    failed = [row for row in rows if row.value is None and "percentile" not in row.params]
    unobserved = [row for row in rows if row.metric == "tpot_s" and row.value_reason.startswith(NOT_OBSERVED)][:1]
    notes += absences(unobserved, lambda row: f"{row.variant}, time per output token")
    add_notes(figure, [*notes, *absences(failed, lambda row: row.variant)])
    for axes in panels:
        if axes.get_legend_handles_labels()[1]:
            legend_above_data(axes, fontsize=8, ncols=1 if axes is panels[0] else 3, columnspacing=1.2, handlelength=1.6)
    return figure


def server_soak(material: Material) -> Figure | None:
    """Draw the memory of each server against the number of answered requests, with the bound on its growth if there is one."""
    growth = [row for row in measured(material.of("server_soak")) if row.metric == "growth_bytes"]
    samples = material.samples("server_soak")
    if not growth or samples.empty:
        return None
    figure, (axes,) = new_figure("Memory of the server in the soak", material.machine("server_soak"), 1, height=4.4)
    several = len({row.params["backend"] for row in growth}) > 1
    for place, row in enumerate(growth):
        of_backend = samples["backend"] == row.params["backend"]
        requests, memory, fitted = samples.loc[of_backend, ["requests", row.variant, "fitted"]].dropna().to_numpy(float).T
        name = f"{row.params['backend']}, {row.variant}" if several else row.variant
        slope = f"{name}: {number(not_none(row.value) / KIB, 3)} KiB a request"
        axes.plot(requests, (memory - memory[0]) / MIB, color=COLOURS[place], label=slope)
        if row.check != GROWTH_CHECK:
            continue
        # The line of the bound starts where the fit starts.
        first = int(fitted.argmax())
        x = requests[[first, -1]]
        allowed = memory[first] - memory[0] + not_none(row.check_tolerance) * (x - x[0])
        axes.plot(x, allowed / MIB, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    bounds = [not_none(row.check_tolerance) for row in growth if row.check == GROWTH_CHECK]
    if bounds:
        label = f"bound: {number(bounds[0] / KIB, 3)} KiB a request"
        axes.plot([], [], color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2, label=label)
    axes.set(xlabel="answered requests", ylabel="MiB above the first reading")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1))  # above the axes, because a steep line can cross any corner
    absent = [row for row in material.of("server_soak", metric="growth_bytes") if row.value is None]
    add_notes(figure, absences(absent, lambda row: row.variant))
    return figure


def _draw_throughput(axes: Axes, rows: list[Row]) -> None:
    for place, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        series = sorted((row for row in rows if row.variant == name), key=lambda row: row.params["users"])
        users = [row.params["users"] for row in series]
        axes.errorbar(users, [not_none(row.value) for row in series], errors_of(series), label=name, **look(name, place))
        predicted = [(row.params["users"], row.predicted) for row in series if row.predicted is not None]
        if predicted:
            x, y = zip(*predicted, strict=True)
            axes.plot(x, y, color=INK, linestyle=(0, (4, 2)), linewidth=1.2, label="predicted: batching is free")
    axes.set(title="Throughput", ylabel="output tokens/s", ylim=(0, None), xlim=(0, None))
    whole_numbers(axes.xaxis)


def _draw_percentiles(axes: Axes, rows: list[Row], users: list[int], title: str) -> None:
    """Draw one line for each percentile. The marks of the open loop are to the right of the largest number of users.

    The axis is logarithmic, because the profiles double or quadruple the number of users.
    """
    if not rows:
        axes.set(title=title, xticks=[], yticks=[])
        axes.text(0.5, 0.5, f"{NOT_OBSERVED}, see below", transform=axes.transAxes, ha="center", color=MUTED)
        return
    for place, percent in enumerate(sorted({row.params["percentile"] for row in rows})):
        chosen = [row for row in rows if row.params["percentile"] == percent]
        closed = sorted((row for row in chosen if "users" in row.params), key=lambda row: row.params["users"])
        style = look(f"p{percent}", place)
        x, y = [row.params["users"] for row in closed], [1e3 * not_none(row.value) for row in closed]
        axes.errorbar(x, y, errors_of(closed, 1e3), label=f"p{percent}", **style)
        opened = [row for row in chosen if "load" in row.params]
        x, y = [2 * max(users)] * len(opened), [1e3 * not_none(row.value) for row in opened]
        axes.errorbar(x, y, errors_of(opened, 1e3), linestyle="none", fillstyle="none", **style)
    axes.set(title=title, ylabel="ms", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.set_xticks([*users, 2 * max(users)], [*map(str, users), "open\nloop"])
    axes.xaxis.set_minor_locator(NullLocator())


PLOTS = (
    Plot("kv_cache_memory", "kv_cache_memory", "Bytes of keys and values by number of tokens.", kv_cache_memory),
    Plot("server_load", "server_load", "Throughput and latencies of a server by number of users.", server_load),
    Plot("server_soak", "server_soak", "Memory of a server by number of answered requests.", server_soak),
)
