"""Figures and tables for the operator suite and the architectures."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.figures.material import Material, Plot, measured, number, values
from hyperion.figures.style import COLOURS, MUTED, add_notes, log_ticks, look, new_figure, write_at
from hyperion.results import Row
from hyperion.results.rows import UNEXPECTED

TITLES = {"operator_suite": "Operators against float64", "architectures": "Architectures of transformers"}
_METRIC, _ALL = "error_over_tolerance", "all operators"
_STATUSES = {"passed": COLOURS[2], "failed": COLOURS[1], "unsupported": COLOURS[3], "no gradient": COLOURS[5]}
# Smaller errors are drawn here, because a logarithmic axis cannot show 0.
_SMALLEST = 1e-4


def operator_counts(material: Material) -> Figure | None:
    """Draw the number of operators that pass, fail or are unsupported, for each number format and pass."""
    rows = measured(material.of("operator_suite", metric="count", variant=_ALL))
    if not rows:
        return None
    figure, (axes,) = new_figure("Operators against float64", material.machine("operator_suite"), 1, height=3.6)
    groups = list(dict.fromkeys(_group(row) for row in rows))
    left, rest = dict.fromkeys(groups, 0.0), {group: [] for group in groups}
    totals = [sum(values(row for row in rows if _group(row) == group)) for group in groups]
    for status, colour in _STATUSES.items():
        found = {_group(row): value for row, value in zip(rows, values(rows), strict=True) if row.params["what"] == status}
        widths = [found.get(group, 0.0) for group in groups]
        bars = axes.barh(range(len(groups)), widths, left=list(left.values()), color=colour, label=status, height=0.7)
        # A number does not fit into a narrow part. The numbers of narrow parts are written after the bar.
        wide = [width > 0.1 * total for width, total in zip(widths, totals, strict=True)]
        labels = [number(width) if fits else "" for width, fits in zip(widths, wide, strict=True)]
        axes.bar_label(bars, labels, label_type="center", fontsize=8)
        for group, width, fits in zip(groups, widths, wide, strict=True):
            left[group] += width
            rest[group] += [f"{number(width)} {status}"] if width and not fits else []
    for place, group in enumerate(groups):
        write_at(axes, ", ".join(rest[group]), (left[group], place), (4, 0), va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="operators and layers", xlim=(0, 1.5 * max(left.values())))
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def operator_errors(material: Material) -> Figure | None:
    """Draw the cumulative distribution of the operators' errors, divided by their tolerances, for each number format."""
    rows = [row for row in material.of("operator_suite", metric=_METRIC) if row.params.get("mode") == "eager"]
    if not measured(rows):
        return None
    figure, (axes,) = new_figure("Errors of operators", material.machine("operator_suite"), 1)
    for position, dtype in enumerate(dict.fromkeys(row.dtype for row in rows)):
        errors = sorted(max(value, _SMALLEST) for value in values(measured(row for row in rows if row.dtype == dtype)))
        shares = [(place + 1) / len(errors) for place in range(len(errors))]
        style: dict[str, Any] = look(dtype, position) | {"marker": "", "drawstyle": "steps-post"}
        axes.plot(errors, shares, label=f"{dtype}, {len(errors)} operators and variants", **style)
    _tolerance_axis(axes)
    axes.set(ylabel="share of operators", ylim=(0, 1.02))
    # Above the axes, so that it hides no line. The names of three formats just fit into the width of the panel.
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=7.5, columnspacing=1.0, handlelength=1.4)
    above = [f"{line['operator']} ({line['dtype']})" for line in gaps(rows) if line["status"] != "unsupported"]
    add_notes(figure, [f"Above the tolerance or failed: {', '.join(above)}."] if above else [])
    return figure


def architectures(material: Material) -> Figure | None:
    """Draw three errors of each architecture: those of the logits, of the gradients, and of the logits during generation."""
    rows = material.of("architectures", metric=_METRIC)
    if not measured(rows):
        return None
    names = list(dict.fromkeys(row.variant for row in rows))
    title = "Architectures in float32 against float64"
    figure, (axes,) = new_figure(title, material.machine("architectures"), 1, height=1.8 + 0.17 * len(names))
    for position, step in enumerate(("forward", "backward", "generate")):
        found = [row for row in measured(rows) if row.params["step"] == step]
        style: dict[str, Any] = look(step, position) | {"linestyle": "", "markersize": 4.5}
        axes.plot(
            [max(value, _SMALLEST) for value in values(found)], [names.index(row.variant) for row in found], label=step, **style
        )
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _tolerance_axis(axes)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    failed = [line for line in steps_of(rows) if line["result"].startswith(("failed", UNEXPECTED))]
    add_notes(figure, [f"{line['architecture']}, {line['step']}: {line['result']}." for line in failed])
    return figure


def gap_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the gap report as a table. See `gaps`."""
    return pd.DataFrame(gaps(rows), columns=["operator", "kind", "dtype", "pass", "mode", "status", "reason"])


def gaps(rows: Iterable[Row]) -> list[dict[str, str]]:
    """Return the gap report: one entry for each operator that is wrong, raises an error, or has no kernel.

    Args:
        rows: rows of `operator_suite`.

    Returns:
        Dicts with the keys operator, kind, dtype, pass, mode, status and reason. The status is "failed", "unsupported", or
        "known" for a documented inaccuracy of PyTorch itself.
    """
    lines = []
    for row in rows:
        if row.metric != _METRIC or (row.value is not None and row.value <= 1):
            continue
        which = row.params.get("pass") or row.params.get("worst pass", "")
        status, _, reason = row.value_reason.partition(": ")
        if row.value is not None:
            status, reason = "known", f"{number(row.value, 3)} tolerances: {row.params.get('cause', '')}"
        status = "failed" if row.is_unexpected else status
        line = {"operator": row.variant, "kind": row.params.get("kind", ""), "dtype": row.dtype, "pass": which}
        lines.append(line | {"mode": row.params.get("mode", ""), "status": status, "reason": reason})
    return lines


def count_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return the number of operators by number format and pass, with one column for each status."""
    lines: dict[str, dict] = {}
    for row in rows:
        if (row.variant, row.metric) == (_ALL, "count"):
            line = lines.setdefault(_group(row), {"dtype": row.dtype, "pass": row.params["pass"]})
            line[row.params["what"]] = number(row.value) or row.value_reason
    return pd.DataFrame(lines.values())


def steps_of(rows: Iterable[Row]) -> list[dict]:
    """Return one entry for each step of each architecture: the error divided by its tolerance, or the reason for its absence.

    Args:
        rows: rows of `architectures`.

    Returns:
        Dicts with the keys architecture, family, seed, step and result.
    """
    return [
        {
            "architecture": row.variant,
            "family": row.params.get("family", ""),
            "seed": row.params.get("seed"),
            "step": row.params.get("step", ""),
            "result": number(row.value, 3) if row.value is not None else row.value_reason,
        }
        for row in rows
        if row.metric == _METRIC
    ]


def family_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a table with one line for each family of architectures.

    A line contains the architectures, how many of them pass every step, and the range of their sizes.
    """
    steps, sizes = steps_of(rows), [row for row in rows if row.params.get("what") == "parameters"]
    failed = {row.variant for row in rows if row.is_unexpected or row.value_reason.startswith("failed")}
    lines = []
    for family in dict.fromkeys(line["family"] for line in steps):
        names = list(dict.fromkeys(line["architecture"] for line in steps if line["family"] == family))
        counts = values(measured(row for row in sizes if row.variant in names))
        lines.append(
            {
                "family": family,
                "architectures": ", ".join(names),
                "pass": f"{len(set(names) - failed)} of {len(names)}",
                "parameters": f"{number(min(counts))} to {number(max(counts))}" if counts else "",
            }
        )
    return pd.DataFrame(lines)


def _group(row: Row) -> str:
    return f"{row.dtype} {row.params['pass']}"


def _tolerance_axis(axes: Axes) -> None:
    axes.axvline(1, color=MUTED, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set(xscale="log", xlabel="largest error over its tolerance (1: the tolerance)")
    low, high = axes.get_xlim()
    axes.set_xlim(low, max(high, 2))
    log_ticks(axes.xaxis)


PLOTS = (
    Plot(
        "operator_counts", "operator_suite", "Operators that pass, fail or have no kernel, by format and pass.", operator_counts
    ),
    Plot(
        "operator_errors",
        "operator_suite",
        "Errors of operators over their tolerances, as shares of the operators.",
        operator_errors,
    ),
    Plot("architectures", "architectures", "Errors of each architecture over their tolerances.", architectures),
)

# Folder for tables and figures in a run's benchmarks/. The subject `inference` uses the same folder, because published reference
# runs contain the figures of both subjects, and of `quantization`, in it.
RESULTS_FOLDER = "inference"
