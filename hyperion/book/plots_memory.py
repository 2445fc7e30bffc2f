"""Figures of memory: what a step's phases hold, and what activation checkpointing trades."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from hyperion.book.formats import number
from hyperion.book.material import Material, measured
from hyperion.book.plots_precision import memory_unit
from hyperion.book.style import COLOURS, INK, MUTED, add_notes, look, new_figure
from hyperion.results import Row

# From the bottom: what is always there, then what comes and goes.
_PARTS = {"parameters": 0, "optimizer state": 5, "buffers": 6, "batch": 3, "activations": 1, "gradients": 2}
NONE, EVERY_BLOCK = "none", "every block"


def memory_phases(material: Material) -> Figure | None:
    """A panel for each model and format: what tensors hold after each phase of a step, and the fullest moment in it."""
    rows = measured(material.of("memory_phases"))
    cells = list(dict.fromkeys((row.variant, row.dtype) for row in rows))
    if not cells:
        return None
    dtypes = list(dict.fromkeys(dtype for _, dtype in cells))
    models = list(dict.fromkeys(variant for variant, _ in cells))
    figure, panels = new_figure(
        "Memory by phase of a step", material.machine("memory_phases"), len(dtypes), lines=len(models),
        height=1.4 + 2.5 * len(models),
    )  # fmt: skip
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
    """Memory and time with every block checkpointed beside those without, and activations by depth."""
    rows = measured(material.of("activation_checkpointing"))
    if not any(row.metric == "tensor_memory_gib" for row in rows):
        return None
    figure, (left, right) = new_figure("Activation checkpointing", material.machine("activation_checkpointing"), 2, height=4.4)
    _draw_trade(left, rows)
    _draw_depth(right, [row for row in rows if "layers" in row.params])
    notes = [
        "Left: bytes of tensors at the fullest moment of forward and backward, weights and optimizer state included, and the "
        "time of a step, measured in turn with the plain one. Right: what the forward pass keeps; hollow marks are what "
        "shapes foretold."
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
    """Two bars a model, relative to no checkpointing."""
    models = list(dict.fromkeys(row.variant for row in rows if row.metric == "tensor_memory_gib"))
    for place, model in enumerate(models):
        of_model = [row for row in rows if row.variant == model]
        memory = {row.params["checkpointing"]: row.value for row in of_model if row.metric == "tensor_memory_gib"}
        speedup = next((row for row in of_model if row.metric == "speedup"), None)
        per_gib, unit = memory_unit(list(memory.values()))
        if {NONE, EVERY_BLOCK} <= memory.keys():
            share = memory[EVERY_BLOCK] / memory[NONE]
            axes.barh(place - 0.19, share, height=0.34, color=COLOURS[0], label="memory" if not place else None)
            before, after = (number(per_gib * memory[how], 3) for how in (NONE, EVERY_BLOCK))
            _name_bar(axes, place - 0.19, share, f"{100 * share:.0f} %: {before} to {after} {unit}")
        if speedup is not None:
            longer = 1 / speedup.value
            ends = [[longer - 1 / speedup.ci_high], [1 / speedup.ci_low - longer]]
            axes.barh(
                place + 0.19, longer, xerr=ends, height=0.34, color=COLOURS[1], ecolor=INK, capsize=2.5,
                label="time" if not place else None,
            )  # fmt: skip
            times = {r.params["checkpointing"]: 1e3 * r.value for r in of_model if r.metric == "step_time_s"}
            before, after = (number(times[how], 3) for how in (NONE, EVERY_BLOCK))
            _name_bar(axes, place + 0.19, 1 / speedup.ci_low, f"{100 * longer:.0f} %: {before} to {after} ms")
    axes.axvline(1, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set_yticks(range(len(models)), [f"{model}\n{_dtype_of(rows, model)}" for model in models])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MultipleLocator(0.5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set(xlabel="of what it is without", xlim=(0, axes.get_xlim()[1] * 1.55), title="With every block checkpointed")
    axes.legend(loc="lower left", bbox_to_anchor=(0.62, 1.0), ncols=2, borderaxespad=0.2)


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


def _name_bar(axes: Axes, y: float, x: float, label: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # a line must not run through the words
    axes.annotate(label, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=box)
