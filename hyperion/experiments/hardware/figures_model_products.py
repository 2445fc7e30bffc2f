"""Figures of the products that our own models do: peak, MAF and TAF beside each other, and the products under the roofline."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.hardware.figures_kernels import ABOVE_THE_SLOPE, Kernel, draw_kernels, named_kernels
from hyperion.figures.formats import number, percent
from hyperion.figures.material import Material, measured
from hyperion.figures.style import COLOURS, INK, MUTED, add_notes, errors_of, new_figure
from hyperion.results import Row

_MODELS = (0, 2, 4, 3, 5, 1)  # colours of models, in the order of the rows


def model_products(material: Material) -> Figure | None:
    """Bars of each format: the data sheet's peak, the fastest product, and the products of each model."""
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
    """A panel for each model: its products at their intensity, below the ceilings of this run."""
    rows = measured(material.of("model_products", metric="gemm_tflops"))
    slope = _slope_gb_s(material)
    panels_of = {name: _kernels([row for row in rows if row.variant == name]) for name in dict.fromkeys(r.variant for r in rows)}
    if not rows or slope is None:
        return None
    lines = (len(panels_of) + 1) // 2
    figure, panels = new_figure(
        "Products of our models under the roofline",
        material.machine("model_products"),
        min(2, len(panels_of)),
        lines=lines,
        height=1.2 + 3.0 * lines,
    )
    ceilings = _ceilings(material)
    notes = [
        "Lines: ceilings measured on this machine. A mark is a product, timed alone with a cold cache; its area is its share "
        f"of the model's FLOPs. {ABOVE_THE_SLOPE}"
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


def _draw_bars(axes: Axes, dtype: str, rows: list[Row], shares: list[Row], models: list[str]) -> None:
    maf, peak = _maf(dtype, rows, shares), _peak(dtype, shares)
    names, place = [], 0
    for name, rate, colour in (("data sheet", peak, INK), ("fastest product (MAF)", maf, MUTED)):
        if rate is not None:
            axes.barh(place, rate, height=0.62, color=colour)
            _label(axes, place, rate, number(rate) if name == "data sheet" or peak is None else _told(rate, peak, "peak"))
            names, place = [*names, name], place + 1
    for row in rows:
        colour = COLOURS[_MODELS[models.index(row.variant) % len(_MODELS)]]
        axes.barh(place, row.value, xerr=errors_of([row]), height=0.62, color=colour, ecolor=INK)
        _label(axes, place, row.ci_high, number(row.value) if maf is None else _told(row.value, maf, "MAF"))
        names, place = [*names, row.variant], place + 1
    axes.set_yticks(range(len(names)), names)
    widest = max([rate for rate in (peak, maf) if rate is not None] + [row.value for row in rows])
    axes.set(title=dtype, xlabel="TFLOPS", xlim=(0, 1.5 * widest), ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)


def _label(axes: Axes, place: int, end: float, text: str) -> None:
    axes.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _told(rate: float, whole: float, name: str) -> str:
    return f"{number(rate)}, {100 * rate / whole:.0f} % of {name}"


def _maf(dtype: str, rows: list[Row], shares: list[Row]) -> float | None:
    """TFLOPS of the fastest product: a model's rate over its share of it."""
    rates = {row.variant: row.value for row in rows}
    return next(
        (
            rates[row.variant] / row.value
            for row in measured(shares)
            if (row.dtype, row.params.get("what")) == (dtype, "TAF / MAF") and row.variant in rates
        ),
        None,
    )


def _peak(dtype: str, shares: list[Row]) -> float | None:
    found = [row for row in measured(shares) if (row.dtype, row.params.get("what")) == (dtype, "MAF / peak")]
    return found[0].params["peak_tflops"] if found else None


def _notes(tafs: list[Row], shares: list[Row]) -> list[str]:
    """How much of each model was timed, where the MAF comes from, and what is missing and why."""
    notes = ["TAF: products of one training step, each timed alone, weighed by FLOPs."]
    for dtype in dict.fromkeys(row.dtype for row in measured(tafs)):
        rows = [row for row in measured(tafs) if row.dtype == dtype]
        timed = {row.variant: row.value for row in shares if (row.dtype, row.params.get("what")) == (dtype, "FLOPs timed")}
        covered = ", ".join(f"{row.variant} {100 * timed[row.variant]:.0f} %" for row in rows if row.variant in timed)
        notes += [f"Share of the FLOPs that was timed in {dtype}: {covered}."] if covered else []
    origins = {row.params["maf"] for row in measured(shares) if "maf" in row.params}
    if origins == {"gemm"}:
        notes.append("MAF: the fastest square product of this run; no search over shapes is in it.")
    missing: dict[str, dict[str, None]] = {}
    for row in [*tafs, *shares]:
        if row.value is None:
            missing.setdefault(row.value_reason, {})[row.dtype] = None
    return notes + [f"{', '.join(dtypes)}: {reason}." for reason, dtypes in missing.items()]


def _kernels(rows: list[Row]) -> tuple[str, list[Kernel]]:
    """(the narrowest precision that a model's step was captured in, its products)."""
    precision = rows[-1].params["precision"]
    kernels = []
    for row in (row for row in rows if row.params["precision"] == precision):
        p = row.params
        batch = f"{p['products']} of " if p["products"] > 1 else ""
        name = f"{p['kind']} {batch}{p['m']} x {p['n']} x {p['k']} {row.dtype}"
        kernels.append(Kernel(name, p["kind"], row.dtype, p["intensity"], row.value, p["share"]))
    return precision, kernels


def _ceilings(material: Material) -> Mapping[str, float]:
    """TFLOPS of the fastest product of each format in this run."""
    ceilings: dict[str, float] = {}
    for row in measured([*material.of("gemm", metric="gemm_tflops"), *material.of("best_products", metric="gemm_tflops")]):
        if not row.hot:
            ceilings[row.dtype] = max(row.value, ceilings.get(row.dtype, 0.0))
    return ceilings


def _slope_gb_s(material: Material) -> float | None:
    """The fastest stream among the largest arrays, as the roofline of chapter 1.1 takes it."""
    streams = [row for row in measured(material.of("bandwidth", metric="bandwidth_gb_s")) if not row.hot]
    largest = max((row.params["elements"] for row in streams), default=None)
    return max((row.value for row in streams if row.params["elements"] == largest), default=None)


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels, in the first one, of every kind of product that is drawn."""
    kinds = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            kinds.setdefault(label, handle)
    panels[0].legend(kinds.values(), kinds.keys(), loc="lower right")
