"""Figure of the language model's speed: a training step of both paths beside the roofs that the run's ceilings set."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hyperion.experiments.baselines.figures_images import LOOPS, draw_losses
from hyperion.figures.material import Material, measured
from hyperion.figures.style import COLOURS, INK, add_notes, errors_of, new_figure
from hyperion.results import Row

# Rows of before, in references, have each product timed alone, and attention apart.
_PARTS = {
    "products": COLOURS[6],
    "attention": COLOURS[2],
    "activations": COLOURS[5],
    "logits": COLOURS[4],
    "optimizer": COLOURS[3],
}
# What a share is of, and what its roof is called below its bar.
_OWN = "of the roof of its own products"
_ROOFS = {"of the step's roof": "roof", _OWN: "roof of its\nown products"}


def language_speed(material: Material) -> Figure | None:
    """Milliseconds of a step of both, the roofs' by their parts, and both paths' losses over the same batches."""
    rows = measured(material.of("language_training_speed"))
    times = {row.params["loop"]: row for row in rows if row.metric == "step_time_s"}
    if len(times) < len(LOOPS):
        return None
    ours = times["hyperion"]
    title = f"Training {ours.variant}, {ours.params['batch']:,} tokens a step"
    figure, (left, right) = new_figure(title, material.machine("language_training_speed"), 2)
    shares = [row for row in rows if row.metric == "share"]
    ratio = next(row for row in rows if row.metric == "speedup")
    _draw_steps(left, times, shares, ratio)
    draw_losses(right, material.samples("language_training_speed"), "token")
    add_notes(figure, _notes(shares, compiled=ours.params["compiled"]))
    return figure


def _notes(shares: list[Row], compiled: bool) -> list[str]:
    notes = [] if compiled else ["Here neither is compiled: both do the same, operator by operator."]
    if not shares:
        return [*notes, "No roof: this run has measured no ceilings."]
    told = {name: value for row in shares for name, value in row.params.items()}
    ways = [f"all at the rate of this run's fastest, {told['gemm_tflops']:.4g} TFLOPS"] if "gemm_tflops" in told else []
    own = any(row.params["what"] == _OWN for row in shares)
    in_turn = "one after the other and nothing between, timed in turn with the steps"
    ways += [f"the step's own, {'each at the time it takes alone' if 'attention_s' in told else in_turn}"] if own else []
    return [
        *notes,
        f"Roof: products, {' or '.join(ways)}; then the bytes moved outside of products, at the fastest stream, "
        f"{told['bandwidth_gb_s']:.4g} GB/s.",
        "In percent: how much of a step each roof is.",
    ]


def _draw_steps(axes: Axes, times: dict[str, Row], shares: list[Row], ratio: Row) -> None:
    names, drawn = [], set()
    for what, name in _ROOFS.items():
        for row in [row for row in shares if row.params["what"] == what][:1]:
            bottom = 0.0
            for part, colour in _PARTS.items():
                height = 1e3 * row.params.get(f"{part}_s", 0.0)
                label = part if height and part not in drawn else None
                axes.bar([len(names)], [height], 0.6, bottom=[bottom], color=colour, label=label)
                bottom, drawn = bottom + height, drawn | {part} if height else drawn
            _annotate(axes, len(names), bottom, f"{bottom:.3g} ms")
            names.append(name)
    for loop in ("hyperion", "plain"):
        row, (colour, label) = times[loop], LOOPS[loop]
        at, height = len(names), 1e3 * row.value
        errors = errors_of([row])
        axes.bar([at], [height], 0.6, color=colour, yerr=errors and [[1e3 * e[0]] for e in errors], ecolor=INK)
        told = [f"{height:.3g} ms"]
        mine = [row for row in shares if row.params["loop"] == loop]
        if mine:
            told.append(", ".join(f"{100 * row.value:.0f} %" for row in mine))
        if loop == "hyperion":
            told.insert(0, f"{ratio.value:.3f} × [{ratio.ci_low:.3f}, {ratio.ci_high:.3f}]")
        _annotate(axes, at, 1e3 * (row.ci_high or row.value), "\n".join(told))
        names.append(label)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.5)
    axes.grid(axis="x", visible=False)
    axes.set(ylabel="ms a step", ylim=(0, None), title="A step, in turn; 95 % interval")
    if shares:
        axes.legend(loc="upper left")


def _annotate(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(0, 4), ha="center", textcoords="offset points", fontsize=9, fontweight="bold")
