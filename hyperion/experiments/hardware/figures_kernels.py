"""The roofline with the products of a model on it: which of them the memory holds back, and which fall short of either roof."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import number, percent
from hyperion.figures.style import COLOURS, INK, MARKERS, add_notes, log_ticks, look, new_figure, spread_labels

if TYPE_CHECKING:
    from hyperion.measure.products.taf import Taf

_KINDS = {"matmul": 0, "convolution": 2, "attention": 3}
_WHOLE, _SMALLEST = 1500.0, 14.0  # areas, in square points: of a mark with all FLOPs (added), and with none
_NAMED = 3
ABOVE_THE_SLOPE = "A mark above the slope owes its rate to a cache."


@dataclass(frozen=True)
class Kernel:
    """A point of the roofline.

    Args:
        name: what is multiplied.
        kind: matmul, convolution or attention.
        intensity: FLOP per byte of memory traffic.
        tflops: the measured rate.
        share: its part of the model's FLOPs, 0 to 1.
    """

    name: str
    kind: str
    dtype: str
    intensity: float
    tflops: float
    share: float


def kernels_of(taf: "Taf") -> list[Kernel]:
    """The points of products that `hyperion.measure.measure_taf` timed; those of the same sizes are one, as they were timed."""
    found: dict[tuple, Kernel] = {}
    for product, rate in taf.rates.items():
        batch = f"{product.batch} of " if product.batch > 1 else ""
        name = f"{product.kind} {batch}{product.m} x {product.n} x {product.k} {product.dtype}"
        same = found.get((name, rate.value))
        share = taf.shares[product] + (same.share if same else 0.0)
        intensity = same.intensity if same else product.intensity
        found[name, rate.value] = Kernel(name, product.kind, product.dtype, intensity, rate.value, share)
    return list(found.values())


def kernels_roofline(
    kernels: Sequence[Kernel], tflops: Mapping[str, float], bandwidth_gb_s: float, machine: str, model: str
) -> Figure | None:
    """Measured ceilings, and below them every product of a model at its arithmetic intensity; None without products.

    Args:
        tflops: the arithmetic ceiling of each dtype, as measured.
        bandwidth_gb_s: the memory's, as measured.
        machine, model: their names, for the title.
    """
    if not kernels:
        return None
    figure, (axes,) = new_figure(f"Products of {model}", machine, height=4.8)
    draw_kernels(axes, kernels, tflops, bandwidth_gb_s)
    axes.legend(loc="lower right")
    add_notes(
        figure,
        [
            "Lines: ceilings measured on this machine. A mark is a product, timed alone with a cold cache; its area is its share "
            f"of the model's FLOPs; those drawn have {percent(sum(k.share for k in kernels))} % of them. "
            f"{named_kernels(kernels)}.",
            ABOVE_THE_SLOPE,
        ],
    )
    return figure


def draw_kernels(axes: Axes, kernels: Sequence[Kernel], tflops: Mapping[str, float], bandwidth_gb_s: float) -> None:
    """Ceilings and marks of one panel, those with most FLOPs lettered; arguments as of `kernels_roofline`."""
    used = [dtype for dtype in tflops if any(kernel.dtype == dtype for kernel in kernels)]
    ends = _ends(kernels, [tflops[dtype] for dtype in used], bandwidth_gb_s)
    labels = _draw_ceilings(axes, {dtype: tflops[dtype] for dtype in used}, bandwidth_gb_s, ends)
    for kind in dict.fromkeys(kernel.kind for kernel in kernels):
        _draw_kind(axes, kind, [kernel for kernel in kernels if kernel.kind == kind], several=len(used) > 1)
    for letter, kernel in zip("abc", _largest(kernels), strict=False):
        axes.annotate(
            letter,
            (kernel.intensity, kernel.tflops),
            xytext=(4 + (_area(kernel) / pi) ** 0.5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold",
            zorder=4,
        )
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylabel="TFLOPS", xlabel="arithmetic intensity, FLOP per byte of memory traffic"
    )
    axes.set_ylim(min(kernel.tflops for kernel in kernels) / 2.5, axes.get_ylim()[1] * 1.3)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    spread_labels(axes, labels)


def named_kernels(kernels: Sequence[Kernel]) -> str:
    """What the letters of a panel stand for."""
    return "; ".join(f"{letter}: {k.name}, {percent(k.share)} %" for letter, k in zip("abc", _largest(kernels), strict=False))


def _largest(kernels: Sequence[Kernel]) -> list[Kernel]:
    return sorted(kernels, key=lambda kernel: -kernel.share)[:_NAMED]


def _ends(kernels: Sequence[Kernel], ceilings: list[float], bandwidth_gb_s: float) -> tuple[float, float]:
    """The panel from left of the first mark to right of the last mark and of the last ridge."""
    ridges = [ceiling * 1e3 / bandwidth_gb_s for ceiling in ceilings]
    places = [kernel.intensity for kernel in kernels]
    return min(places + ridges) / 4, max(places + ridges) * 4


def _draw_ceilings(axes: Axes, tflops: dict[str, float], bandwidth_gb_s: float, ends: tuple[float, float]) -> list[tuple]:
    """Draw the roofs; return their labels as (y, text, colour) for the right edge."""
    labels = []
    for dtype, ceiling in tflops.items():
        colour = look(dtype)["color"]
        axes.plot([ceiling * 1e3 / bandwidth_gb_s, ends[1]], [ceiling] * 2, color=colour, linewidth=1.6)
        labels.append((ceiling, f"{dtype} {number(ceiling)}", colour))
    ridge = max([ceiling * 1e3 / bandwidth_gb_s for ceiling in tflops.values()], default=ends[1])
    axes.plot([ends[0], ridge], [ends[0] * bandwidth_gb_s / 1e3, ridge * bandwidth_gb_s / 1e3], color=INK, linewidth=1.6)
    axes.annotate(
        f"{number(bandwidth_gb_s)} GB/s",
        (ends[0] * 1.5, ends[0] * 1.5 * bandwidth_gb_s / 1e3),
        xytext=(8, -2),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
    )
    return labels


def _draw_kind(axes: Axes, kind: str, points: list[Kernel], several: bool) -> None:
    """The marks of one kind: its shape; of several dtypes each in the colour of its roof, of one in the kind's own."""
    index = _KINDS.get(kind, len(_KINDS) + 1)
    colours = [look(point.dtype)["color"] if several else COLOURS[index] for point in points]
    axes.scatter(
        [point.intensity for point in points],
        [point.tflops for point in points],
        [_area(point) for point in points],
        colours,
        marker=MARKERS[index],
        edgecolors="white",
        linewidths=0.6,
        zorder=3,
    )
    axes.plot([], [], linestyle="none", marker=MARKERS[index], color=INK if several else COLOURS[index], label=kind)


def _area(kernel: Kernel) -> float:
    return _SMALLEST + _WHOLE * kernel.share
