"""How good were the predictions? Every value that was foretold, beside what was measured."""

from matplotlib.figure import Figure

from hyperion.figures.material import Material
from hyperion.figures.style import GRID, INK, add_notes, log_ticks, look, new_figure
from hyperion.results import Prediction, Row

_ARROWS = {"higher": " ↑", "lower": " ↓", "none": ""}
_NOTE = (
    "Predictions were written down before the first sample, from ceilings and shapes only. ↑ more is better: predicted / "
    "measured. ↓ less is better: measured / predicted. For both, above 1 says that better was foretold than came. No arrow: "
    "predicted / measured, above 1 more was foretold. Grey: less than 1.25 times apart."
)


def predictions(material: Material) -> Figure | None:
    """How much better was foretold than came, by measured value: 1 where the prediction was right."""
    rows = scored(material.rows)
    if not rows:
        return None
    metrics = list(dict.fromkeys(row.metric for row in rows))
    height = max(4.2, 1.0 + 0.2 * len(metrics))  # of the legend, a line a metric
    figure, (axes,) = new_figure("Predictions scored", material.machine(rows[0].experiment), width=9.2, height=height)
    axes.axhspan(0.8, 1.25, color=GRID, linewidth=0, zorder=0.5)
    axes.axhline(1, color=INK, linewidth=1)
    for position, metric in enumerate(metrics):
        points = [row for row in rows if row.metric == metric]
        x, y = [row.value for row in points], [_promised(row, row.predicted) for row in points]
        axes.plot(x, y, linestyle="none", alpha=0.75, label=_label(points[0]), **look(metric, position))
    guesses = _guesses(material.predictions, rows)
    if guesses:
        axes.plot(*zip(*guesses, strict=True), linestyle="none", marker="*", markersize=11, color=INK, label="reader's guess")
    axes.set(xscale="log", yscale="log", xlabel="measured, each in its unit", ylabel="foretold beside measured")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.45), max(high, 2.2))
    log_ticks(axes.yaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    add_notes(figure, [_NOTE])
    return figure


def scored(rows: list[Row]) -> list[Row]:
    """Rows whose ratio to their prediction can be drawn."""
    return [row for row in rows if row.predicted and row.value and row.predicted > 0 and row.value > 0]


def _promised(row: Row, predicted: float) -> float:
    """Return the optimism of a prediction, above 1 if too optimistic; predicted / measured for a metric without direction."""
    return row.value / predicted if row.definition.direction == "lower" else predicted / row.value


def _label(row: Row) -> str:
    unit = "" if row.unit in ("1", "fraction") else f" [{row.unit}]"
    return f"{row.metric}{unit}{_ARROWS[row.definition.direction]}"


def _guesses(written: list[Prediction], rows: list[Row]) -> list[tuple[float, float]]:
    """(measured, how it compares with the guess) for each of the reader's guesses."""

    def key(entry: Prediction | Row) -> tuple:
        return (entry.experiment, entry.variant, entry.dtype, entry.metric, sorted(entry.params.items()))

    measured = [(key(row), row) for row in rows]
    return [(row.value, _promised(row, p.guess)) for p in written if p.guess for row_key, row in measured if row_key == key(p)]
