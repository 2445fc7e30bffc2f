"""Figures of memory: what a step's phases hold, what policies of activation checkpointing trade, what was foretold."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hyperion.figures.formats import memory_unit
from hyperion.figures.material import Material, measured
from hyperion.figures.plot import Plot
from hyperion.figures.style import COLOURS, GRID, INK, MARKERS, MUTED, add_notes, log_ticks, look, new_figure
from hyperion.results import Row

# From the bottom: what is always there, then what comes and goes.
_PARTS = {"parameters": 0, "optimizer state": 5, "buffers": 6, "batch": 3, "activations": 1, "gradients": 2}
_STEP_COLOURS = {kind: COLOURS[place] for kind, place in _PARTS.items()} | {
    "recomputed": COLOURS[4],
    "temporary": "#c9ced6",
    "workspace": "#8d96a3",
}
NONE, EVERY_BLOCK = "none", "every block"
POLICIES = (EVERY_BLOCK, "selective", "budget")
# What checkpointing a 12-layer language model must bring and may cost: 40 % of the memory for 30 % more time.
_MEMORY_BAR, _TIME_BAR, WITHIN = 0.6, 1.3, 0.1


def memory_phases(material: Material) -> Figure | None:
    """A panel for each model and format: what tensors hold after each phase of a step, and the fullest moment in it."""
    rows = measured(material.of("memory_phases"))
    cells = list(dict.fromkeys((row.variant, row.dtype) for row in rows))
    if not cells:
        return None
    dtypes = list(dict.fromkeys(dtype for _, dtype in cells))
    models = list(dict.fromkeys(variant for variant, _ in cells))
    figure, panels = new_figure(
        "Memory by phase of a step",
        material.machine("memory_phases"),
        len(dtypes),
        lines=len(models),
        height=1.4 + 2.5 * len(models),
    )
    for place, model in enumerate(models):
        line = panels[place * len(dtypes) : (place + 1) * len(dtypes)]
        of_model = [row for row in rows if row.variant == model]
        for axes, dtype in zip(line, dtypes, strict=True):
            _draw_phases(axes, [row for row in of_model if row.dtype == dtype], memory_unit([row.value for row in of_model]))
            axes.set_title(f"{model}, {dtype}")
        highest = max(axes.get_ylim()[1] for axes in line)
        for axes in line:
            axes.set_ylim(0, highest)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=8.5)  # as the bars are stacked
    add_notes(figure, [_reconciled(rows)])
    return figure


def checkpointing(material: Material) -> Figure | None:
    """Memory against time of each policy, relative to no checkpointing, and activations by depth."""
    rows = measured(material.of("activation_checkpointing"))
    if not any(row.metric == "tensor_memory_gib" for row in rows):
        return None
    figure, (left, right) = new_figure("Activation checkpointing", material.machine("activation_checkpointing"), 2, height=4.4)
    _draw_trade(left, rows)
    _draw_depth(right, [row for row in rows if "layers" in row.params])
    notes = [
        "Left: bytes of tensors at the fullest moment of forward and backward, weights and optimizer state included, against "
        "the time of a step, measured in turn with the plain one; hollow marks are the memory that was foretold. Right: what "
        "the forward pass keeps; hollow marks are what was foretold."
    ]
    add_notes(figure, notes)
    return figure


def _draw_phases(axes: Axes, rows: list[Row], unit: tuple[float, str]) -> None:
    per_gib, name = unit
    held = {(row.params["phase"], row.params.get("part")): row.value for row in rows if row.metric == "allocated_memory_gib"}
    phases = list(dict.fromkeys(phase for phase, _ in held))
    bottoms = [0.0] * len(phases)
    for part, colour in _PARTS.items():
        sizes = [per_gib * held.get((phase, part), 0.0) for phase in phases]
        axes.bar(range(len(phases)), sizes, bottom=bottoms, width=0.62, color=COLOURS[colour], label=part)
        bottoms = [below + size for below, size in zip(bottoms, sizes, strict=True)]
    for metric, style, label in (
        ("tensor_memory_gib", {"color": INK, "linewidth": 1.8}, "fullest moment of the phase"),
        ("peak_memory_gib", {"color": MUTED, "linewidth": 1.4, "linestyle": (0, (2, 1.5))}, "the same by the allocator"),
    ):
        peaks = {row.params["phase"]: row.value for row in rows if row.metric == metric}
        for place, phase in enumerate(phases):
            if phase in peaks:
                y = per_gib * peaks[phase]
                axes.plot([place - 0.36, place + 0.36], [y, y], label=label, **style)
                label = None
    axes.set_xticks(range(len(phases)), [phase.replace(" ", "\n", 1) for phase in phases])
    axes.grid(axis="x", visible=False)
    axes.set(ylabel=name, ylim=(0, axes.get_ylim()[1] * 1.02))


def _reconciled(rows: list[Row]) -> str:
    checked = [row for row in rows if row.check]
    worst = max(row.check_error for row in checked)
    return (
        f"The parts, each counted by itself, add up to all tensors that are alive to within {100 * worst:.2g} %. "
        "Activations are what autograd kept for the backward pass."
    )


def _draw_trade(axes: Axes, rows: list[Row]) -> None:
    """A mark a policy and model: the further down, the more memory is saved; the further right, the more time it costs."""
    axes.add_patch(Rectangle((0, 0), _TIME_BAR, _MEMORY_BAR, color=GRID, zorder=0.5))
    models = list(dict.fromkeys(row.variant for row in rows if row.metric == "tensor_memory_gib"))
    for model, marker in zip(models, MARKERS, strict=False):
        of_model = [row for row in rows if row.variant == model]
        memory = {row.params["checkpointing"]: row for row in of_model if row.metric == "tensor_memory_gib"}
        times = {row.params["checkpointing"]: row for row in of_model if row.metric == "speedup"}
        for place, how in enumerate(POLICIES):
            if not {NONE, how} <= memory.keys() or how not in times:
                continue
            longer, share = 1 / times[how].value, memory[how].value / memory[NONE].value
            ends = [[longer - 1 / times[how].ci_high], [1 / times[how].ci_low - longer]]
            colour = COLOURS[place]
            axes.errorbar(longer, share, xerr=ends, fmt=marker, color=colour, ecolor=colour, markersize=8)
            if memory[how].predicted is not None and memory[NONE].predicted:
                foretold = memory[how].predicted / memory[NONE].predicted
                axes.plot(longer, foretold, marker, color=colour, markerfacecolor="none", markersize=13, linestyle="none")
            where = {"xytext": (0, -15), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{100 * (share - 1):+.0f} %", (longer, share), **where)
            axes.plot([], [], "s", color=colour, label=how if marker == MARKERS[0] else None)
        axes.plot([], [], marker, color=MUTED, label=model)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles, names, loc="lower right", fontsize=8.5)
    axes.axhline(1, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    right = max(1.4, *(1 / row.ci_low for row in rows if row.metric == "speedup"))
    axes.set(xlabel="time of a step", ylabel="memory", xlim=(0.9, right + 0.1), ylim=(0, 1.08))
    dtypes = ", ".join(dict.fromkeys(_dtype_of(rows, model) for model in models))
    axes.set_title(f"Of what it is without ({dtypes}); grey: -40 % for +30 %")


def _dtype_of(rows: list[Row], model: str) -> str:
    return next(row.dtype for row in rows if row.variant == model and row.metric == "tensor_memory_gib")


def _draw_depth(axes: Axes, rows: list[Row]) -> None:
    per_gib, unit = memory_unit([row.value for row in rows])
    for position, (how, label) in enumerate(((NONE, "everything kept"), (EVERY_BLOCK, "inputs of blocks kept"))):
        points = sorted((r for r in rows if r.params["checkpointing"] == how), key=lambda r: r.params["layers"])
        depths, style = [r.params["layers"] for r in points], look(how, position)
        axes.plot(depths, [per_gib * r.value for r in points], label=label, **style)
        foretold = [(d, per_gib * r.predicted) for d, r in zip(depths, points, strict=True) if r.predicted is not None]
        if foretold:
            hollow = style | {"markerfacecolor": "none", "markersize": 10, "linestyle": "none"}
            axes.plot(*zip(*foretold, strict=True), **hollow)
    axes.set_xticks(sorted({row.params["layers"] for row in rows}))
    axes.set(xlabel="layers", ylabel=f"{unit} of activations", ylim=(0, None), title="Activations by depth")
    axes.legend(loc="upper left")


def memory_estimate(material: Material) -> Figure | None:
    """The peak of each model as foretold and as measured, and how far the two lie apart."""
    rows = [row for row in material.of("memory_estimate") if row.metric == "peak_memory_gib" and row.predicted is not None]
    rows = measured(rows)
    if not rows:
        return None
    names = [_cell_name(row) for row in rows]
    figure, (left, right) = new_figure(
        "Peak memory, foretold and measured", material.machine("memory_estimate"), 2, height=1.7 + 0.34 * len(rows)
    )
    places = range(len(rows))
    left.barh(places, [row.value for row in rows], height=0.5, color=COLOURS[5], label="measured by the allocator")
    left.plot([row.predicted for row in rows], places, "D", color=INK, markerfacecolor="none", label="foretold")
    left.set_xscale("log")
    log_ticks(left.xaxis)
    left.set(xlabel="GiB", yticks=places)
    left.set_yticklabels(names, fontsize=8.5)
    left.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
    errors = [100 * (row.predicted / row.value - 1) for row in rows]
    right.axvspan(-100 * WITHIN, 100 * WITHIN, color=GRID, zorder=0.5)
    right.barh(places, errors, height=0.5, color=[COLOURS[0 if abs(e) <= 100 * WITHIN else 1] for e in errors])
    right.axvline(0, color=MUTED, linewidth=1)
    reach = 1.3 * max(100 * WITHIN, *map(abs, errors))
    right.set(xlabel="foretold over measured [%]; grey: within 10 %", xlim=(-reach, reach), yticks=places)
    right.set_yticklabels([])
    for place, error in zip(places, errors, strict=True):
        right.annotate(
            f"{error:+.2f}", (max(error, 0), place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    for axes in (left, right):
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure


def _cell_name(row: Row) -> str:
    how, memory = row.params["checkpointing"], row.params.get("memory_gib")
    extra = ("" if how == NONE else f", {how}") + ("" if memory is None else f", in {memory:g} GiB")
    return f"{row.variant}, {row.dtype}, {row.params['batch']:,}{extra}"


def memory_trace(material: Material) -> Figure | None:
    """Memory over one step by what it is, under each policy, and the kernels that took most of the step's time."""
    rows, samples = material.of("memory_trace"), material.samples("memory_trace")
    if not rows or samples.empty:
        return None
    policies = list(dict.fromkeys(samples["checkpointing"]))
    figure, panels = new_figure(
        "Memory over one step", material.machine("memory_trace"), len(policies), lines=2, height=6.8, width=10.4
    )
    unit = memory_unit([row.value for row in rows if row.metric == "tensor_memory_gib"])
    for axes, how in zip(panels, policies, strict=False):
        _draw_history(axes, samples[samples["checkpointing"] == how], unit)
        axes.set_title("no checkpointing" if how == NONE else how)
    highest = max(axes.get_ylim()[1] for axes in panels[: len(policies)])
    for axes in panels[: len(policies)]:
        axes.set_ylim(0, highest)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=8.5)
    grid = panels[0].get_gridspec()
    for axes in panels[len(policies) :]:
        axes.remove()
    _draw_kernels(figure.add_subplot(grid[1, :]), [row for row in rows if row.metric == "share"])
    model = f"{rows[0].variant} in {rows[0].dtype}"
    add_notes(figure, [f"{model}. Above: bytes of tensors after every birth and death of one, in the order of the step."])
    return figure


def _draw_history(axes: Axes, samples: pd.DataFrame, unit: tuple[float, str]) -> None:
    wide = samples.pivot(index="event", columns="kind", values="gib").fillna(0.0) * unit[0]
    kinds = [kind for kind in _STEP_COLOURS if kind in wide]
    axes.stackplot(
        wide.index, *(wide[kind] for kind in kinds), labels=kinds, colors=[_STEP_COLOURS[kind] for kind in kinds], linewidth=0
    )
    for place, (phase, first) in enumerate(samples.groupby("phase", sort=False)["event"].min().items()):
        axes.axvline(first, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        where = {"xycoords": ("data", "axes fraction"), "xytext": (3, -9 - 10 * place), "textcoords": "offset points"}
        axes.annotate(phase, (first, 1), fontsize=8, **where)
    axes.set(xlabel="births and deaths of tensors", ylabel=unit[1], xlim=(wide.index.min(), wide.index.max()))


def _draw_kernels(axes: Axes, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: row.value)
    axes.barh(range(len(rows)), [100 * row.value for row in rows], height=0.6, color=COLOURS[0])
    for place, row in enumerate(rows):
        where = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(_shortened(row.params["what"]), (100 * row.value, place), **where)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    longest = max(row.value for row in rows)
    axes.set(xlabel="share of the time of all kernels [%]", title="The kernels that took most", xlim=(0, 160 * longest))


def _shortened(name: str, longest: int = 80) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


TITLES = {
    "memory_phases": "Memory by phase",
    "activation_checkpointing": "Activation checkpointing",
    "memory_estimate": "Memory foretold",
    "memory_trace": "A step from inside",
}

PLOTS = (
    Plot("memory_phases", "memory_phases", "What tensors hold after each phase of a step.", memory_phases),
    Plot("activation_checkpointing", "activation_checkpointing", "Memory against time.", checkpointing),
    Plot("memory_estimate", "memory_estimate", "Peaks of memory, foretold and measured.", memory_estimate),
    Plot("memory_trace", "memory_trace", "Memory over a step, and its kernels.", memory_trace),
)
