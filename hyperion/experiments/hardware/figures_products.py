"""Figures of what a matrix product can reach: the best shape of each number format, and the same product with other numbers."""

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.formats import number
from hyperion.figures.material import Material, measured
from hyperion.figures.style import COLOURS, INK, MARKERS, MUTED, add_notes, errors_of, look, new_figure
from hyperion.results import Row

_BEST, _DATA = "best_products", "operand_data"
_RATIOS = ("speedup", "rate_ratio")  # among products timed in turn, and among those timed alone
_BAR = 0.56
_TURNS = {"alone": COLOURS[0], "in turn": COLOURS[5]}
_ERROR = {"ecolor": INK, "elinewidth": 1.0}


def best_products(material: Material) -> Figure | None:
    """The fastest product found in each format beside the format's limit, and the share of it that given shapes reach."""
    rows = material.of(_BEST, metric="gemm_tflops")
    fastest = measured(row for row in rows if row.variant == "fastest found")
    if not fastest:
        return None
    limited = any(row.limit is not None for row in fastest)
    figure, panels = new_figure(
        "The fastest product of each format", material.machine(_BEST), 2 if limited else 1, height=1.9 + 0.42 * len(fastest)
    )
    given = measured(row for row in rows if row.variant == "given shape")
    places = {row.dtype: place for place, row in enumerate(fastest)}
    _draw_fastest(panels[0], fastest)
    if limited:
        _draw_shares(panels[1], fastest)
    _draw_given(panels[-1], given, places, _share if limited else (lambda row: row.value))
    _name_lines(panels, list(places))
    add_notes(figure, [*_searches(fastest), *_absences(rows)])
    return figure


def operand_data(material: Material) -> Figure | None:
    """TFLOPS of one product by what its operands hold, alone and in turn; power and clock beside where they are readable."""
    rows = material.of(_DATA)
    rates = [row for row in rows if row.metric == "gemm_tflops"]
    if not measured(rates):
        return None
    alone = [row for row in measured(rates) if row.params["timed"] == "alone"]
    states = [
        (column, title)
        for column, title in (("power_w", "Power, W"), ("clock_mhz", "Clock, MHz"))
        if any(getattr(row, column) is not None for row in alone)
    ]
    params, dtype = rates[0].params, rates[0].dtype
    places = {data: place for place, data in enumerate(dict.fromkeys(row.variant for row in rates))}
    figure, panels = new_figure(
        f"One product, other numbers: {params['m']}³ in {dtype}", material.machine(_DATA), 1 + len(states), height=3.9
    )
    _draw_rates(panels[0], measured(rates), places, [row for row in rows if row.metric in _RATIOS])
    for axes, (column, title) in zip(panels[1:], states, strict=True):
        _draw_state(axes, alone, places, column, title)
    _name_lines(panels, list(places))
    add_notes(figure, _told(rows, rates, states) + _absences(rates))
    return figure


def _name_lines(panels: list[Axes], names: list[str]) -> None:
    """The same lines in every panel, from the top, named at the left of the first."""
    for place, axes in enumerate(panels):
        axes.set_yticks(range(len(names)), names if place == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)


def _draw_fastest(axes: Axes, fastest: list[Row]) -> None:
    """A bar for what was found, within an empty one for the limit; shape and rate at its end."""
    for place, row in enumerate(fastest):
        if row.limit is not None:
            axes.barh(place, row.limit, _BAR + 0.14, facecolor="none", edgecolor=MUTED, linewidth=0.9)
        axes.barh(place, row.value, _BAR, xerr=errors_of([row]), error_kw=_ERROR, color=look(row.dtype)["color"])
        _write(axes, _end(row), place, f"{number(row.value)}  at {_shape(row)}")
    outlined = "; outline: limit" if any(row.limit is not None for row in fastest) else ""
    unit = "TFLOPS (int8: TOPS)" if any(row.dtype == "int8" for row in fastest) else "TFLOPS"
    axes.set(
        xlim=(0, 1.62 * max(_end(row) for row in fastest)),
        title=f"Fastest found, at its M × N × K{outlined}",
        xlabel=f"{unit}, median with 95 % interval",
    )


def _draw_shares(axes: Axes, fastest: list[Row]) -> None:
    for place, row in enumerate(fastest):
        if row.limit is None:
            _write(axes, 0, place, "no limit known")
            continue
        axes.barh(place, _share(row), _BAR, color=look(row.dtype)["color"], alpha=0.45)
        _write(axes, 100, place, f"{_share(row):.0f} % of {number(row.limit)}")
    axes.axvline(100, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set(xlim=(0, 128), xticks=range(0, 101, 20), xlabel="% of the limit at the maximum clock")


def _draw_given(axes: Axes, given: list[Row], places: dict[str, int], worth: Callable[[Row], float | None]) -> None:
    """A mark for each shape that somebody needs, named above the panel."""
    for position, name in enumerate(dict.fromkeys(row.params["shape"] for row in given)):
        points = [r for r in given if r.params["shape"] == name and r.dtype in places and worth(r) is not None]
        if points:
            axes.plot(
                [worth(row) for row in points],
                [places[row.dtype] for row in points],
                linestyle="none",
                color="white",
                markeredgecolor=INK,
                marker=MARKERS[position % len(MARKERS)],
                markersize=6.5,
                zorder=4,
                label=f"{name} ({_shape(points[0])})",
            )
    if axes.get_legend_handles_labels()[1]:
        axes.set_title("")
        axes.legend(ncols=1, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=8, handletextpad=0.2)


def _draw_rates(axes: Axes, rates: list[Row], places: dict[str, int], ratios: list[Row]) -> None:
    over_usual = {(row.variant, row.params["timed"]): row.value for row in ratios}
    width = _BAR / 2 + 0.08
    for side, (timed, colour) in zip((-0.5, 0.5), _TURNS.items(), strict=True):
        for row in (row for row in rates if row.params["timed"] == timed):
            place = places[row.variant] + side * width
            axes.barh(place, row.value, width, xerr=errors_of([row]), error_kw=_ERROR, color=colour)
            ratio = over_usual.get((row.variant, timed))
            _write(axes, row.ci_high or row.value, place, number(row.value) + (f"  ×{ratio:.3f}" if ratio else ""))
        axes.barh(0, 0, color=colour, label=timed)
    axes.set(xlabel="TFLOPS, median with 95 % interval", xlim=(0, 1.5 * max(row.ci_high or row.value for row in rates)))
    axes.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def _draw_state(axes: Axes, alone: list[Row], places: dict[str, int], column: str, title: str) -> None:
    known = [(places[row.variant], getattr(row, column)) for row in alone if getattr(row, column) is not None]
    for place, value in known:
        axes.barh(place, value, _BAR, color=_TURNS["alone"])
        _write(axes, value, place, f"{value:,.0f}")
    axes.set(title=title, xlabel="alone, median over the samples", xlim=(0, 1.28 * max(value for _, value in known)))


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8, color=INK)


def _end(row: Row) -> float:
    """Where all that is drawn of a row ends."""
    return max(row.value, row.ci_high or 0, row.limit or 0)


def _shape(row: Row) -> str:
    return "×".join(str(row.params[name]) for name in "mnk")


def _share(row: Row) -> float | None:
    return None if row.fraction_of_limit is None else 100 * row.fraction_of_limit


def _searches(fastest: list[Row]) -> list[str]:
    """How much of the grid each search saw."""
    told: dict[str, list[str]] = {}
    for row in fastest:
        seen, shapes = row.params["seen"], row.params["shapes"]
        told.setdefault(row.params["stopped"], []).append(row.dtype if seen == shapes else f"{row.dtype} {seen} of {shapes}")
    ends = "; ".join(f"{', '.join(names)}: {stopped}" for stopped, names in told.items())
    return [f"Shapes seen: {ends}. A search ranks shapes by few samples; only its leaders are measured and verified."]


def _told(rows: list[Row], rates: list[Row], states: list[tuple[str, str]]) -> list[str]:
    ratios = [row for row in rows if row.metric in _RATIOS]
    notes = [
        "In turn: call by call, so that all data meet the same clock. Alone: each for itself, at the clock that its own power "
        "leaves." + (f" ×: speed over {ratios[0].params['over']} data timed alike." if ratios else "")
    ]
    limits = {row.limit: row.limit_source.partition(":")[0] for row in measured(rates) if row.limit is not None}
    notes += [f"Limit at the maximum clock: {number(limit)} TFLOPS ({path})." for limit, path in limits.items()]
    shown = [column for column, _ in states]
    if "power_w" not in shown:
        energies = (row.value_reason.removeprefix("no power: ") for row in rows if row.metric == "energy_j_per_tflop")
        notes.append(f"Power is not shown: {next(energies, '') or 'it was not readable'}.")
    if "clock_mhz" not in shown:
        notes.append("The clock is not shown: the system does not tell it.")
    return notes


def _absences(rows: list[Row]) -> list[str]:
    """One note a reason: what was not measured, and which formats have no limit."""
    missing: dict[str, dict[str, None]] = {}
    for row in rows:
        name = f"{row.dtype} {row.params.get('shape', '')}".strip()
        if row.value is None:
            missing.setdefault(f"not measured ({row.value_reason})", {})[name] = None
        elif row.limit is None:
            missing.setdefault(row.limit_source.partition(" (")[0].partition("; ")[0], {})[row.dtype] = None
    return [f"{', '.join(names)}: {reason}." for reason, names in missing.items()]
