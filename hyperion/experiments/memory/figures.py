"""Figures for the chapter on memory: memory by phase of a step, checkpointing policies, estimates, and a trace of one step."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, measured, memory_unit, signed_number
from hyperion.figures.style import COLOURS, GRID, INK, MARKERS, MUTED, add_notes, log_ticks, look, new_figure, write_at
from hyperion.results import Row

# Parts of a bar from bottom to top. Each part has the index of its colour in COLOURS. Tensors that exist during the whole step
# come first, then temporary tensors.
_PARTS = {"parameters": 0, "optimizer state": 5, "buffers": 6, "batch": 3, "activations": 1, "gradients": 2}
_STEP_COLOURS = {kind: COLOURS[place] for kind, place in _PARTS.items()} | {
    "recomputed": COLOURS[4],
    "temporary": "#c9ced6",
    "workspace": "#8d96a3",
}
# Names of policies in `hyperion.parallel.parallelize`. They are repeated here, because figures import no torch.
NONE, EVERY_BLOCK = "none", "every block"
POLICIES = (EVERY_BLOCK, "selective", "budget")
# Goal for checkpointing a 12-layer language model: at least 40 % less memory for at most 30 % more time.
_MEMORY_BAR, _TIME_BAR, WITHIN = 0.6, 1.3, 0.1


def memory_phases(material: Material) -> Figure | None:
    """Draw one panel per model and number format: tensor memory after each phase of a step, and the peak in each phase."""
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
        unit = memory_unit([not_none(row.value) for row in of_model])
        for axes, dtype in zip(line, dtypes, strict=True):
            _draw_phases(axes, [row for row in of_model if row.dtype == dtype], unit)
            axes.set_title(f"{model}, {dtype}")
        highest = max(axes.get_ylim()[1] for axes in line)
        for axes in line:
            axes.set_ylim(0, highest)
    handles, names = panels[0].get_legend_handles_labels()
    # Reversed, so that the legend has the order in which the bars are stacked.
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=8.5)
    add_notes(figure, [_sum_of_parts(rows)])
    return figure


def checkpointing(material: Material) -> Figure | None:
    """Draw two panels about activation checkpointing.

    The first panel shows the memory and the step time of each policy, relative to a step without checkpointing. The second panel
    shows activation memory by number of layers.
    """
    rows = measured(material.of("activation_checkpointing"))
    if not any(row.metric == "tensor_memory_gib" for row in rows):
        return None
    figure, (left, right) = new_figure("Activation checkpointing", material.machine("activation_checkpointing"), 2, height=4.4)
    _draw_trade(left, rows)
    _draw_depth(right, [row for row in rows if "layers" in row.params])
    notes = [
        "Left: peak of tensors in forward and backward, including weights and optimizer state, against step time. Grey: at "
        "least 40 % less memory for at most 30 % more time. Right: bytes that the forward pass keeps. Hollow marks: predictions."
    ]
    add_notes(figure, notes)
    return figure


def _draw_phases(axes: Axes, rows: list[Row], unit: tuple[float, str]) -> None:
    per_gib, name = unit
    gib = {
        (row.params["phase"], row.params.get("part")): not_none(row.value) for row in rows if row.metric == "allocated_memory_gib"
    }
    phases = list(dict.fromkeys(phase for phase, _ in gib))
    bottoms = [0.0] * len(phases)
    for part, colour in _PARTS.items():
        sizes = [per_gib * gib.get((phase, part), 0.0) for phase in phases]
        axes.bar(range(len(phases)), sizes, bottom=bottoms, width=0.62, color=COLOURS[colour], label=part)
        bottoms = [below + size for below, size in zip(bottoms, sizes, strict=True)]
    for metric, style, label in (
        ("tensor_memory_gib", {"color": INK, "linewidth": 1.8}, "peak within the phase"),
        ("peak_memory_gib", {"color": MUTED, "linewidth": 1.4, "linestyle": (0, (2, 1.5))}, "peak by the allocator"),
    ):
        peaks = {row.params["phase"]: not_none(row.value) for row in rows if row.metric == metric}
        for number, phase in enumerate(phase for phase in phases if phase in peaks):
            place, y = phases.index(phase), per_gib * peaks[phase]
            axes.plot([place - 0.36, place + 0.36], [y, y], label=None if number else label, **style)
    axes.set_xticks(range(len(phases)), [phase.replace(" ", "\n", 1) for phase in phases])
    axes.grid(axis="x", visible=False)
    axes.set(ylabel=name, ylim=(0, axes.get_ylim()[1] * 1.02))


def _sum_of_parts(rows: list[Row]) -> str:
    checked = [row for row in rows if row.check]
    worst = 100 * max(not_none(row.check_error) for row in checked)
    within = f"{worst:.2g}" if worst >= 0.001 else "0.001"
    return (
        f"Each part was counted separately. The sum of the parts equals all live tensors within {within} %. "
        "Activations are the tensors that autograd keeps for the backward pass."
    )


def _draw_trade(axes: Axes, rows: list[Row]) -> None:
    """Draw one marker for each policy and model: step time on the horizontal axis, memory on the vertical axis."""
    axes.add_patch(Rectangle((0, 0), _TIME_BAR, _MEMORY_BAR, color=GRID, zorder=0.5))
    models = list(dict.fromkeys(row.variant for row in rows if row.metric == "tensor_memory_gib"))
    marks: list[tuple[float, float]] = []
    for model, marker in zip(models, MARKERS, strict=False):
        of_model = [row for row in rows if row.variant == model]
        memory = {row.params["checkpointing"]: row for row in of_model if row.metric == "tensor_memory_gib"}
        times = {row.params["checkpointing"]: row for row in of_model if row.metric == "speedup"}
        for place, how in enumerate(POLICIES):
            if not {NONE, how} <= memory.keys() or how not in times:
                continue
            # Time is the reciprocal of the speed-up, so the lower end of one interval gives the upper end of the other.
            speedup, low, high = (not_none(v) for v in (times[how].value, times[how].ci_low, times[how].ci_high))
            longer, share = 1 / speedup, not_none(memory[how].value) / not_none(memory[NONE].value)
            ends = [[longer - 1 / high], [1 / low - longer]]
            colour = COLOURS[place]
            axes.errorbar(longer, share, xerr=ends, fmt=marker, color=colour, ecolor=colour, markersize=8)
            predicted, predicted_without = memory[how].predicted, memory[NONE].predicted
            if predicted is not None and predicted_without:
                hollow = {"color": colour, "markerfacecolor": "none", "markersize": 13, "linestyle": "none"}
                axes.plot([longer], [predicted / predicted_without], marker=marker, **hollow)
            marks.append((longer, share))
            axes.plot([], [], "s", color=colour, label=how if marker == MARKERS[0] else None)
        axes.plot([], [], marker, color=MUTED, label=model)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles, names, loc="lower right", fontsize=8.5)
    axes.axhline(1, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    right = max(1.4, *(1 / not_none(row.ci_low) for row in rows if row.metric == "speedup"))
    axes.set(xlabel="time of a step", ylabel="memory", xlim=(0.9, right + 0.1), ylim=(0, 1.08))
    for longer, share in marks:
        # The label is below its mark, or above it if another mark is there.
        below = any(0 < share - y < 0.15 and abs(x - longer) < 0.1 * (right - 0.8) for x, y in marks)
        offset, side = ((0, 8), "bottom") if below else ((0, -8), "top")
        write_at(axes, f"{signed_number(100 * (share - 1), 0)} %", (longer, share), offset, ha="center", va=side, fontsize=8)
    dtypes = ", ".join(dict.fromkeys(_dtype_of(rows, model) for model in models))
    axes.set_title(f"Relative to no checkpointing ({dtypes})")


def _dtype_of(rows: list[Row], model: str) -> str:
    return next(row.dtype for row in rows if row.variant == model and row.metric == "tensor_memory_gib")


def _draw_depth(axes: Axes, rows: list[Row]) -> None:
    per_gib, unit = memory_unit([not_none(row.value) for row in rows])
    for position, (how, label) in enumerate(((NONE, "no checkpointing"), (EVERY_BLOCK, "every block checkpointed"))):
        points = sorted((r for r in rows if r.params["checkpointing"] == how), key=lambda r: r.params["layers"])
        depths, style = [r.params["layers"] for r in points], look(how, position)
        axes.plot(depths, [per_gib * not_none(r.value) for r in points], label=label, **style)
        predicted = [(d, per_gib * r.predicted) for d, r in zip(depths, points, strict=True) if r.predicted is not None]
        hollow = style | {"markerfacecolor": "none", "markersize": 10, "linestyle": "none"}
        axes.plot([depth for depth, _ in predicted], [gib for _, gib in predicted], **hollow)
    axes.set_xticks(sorted({row.params["layers"] for row in rows}))
    axes.set(xlabel="layers", ylabel=f"{unit} of activations", ylim=(0, None), title="Activations by depth")
    axes.legend(loc="upper left")


def memory_estimate(material: Material) -> Figure | None:
    """Draw the predicted and the measured peak memory of each model, and the error of the prediction."""
    rows = [row for row in material.of("memory_estimate") if row.metric == "peak_memory_gib" and row.predicted is not None]
    rows = measured(rows)
    if not rows:
        return None
    peaks, predicted = [not_none(row.value) for row in rows], [not_none(row.predicted) for row in rows]
    names = [_cell_name(row) for row in rows]
    figure, (left, right) = new_figure(
        "Peak memory, predicted and measured", material.machine("memory_estimate"), 2, height=1.7 + 0.34 * len(rows)
    )
    places = range(len(rows))
    left.barh(places, peaks, height=0.5, color=COLOURS[5], label="measured by the allocator")
    left.plot(predicted, places, "D", color=INK, markerfacecolor="none", label="predicted")
    left.set_xscale("log")
    log_ticks(left.xaxis)
    left.set(xlabel="GiB", yticks=places)
    left.set_yticklabels(names, fontsize=8.5)
    left.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)
    errors = [100 * (estimate / peak - 1) for estimate, peak in zip(predicted, peaks, strict=True)]
    right.axvspan(-100 * WITHIN, 100 * WITHIN, color=GRID, zorder=0.5)
    right.barh(places, errors, height=0.5, color=[COLOURS[0 if abs(e) <= 100 * WITHIN else 1] for e in errors])
    right.axvline(0, color=MUTED, linewidth=1)
    reach = 1.3 * max(100 * WITHIN, *map(abs, errors))
    right.set(xlabel="error of the prediction [%]; grey: within 10 %", xlim=(-reach, reach), yticks=places)
    right.set_yticklabels([])
    for place, error in zip(places, errors, strict=True):
        write_at(right, signed_number(error, 2), (max(error, 0), place), (4, 0), va="center", fontsize=8)
    for axes in (left, right):
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure


def _cell_name(row: Row) -> str:
    how, memory = row.params["checkpointing"], row.params.get("memory_gib")
    extra = ("" if how == NONE else f", {how}") + ("" if memory is None else f", in {memory:g} GiB")
    return f"{row.variant}, {row.dtype}, {row.params['batch']:,}{extra}"


def memory_trace(material: Material) -> Figure | None:
    """Draw the tensor memory during one step under each policy, by kind of tensor, and the kernels that take the most time."""
    rows, samples = material.of("memory_trace"), material.samples("memory_trace")
    if not rows or samples.empty:
        return None
    policies = list(dict.fromkeys(samples["checkpointing"]))
    figure, panels = new_figure(
        "Memory over one step", material.machine("memory_trace"), len(policies), lines=2, height=6.8, width=10.4
    )
    unit = memory_unit([not_none(row.value) for row in measured(rows) if row.metric == "tensor_memory_gib"])
    for axes, how in zip(panels, policies, strict=False):
        _draw_history(axes, samples.query("checkpointing == @how"), unit)
        axes.set_title("no checkpointing" if how == NONE else how)
    highest = max(axes.get_ylim()[1] for axes in panels[: len(policies)])
    for axes in panels[: len(policies)]:
        axes.set_ylim(0, highest)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=8.5)
    grid = not_none(panels[0].get_subplotspec()).get_gridspec()
    for axes in panels[len(policies) :]:
        axes.remove()
    _draw_kernels(figure.add_subplot(grid[1, :]), [row for row in rows if row.metric == "share"])
    model = f"{rows[0].variant} in {rows[0].dtype}"
    add_notes(
        figure,
        [f"{model}. The upper panels show the bytes of tensors after every allocation and release, in the order of the step."],
    )
    return figure


def _draw_history(axes: Axes, samples: pd.DataFrame, unit: tuple[float, str]) -> None:
    wide = samples.pivot(index="event", columns="kind", values="gib").fillna(0.0) * unit[0]
    kinds = [kind for kind in _STEP_COLOURS if kind in wide]
    axes.stackplot(
        wide.index, *(wide[kind] for kind in kinds), labels=kinds, colors=[_STEP_COLOURS[kind] for kind in kinds], linewidth=0
    )
    for place, phase in enumerate(dict.fromkeys(samples["phase"])):
        first = samples.loc[samples["phase"] == phase, "event"].min()
        axes.axvline(first, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        write_at(axes, phase, (first, 1), (3, -9 - 10 * place), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set(xlabel="allocations and releases of tensors", ylabel=unit[1], xlim=(wide.index.min(), wide.index.max()))


def _draw_kernels(axes: Axes, rows: list[Row]) -> None:
    shares = sorted((not_none(row.value), row.params["what"]) for row in measured(rows))
    axes.barh(range(len(shares)), [100 * share for share, _ in shares], height=0.6, color=COLOURS[0])
    for place, (share, name) in enumerate(shares):
        shortened = name if len(name) <= 80 else f"{name[:79]}…"
        write_at(axes, shortened, (100 * share, place), (5, 0), va="center", fontsize=8)
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="share of the time of all kernels [%]", title="The longest kernels", xlim=(0, 160 * shares[-1][0]))


TITLES = {
    "memory_phases": "Memory by phase",
    "activation_checkpointing": "Activation checkpointing",
    "memory_estimate": "Memory predicted",
    "memory_trace": "Trace of a step",
}

PLOTS = (
    Plot("memory_phases", "memory_phases", "Bytes of tensors after each phase of a step.", memory_phases),
    Plot(
        "activation_checkpointing", "activation_checkpointing", "Peak memory against step time under each policy.", checkpointing
    ),
    Plot("memory_estimate", "memory_estimate", "Peaks of memory, predicted and measured.", memory_estimate),
    Plot("memory_trace", "memory_trace", "Memory over a step, and the longest kernels.", memory_trace),
)
