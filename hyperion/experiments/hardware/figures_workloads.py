"""Figures of scientific kernels, and of memory that host and device share."""

from collections.abc import Callable

from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, measured, number, percent, values
from hyperion.figures.style import COLOURS, absences, add_notes, errors_of, name_bars, new_figure, write_at
from hyperion.results import Row


def fp64_kernels(material: Material) -> Figure | None:
    """Draw the GB/s of each kernel as bars, with the share of its limit. A note states the TFLOPS of the transforms."""
    rates = [f"{_kernel(row)}: {number(row.value)}" for row in measured(material.of("fp64_kernels", metric="fft_tflops"))]
    notes = [f"TFLOPS of the transforms, with 5·N·log2(N) FLOPs each: {'; '.join(rates)}."] if rates else []
    return _bars(material, "fp64_kernels", "Kernels in double precision", _kernel, notes)


def mapped_memory(material: Material) -> Figure | None:
    """Draw bars with the GB/s at which a kernel reads and writes each kind of memory. Return None if there are no values."""
    notes = ["Each byte of the shared array counts once."]
    title = "Memory that host and device share"
    return _bars(material, "mapped_memory", title, lambda row: f"{row.variant}, {row.params['access']}", notes)


def _kernel(row: Row) -> str:
    return f"{row.variant}, length {row.params['length']:,}"


def _bars(material: Material, experiment: str, title: str, name: Callable[[Row], str], notes: list[str]) -> Figure | None:
    rows = material.of(experiment, metric="bandwidth_gb_s")
    bars = measured(rows)
    if not bars:
        return None
    figure, (axes,) = new_figure(title, material.machine(experiment), height=2.0 + 0.4 * len(bars))
    axes.barh(range(len(bars)), values(bars), 0.6, xerr=errors_of(bars), color=COLOURS[0])
    for place, row in enumerate(bars):
        share = "" if row.limit is None else f", {percent(row.fraction_of_limit)} % of its limit"
        write_at(axes, f"{number(row.value)} GB/s{share}", (not_none(row.ci_high), place), (4, 0), va="center", fontsize=8)
    name_bars(axes, [name(row) for row in bars], "GB/s, median with 95 % interval")
    add_notes(figure, notes + absences(rows, name))
    return figure
