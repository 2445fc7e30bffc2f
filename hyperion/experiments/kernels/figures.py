"""Figures for the chapter on kernels: bandwidth of row kernels, rates of products and attention, and memory of attention."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, measured, number
from hyperion.figures.style import absences, add_notes, errors_of, log_ticks, look, new_figure, write_at
from hyperion.results import Row

TITLES = {
    "compiled_kernels": "Compiled kernels",
    "interpreted_kernels": "Kernels in Triton's interpreter",
    "row_kernels": "Kernels that read each element once",
    "matmul_kernel": "A matrix product in Triton",
    "attention_speed": "Speed of attention",
    "attention_memory": "Memory of attention",
    "attention_backends": "Backends of scaled_dot_product_attention",
}
_ORDER = ("triton", "torch", "torch.mm", "cudnn", "flash", "efficient", "math")


def row_kernels(material: Material) -> Figure | None:
    """Draw the bandwidth of each implementation for each operation."""
    rows = [row for row in material.of("row_kernels") if row.metric == "bandwidth_gb_s"]
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Kernels that read each element once", material.machine("row_kernels"), 1, height=4.2)
    _bars(axes, rows, lambda row: row.params["operation"].replace("_", " "), "GB/s, cold caches")
    add_notes(figure, absences(rows, lambda row: row.variant))
    return figure


def matmul_kernel(material: Material) -> Figure | None:
    """Draw the rate of each implementation for each shape."""
    rows = [row for row in material.of("matmul_kernel") if row.metric == "gemm_tflops"]
    if not measured(rows):
        return None
    figure, (axes,) = new_figure(
        "Matrix product: Triton and the vendor's library", material.machine("matmul_kernel"), 1, height=4.0
    )
    _bars(axes, rows, lambda row: "{m} x {n} x {k}".format(**row.params), "TFLOPS")
    add_notes(figure, absences(rows, lambda row: row.variant))
    return figure


def attention_speed(material: Material) -> Figure | None:
    """Draw the rate of each implementation for each shape, in one panel per pass."""
    rows = [row for row in material.of("attention_speed") if row.metric == "attention_tflops"]
    if not measured(rows):
        return None
    shapes = len({_shape(row) for row in rows})
    figure, panels = new_figure("Attention", material.machine("attention_speed"), 2, height=2.0 + 0.9 * shapes)
    for axes, which in zip(panels, ("forward", "backward"), strict=True):
        _bars(axes, [row for row in rows if row.params["pass"] == which], _shape, "TFLOPS")
        axes.set_title(which)
    panels[1].set_yticklabels([])
    add_notes(figure, absences([row for row in rows if row.params["pass"] == "forward"], lambda row: row.variant))
    return figure


def attention_memory(material: Material) -> Figure | None:
    """Draw the peak memory of each implementation against the sequence length."""
    rows = [row for row in material.of("attention_memory") if row.metric == "peak_memory_gib" and row.value is not None]
    if not rows:
        return None
    figure, (axes,) = new_figure("Memory of attention", material.machine("attention_memory"), 1, height=4.2)
    for position, name in enumerate(dict.fromkeys(row.variant for row in rows)):
        series = [row for row in rows if row.variant == name]
        lengths = [row.params["length"] for row in series]
        axes.plot(lengths, [1024 * not_none(row.value) for row in series], label=name, **look(name, position))
    axes.set(xscale="log", yscale="log", xlabel="positions", ylabel="MiB, forward and backward, above the inputs")
    ticks = sorted({row.params["length"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    log_ticks(axes.yaxis)
    axes.legend()
    return figure


def _shape(row: Row) -> str:
    params = row.params
    heads = f"{params['heads']}" + (f"/{params['key_heads']}" if params["key_heads"] != params["heads"] else "")
    name = f"{params['length']} positions, {heads} heads of {params['features']}"
    return name if params["causal"] else f"{name}, no mask"


def _bars(axes: Axes, rows: list[Row], group: Callable[[Row], str], label: str) -> None:
    """Draw one bar for each row, grouped by the titles that `group` returns. Rows without a value have no bar."""
    groups = list(dict.fromkeys(group(row) for row in rows))
    names = [name for name in _ORDER if any(row.variant == name for row in measured(rows))]
    height = 0.8 / max(len(names), 1)
    for position, name in enumerate(names):
        series = [row for row in measured(rows) if row.variant == name]
        ys = [groups.index(group(row)) + (position - (len(names) - 1) / 2) * height for row in series]
        values = [not_none(row.value) for row in series]
        colour = look(name, position)["color"]
        axes.barh(ys, values, xerr=errors_of(series), height=0.92 * height, color=colour, label=name)
        for y, value, row in zip(ys, values, series, strict=True):
            write_at(axes, number(value, 3), (row.ci_high or value, y), (4, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=label, xlim=(0, axes.get_xlim()[1] * 1.4))
    axes.legend(loc="upper right", fontsize=8.5)


PLOTS = (
    Plot("row_kernels", "row_kernels", "Bytes read and written per second by operation and implementation.", row_kernels),
    Plot("matmul_kernel", "matmul_kernel", "Rate of matrix products by shape and implementation.", matmul_kernel),
    Plot("attention_speed", "attention_speed", "Rate of attention by shape and implementation.", attention_speed),
    Plot("attention_memory", "attention_memory", "Peak memory of attention by length and implementation.", attention_memory),
)
