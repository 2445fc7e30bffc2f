"""How good were the predictions? Every value that was foretold, beside what was measured."""

from matplotlib.figure import Figure

from hyperion.book.material import Material
from hyperion.book.style import GRID, INK, add_notes, log_ticks, look, new_figure
from hyperion.results import Prediction, Row, metric_named


def predictions(material: Material) -> Figure | None:
    """Predicted over measured, by measured value: 1 where the prediction was right, with a band of 20 %."""
    rows = [row for row in material.rows if row.predicted and row.value and row.predicted > 0 and row.value > 0]
    if not rows:
        return None
    figure, (axes,) = new_figure("Predictions scored", material.machine(rows[0].experiment), width=9.2)
    axes.axhspan(0.8, 1.2, color=GRID, linewidth=0, zorder=0.5)
    axes.axhline(1, color=INK, linewidth=1)
    for position, metric in enumerate(dict.fromkeys(row.metric for row in rows)):
        points = [row for row in rows if row.metric == metric]
        unit = metric_named(metric).unit
        label = metric + ("" if unit in ("1", "fraction") else f" [{unit}]")
        x, y = [row.value for row in points], [row.predicted / row.value for row in points]
        axes.plot(x, y, linestyle="none", alpha=0.75, label=label, **look(metric, position))
    guesses = _guesses(material.predictions, rows)
    if guesses:
        axes.plot(
            *zip(*guesses, strict=True), linestyle="none", marker="*", markersize=11, color=INK, label="reader's guess"
        )
    axes.set(xscale="log", yscale="log", xlabel="measured, each in its unit", ylabel="predicted / measured")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.45), max(high, 2.2))
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    note = "Predictions were written down before the first sample, from ceilings and shapes only. "
    add_notes(figure, [note + "Above 1: too much was promised. Grey: within 20 %."])
    return figure


def _guesses(written: list[Prediction], rows: list[Row]) -> list[tuple[float, float]]:
    """(measured, guessed / measured) for each of the reader's guesses."""

    def key(entry: Prediction | Row) -> tuple:
        return (entry.experiment, entry.variant, entry.dtype, entry.metric, sorted(entry.params.items()))

    measured = [(key(row), row.value) for row in rows]
    return [(value, p.guess / value) for p in written if p.guess for row_key, value in measured if row_key == key(p)]
