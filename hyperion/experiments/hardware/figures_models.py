"""Figures of the models' matrix products: peak, MAF and TAF, and each product under the measured roofline.

MAF (maximum achievable FLOPS) is the rate of the fastest matrix product of any shape. TAF is the combined rate of all matrix
products in one training step of a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from hyperion.errors import not_none
from hyperion.figures.material import Material, measured, number, percent, values
from hyperion.figures.style import (
    COLOURS,
    INK,
    MARKERS,
    MUTED,
    add_notes,
    errors_of,
    log_ticks,
    look,
    new_figure,
    spread_labels,
    write_at,
)
from hyperion.results import Row

_MODELS = (0, 2, 4, 3, 5, 1)  # index into COLOURS for each model, in the order of the rows
_KINDS = {"matmul": 0, "convolution": 2, "attention": 3}
# The area of a marker in square points is _SMALLEST + _WHOLE * (the product's share of the model's FLOPs).
_WHOLE, _SMALLEST = 1500.0, 14.0
_NAMED = 3
_LETTER_GAP_POINTS = 10  # distance between two letters that would overlap


def model_products(material: Material) -> Figure | None:
    """Draw bars for each format: the data-sheet peak, the fastest matrix product, and each model's TAF."""
    tafs, shares = material.of("model_products", metric="taf_tflops"), material.of("model_products", metric="share")
    dtypes = list(dict.fromkeys(row.dtype for row in measured(tafs)))
    if not dtypes:
        return None
    bars = max(len([row for row in measured(tafs) if row.dtype == dtype]) for dtype in dtypes) + 2
    lines = (len(dtypes) + 1) // 2
    figure, panels = new_figure(
        "Peak, MAF and TAF",
        material.machine("model_products"),
        min(2, len(dtypes)),
        lines=lines,
        height=1.3 + lines * (0.5 + 0.36 * bars),
    )
    models = list(dict.fromkeys(row.variant for row in tafs))
    for axes, dtype in zip(panels, dtypes, strict=False):
        _draw_bars(axes, dtype, [row for row in measured(tafs) if row.dtype == dtype], shares, models)
    for axes in panels[len(dtypes) :]:
        axes.set_visible(False)
    add_notes(figure, _notes(tafs, shares))
    return figure


def products_roofline(material: Material) -> Figure | None:
    """Draw one roofline panel per model.

    Each panel shows this run's measured ceilings and one marker per matrix product, at its arithmetic intensity and rate.
    """
    rows = measured(material.of("model_products", metric="gemm_tflops"))
    slope = _slope_gb_s(material)
    panels_of = {name: _kernels([row for row in rows if row.variant == name]) for name in dict.fromkeys(r.variant for r in rows)}
    if not rows or slope is None:
        return None
    lines = (len(panels_of) + 1) // 2
    figure, panels = new_figure(
        "Matrix products of our models under the roofline",
        material.machine("model_products"),
        min(2, len(panels_of)),
        lines=lines,
        height=1.2 + 3.0 * lines,
    )
    ceilings = _ceilings(material)
    notes = [
        "Lines: ceilings measured on this machine. Each mark is a matrix product, timed alone with a cold cache. Its area "
        "is its share of the model's FLOPs. For marks above the slope, a cache serves part of the traffic."
    ]
    for axes, (name, (precision, kernels)) in zip(panels, panels_of.items(), strict=False):
        draw_kernels(axes, kernels, {k.dtype: ceilings.get(k.dtype, k.tflops) for k in kernels}, slope)
        axes.set_title(f"{name}, {precision}: {percent(sum(kernel.share for kernel in kernels))} % of its FLOPs")
        notes.append(f"{name}: {named_kernels(kernels)}.")
    for axes in panels[len(panels_of) :]:
        axes.set_visible(False)
    _legend(figure, panels[: len(panels_of)])
    add_notes(figure, notes)
    return figure


@dataclass(frozen=True)
class Kernel:
    """A matrix product of a model, drawn as a point of the roofline.

    Args:
        name: label with the kind, dimensions and dtype of the product.
        kind: matmul, convolution or attention.
        intensity: FLOP per byte of memory traffic.
        tflops: measured rate in TFLOPS.
        share: FLOPs of the product divided by all FLOPs of the model, 0 to 1.
    """

    name: str
    kind: str
    dtype: str
    intensity: float
    tflops: float
    share: float


def draw_kernels(axes: Axes, kernels: Sequence[Kernel], tflops: Mapping[str, float], bandwidth_gb_s: float) -> None:
    """Draw one panel with the ceilings of the roofline and one marker for each matrix product.

    Letters name the products with the most FLOPs.

    Args:
        axes: panel to draw into.
        kernels: matrix products to draw.
        tflops: measured compute ceiling of each dtype in TFLOPS.
        bandwidth_gb_s: measured memory ceiling in GB/s.
    """
    used = [dtype for dtype in tflops if any(kernel.dtype == dtype for kernel in kernels)]
    ends = _ends(kernels, [tflops[dtype] for dtype in used], bandwidth_gb_s)
    labels = _draw_ceilings(axes, {dtype: tflops[dtype] for dtype in used}, bandwidth_gb_s, ends)
    for kind in dict.fromkeys(kernel.kind for kernel in kernels):
        _draw_kind(axes, kind, [kernel for kernel in kernels if kernel.kind == kind], several=len(used) > 1)
    axes.set(
        xscale="log", yscale="log", xlim=ends, ylabel="TFLOPS", xlabel="arithmetic intensity, FLOP per byte of memory traffic"
    )
    axes.set_ylim(min(kernel.tflops for kernel in kernels) / 2.5, axes.get_ylim()[1] * 1.3)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    spread_labels(axes, labels)
    _write_letters(axes, kernels)


def named_kernels(kernels: Sequence[Kernel]) -> str:
    """Return the text that explains which matrix product each letter in a panel marks, and its share of the FLOPs."""
    return "; ".join(f"{letter}: {k.name}, {percent(k.share)} %" for letter, k in zip("abc", _largest(kernels), strict=False))


def _write_letters(axes: Axes, kernels: Sequence[Kernel]) -> None:
    """Write a letter to the right of each named product. Letters that would overlap are moved upwards.

    Call this after the limits and the size of the panel are set, because they determine which letters overlap.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    placed: list[tuple[float, float]] = []  # places of the letters in points
    named = list(zip("abc", _largest(kernels), strict=False))
    for letter, kernel in sorted(named, key=lambda pair: pair[1].tflops):
        x, y = axes.transData.transform((kernel.intensity, kernel.tflops)) * 72 / figure.dpi
        right = 4 + (_area(kernel) / pi) ** 0.5
        near = [height for place, height in placed if abs(place - x - right) < _LETTER_GAP_POINTS]
        shifted = max([y, *(height + _LETTER_GAP_POINTS for height in near)])
        placed.append((x + right, shifted))
        # A letter beside one mark can be on another mark, so it has a white outline.
        outline = [withStroke(linewidth=2.5, foreground="white")]
        style = {"va": "center", "fontsize": 9, "fontweight": "bold", "zorder": 4, "path_effects": outline}
        write_at(axes, letter, (kernel.intensity, kernel.tflops), (right, shifted - y), **style)


def _largest(kernels: Sequence[Kernel]) -> list[Kernel]:
    return sorted(kernels, key=lambda kernel: -kernel.share)[:_NAMED]


def _ends(kernels: Sequence[Kernel], ceilings: list[float], bandwidth_gb_s: float) -> tuple[float, float]:
    """Return the two ends of the horizontal axis in FLOP per byte.

    The axis covers all matrix products and ridge points. A ridge point is the intensity at which the bandwidth ceiling meets a
    compute ceiling.
    """
    ridges = [ceiling * 1e3 / bandwidth_gb_s for ceiling in ceilings]
    places = [kernel.intensity for kernel in kernels]
    return min(places + ridges) / 4, max(places + ridges) * 4


def _draw_ceilings(axes: Axes, tflops: dict[str, float], bandwidth_gb_s: float, ends: tuple[float, float]) -> list[tuple]:
    """Draw the ceilings of the roofline: the bandwidth, and the given TFLOPS of each dtype.

    Return the labels for the right edge of the panel, as (y, text, colour).
    """
    labels = []
    for dtype, ceiling in tflops.items():
        colour = look(dtype)["color"]
        axes.plot([ceiling * 1e3 / bandwidth_gb_s, ends[1]], [ceiling] * 2, color=colour, linewidth=1.6)
        labels.append((ceiling, f"{dtype} {number(ceiling)}", colour))
    ridge = max([ceiling * 1e3 / bandwidth_gb_s for ceiling in tflops.values()], default=ends[1])
    axes.plot([ends[0], ridge], [ends[0] * bandwidth_gb_s / 1e3, ridge * bandwidth_gb_s / 1e3], color=INK, linewidth=1.6)
    write_at(
        axes,
        f"{number(bandwidth_gb_s)} GB/s",
        (ends[0] * 1.5, ends[0] * 1.5 * bandwidth_gb_s / 1e3),
        (8, -2),
        va="top",
        fontsize=8.5,
    )
    return labels


def _draw_kind(axes: Axes, kind: str, points: list[Kernel], several: bool) -> None:
    """Draw a marker for every matrix product of one kind.

    The marker's shape shows the kind: matmul, convolution or attention. Its colour shows the dtype if there are several dtypes,
    and the kind otherwise.
    """
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


def _draw_bars(axes: Axes, dtype: str, rows: list[Row], shares: list[Row], models: list[str]) -> None:
    maf, peak = _maf(dtype, rows, shares), _peak(dtype, shares)
    names, place = [], 0
    for name, rate, colour in (("data sheet", peak, INK), ("fastest product (MAF)", maf, MUTED)):
        if rate is not None:
            axes.barh(place, rate, height=0.62, color=colour)
            _label(axes, place, rate, number(rate) if name == "data sheet" or peak is None else _share(rate, peak, "peak"))
            names, place = [*names, name], place + 1
    for row in rows:
        colour = COLOURS[_MODELS[models.index(row.variant) % len(_MODELS)]]
        rate = not_none(row.value)
        axes.barh(place, rate, xerr=errors_of([row]), height=0.62, color=colour, ecolor=INK)
        _label(axes, place, not_none(row.ci_high), number(rate) if maf is None else _share(rate, maf, "MAF"))
        names, place = [*names, row.variant], place + 1
    axes.set_yticks(range(len(names)), names)
    widest = max([rate for rate in (peak, maf) if rate is not None] + values(rows))
    axes.set(title=dtype, xlabel="TFLOPS", xlim=(0, 1.5 * widest), ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)


def _label(axes: Axes, place: int, end: float, text: str) -> None:
    write_at(axes, text, (end, place), (5, 0), va="center", fontsize=8.5, color=INK)


def _share(rate: float, whole: float, name: str) -> str:
    return f"{number(rate)}, {100 * rate / whole:.0f} % of {name}"


def _maf(dtype: str, rows: list[Row], shares: list[Row]) -> float | None:
    """Return the MAF in TFLOPS, or None if the rows do not contain it.

    The MAF is the TAF of a model divided by the ratio TAF / MAF, both of which are in the rows.
    """
    rates = {row.variant: not_none(row.value) for row in rows}
    return next(
        (
            rates[row.variant] / not_none(row.value)
            for row in measured(shares)
            if (row.dtype, row.params.get("what")) == (dtype, "TAF / MAF") and row.variant in rates
        ),
        None,
    )


def _peak(dtype: str, shares: list[Row]) -> float | None:
    found = [row for row in measured(shares) if (row.dtype, row.params.get("what")) == (dtype, "MAF / peak")]
    return found[0].params["peak_tflops"] if found else None


def _notes(tafs: list[Row], shares: list[Row]) -> list[str]:
    """Return the notes: the share of each model's FLOPs that was timed, the source of the MAF, and why values are missing."""
    notes = ["TAF: rate of all products of one training step. Each is timed alone and weighted by its FLOPs."]
    for dtype in dict.fromkeys(row.dtype for row in measured(tafs)):
        rows = [row for row in measured(tafs) if row.dtype == dtype]
        timed = {
            row.variant: not_none(row.value) for row in shares if (row.dtype, row.params.get("what")) == (dtype, "FLOPs timed")
        }
        covered = ", ".join(f"{row.variant} {100 * timed[row.variant]:.0f} %" for row in rows if row.variant in timed)
        notes += [f"Share of the FLOPs whose products were timed in {dtype}: {covered}."] if covered else []
    origins = {row.params["maf"] for row in measured(shares) if "maf" in row.params}
    if origins == {"gemm"}:
        notes.append("MAF: rate of the fastest square matrix product of this run, because this run has no search over shapes.")
    missing: dict[str, dict[str, None]] = {}
    for row in [*tafs, *shares]:
        if row.value is None:
            missing.setdefault(row.value_reason, {})[row.dtype] = None
    return notes + [f"{', '.join(dtypes)}: {reason}." for reason, dtypes in missing.items()]


def _kernels(rows: list[Row]) -> tuple[str, list[Kernel]]:
    """Return (precision, matrix products) of the model's training step in the narrowest precision among the rows."""
    precision = rows[-1].params["precision"]
    kernels = []
    for row in (row for row in rows if row.params["precision"] == precision):
        p = row.params
        batch = f"{p['products']} of " if p["products"] > 1 else ""
        name = f"{p['kind']} {batch}{p['m']} x {p['n']} x {p['k']} {row.dtype}"
        kernels.append(Kernel(name, p["kind"], row.dtype, p["intensity"], not_none(row.value), p["share"]))
    return precision, kernels


def _ceilings(material: Material) -> Mapping[str, float]:
    """Return the TFLOPS of this run's fastest matrix product in each format, with cold caches."""
    ceilings: dict[str, float] = {}
    for row in measured([*material.of("gemm", metric="gemm_tflops"), *material.of("best_products", metric="gemm_tflops")]):
        if not row.hot:
            ceilings[row.dtype] = max(not_none(row.value), ceilings.get(row.dtype, 0.0))
    return ceilings


def _slope_gb_s(material: Material) -> float | None:
    """Return the memory ceiling of chapter 1.1's roofline in GB/s: the rate of the fastest stream over the largest arrays."""
    streams = [row for row in measured(material.of("bandwidth", metric="bandwidth_gb_s")) if not row.hot]
    largest = max((row.params["elements"] for row in streams), default=None)
    return max(values(row for row in streams if row.params["elements"] == largest), default=None)


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """Draw one legend for all panels in the first panel. It lists every kind of matrix product drawn."""
    kinds = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            kinds.setdefault(label, handle)
    panels[0].legend(kinds.values(), kinds.keys(), loc="lower right")
