"""Figure of the language model's speed: a training step of both paths beside the roof that the run's ceilings set."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.book.material import Material, measured
from hyperion.book.plots_images import LOOPS, draw_losses
from hyperion.book.style import COLOURS, INK, add_notes, errors_of, new_figure
from hyperion.results import Row

_PARTS = {"products": COLOURS[6], "activations": COLOURS[5], "logits": COLOURS[4], "optimizer": COLOURS[3]}


def language_speed(material: Material) -> Figure | None:
    """Milliseconds of a step of both, the roof's by its parts, and both paths' losses over the same batches."""
    rows = measured(material.of("language_training_speed"))
    times = {row.params["loop"]: row for row in rows if row.metric == "step_time_s"}
    if len(times) < len(LOOPS):
        return None
    ours = times["hyperion"]
    title = f"Training {ours.variant}, {ours.params['batch']:,} tokens a step"
    figure, (left, right) = new_figure(title, material.machine("language_training_speed"), 2)
    shares = {row.params["loop"]: row for row in rows if row.metric == "share"}
    ratio = next(row for row in rows if row.metric == "speedup")
    _draw_steps(left, times, shares, ratio)
    draw_losses(right, material.samples("language_training_speed"), "token")
    add_notes(figure, _notes(shares, compiled=ours.params["compiled"]))
    return figure


def _notes(shares: dict[str, Row], compiled: bool) -> list[str]:
    notes = [] if compiled else ["Here neither is compiled: both do the same, operator by operator."]
    for row in list(shares.values())[:1]:
        told = row.params
        notes.append(
            f"Roof: the step's FLOPs at this run's fastest product, {told['gemm_tflops']:.4g} TFLOPS, then the bytes that it "
            f"cannot avoid moving at its fastest stream, {told['bandwidth_gb_s']:.4g} GB/s."
        )
    return notes if shares else [*notes, "No roof: this run has measured no ceilings."]


def _draw_steps(axes: Axes, times: dict[str, Row], shares: dict[str, Row], ratio: Row) -> None:
    names = []
    for row in list(shares.values())[:1]:
        bottom = 0.0
        for part, colour in _PARTS.items():
            height = 1e3 * row.params[f"{part}_s"]
            axes.bar([0], [height], 0.6, bottom=[bottom], color=colour, label=part)
            bottom += height
        _annotate(axes, 0, bottom, f"{bottom:.3g} ms")
        names.append("roof")
    for loop in ("hyperion", "plain"):
        row, (colour, label) = times[loop], LOOPS[loop]
        at, height = len(names), 1e3 * row.value
        errors = errors_of([row])
        axes.bar([at], [height], 0.6, color=colour, yerr=errors and [[1e3 * e[0]] for e in errors], ecolor=INK)
        told = [f"{height:.3g} ms"]
        if loop in shares:
            told.append(f"{100 * shares[loop].value:.0f} % of the roof")
        if loop == "hyperion":
            told.insert(0, f"{ratio.value:.2f} × [{ratio.ci_low:.2f}, {ratio.ci_high:.2f}]")
        _annotate(axes, at, 1e3 * (row.ci_high or row.value), "\n".join(told))
        names.append(label)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.5)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="ms a step", ylim=(0, None), title="A step, in turn; 95 % interval")
    if shares:
        axes.legend(loc="upper left")


def _annotate(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(0, 4), ha="center", textcoords="offset points", fontsize=9, fontweight="bold"
    )  # fmt: skip
