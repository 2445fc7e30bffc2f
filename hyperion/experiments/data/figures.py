"""Figures of the data chapter: token counts, sample images, tokenization speed, and loader speed."""

import numpy as np
from matplotlib.figure import Figure

from hyperion.errors import not_none
from hyperion.figures.material import Material, Plot, interval, items, measured, number, select, values
from hyperion.figures.style import COLOURS, MUTED, add_notes, errors_of, new_figure, write_at
from hyperion.results import Row

_COMMONEST = 20
_SIDE = 32


def token_histogram(material: Material) -> Figure | None:
    """Draw two panels: the counts of the most frequent tokens, and all token counts by frequency rank with Zipf's law.

    The counts come from the samples of `text_pipeline` whose "kind" is "token". The columns "split", "token_id", "text" and
    "count" are used.
    """
    samples = material.samples("text_pipeline")
    if samples.empty:
        return None
    tokens = samples.query("kind == 'token'").sort_values("count", ascending=False, kind="stable")
    counts = tokens["count"].to_numpy(dtype=float)
    figure, (left, right) = new_figure("Tokens of the train split", _source(material, "text_pipeline"), 2)
    commonest = tokens.head(_COMMONEST)
    left.barh(range(len(commonest)), commonest["count"] / 1e3, color=COLOURS[0], height=0.72)
    left.set_yticks(range(len(commonest)), [_visible(text) for text in commonest["text"]], fontsize=8)
    left.invert_yaxis()
    left.grid(axis="y", visible=False)
    left.set(xlabel="occurrences in thousands", title=f"The {len(commonest)} commonest (␣ space, ⏎ line end)")
    ranks = np.arange(1, len(counts) + 1)
    right.plot(ranks, counts, color=COLOURS[0], label="tokens by rank")
    right.plot(ranks, counts[0] / ranks, color=MUTED, linestyle="--", linewidth=1.2, label="Zipf's law, 1 / rank")
    right.set(xscale="log", yscale="log", xlabel="rank", ylabel="occurrences", title="All by rank", ylim=(0.7, None))
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter(lambda value, _: items(value))
    right.legend()
    share = 100 * counts[:_COMMONEST].sum() / counts.sum()
    add_notes(
        figure, [f"{number(counts.sum())} tokens of {len(counts):,} kinds; the {_COMMONEST} commonest make up {share:.0f} %."]
    )
    return figure


def image_grid(material: Material) -> Figure | None:
    """Draw some images of every class, one class per column.

    The images come from the samples of `image_pipeline` whose "kind" is "image". The columns "label", "class" and "pixels" are
    used; "pixels" holds each image as a flat list of 3 x 32 x 32 levels from 0 to 255.
    """
    samples = material.samples("image_pipeline")
    if samples.empty:
        return None
    images = samples.query("kind == 'image'").sort_values(["label", "index"], kind="stable")
    columns = [group for _, group in images.groupby("label")]
    depth = max(len(group) for group in columns)
    canvas = np.full((depth * (_SIDE + 2), len(columns) * (_SIDE + 2), 3), 255, dtype=np.uint8)
    for x, group in enumerate(columns):
        for y, pixels in enumerate(group["pixels"]):
            image = np.asarray(pixels, dtype=np.uint8).reshape(3, _SIDE, _SIDE).transpose(1, 2, 0)
            top, left = y * (_SIDE + 2), x * (_SIDE + 2)
            canvas[top : top + _SIDE, left : left + _SIDE] = image
    height = 0.7 + 7.4 * canvas.shape[0] / canvas.shape[1]
    figure, (axes,) = new_figure("Images of the train split", _source(material, "image_pipeline"), height=height)
    axes.imshow(canvas, interpolation="nearest")
    axes.set_xticks([x * (_SIDE + 2) + _SIDE / 2 for x in range(len(columns))], [g["class"].iloc[0] for g in columns], fontsize=8)
    axes.tick_params(length=0, pad=4, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


def tokenizer_speed(material: Material) -> Figure | None:
    """Draw the tokens written per second by this library and by `datasets.map`. A note gives the speed-ups.

    The rows of `tokenizer_speed` with the metrics tokenizer_tokens_per_s and speedup are used, grouped by the param `processes`.
    """
    rows = measured(material.of("tokenizer_speed", metric="tokenizer_tokens_per_s"))
    if not rows:
        return None
    counts = sorted({row.params["processes"] for row in rows})
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure, (axes,) = new_figure("Text to tokens on disk", material.machine("tokenizer_speed"), height=3.6)
    width = 0.8 / len(variants)
    for place, variant in enumerate(variants):
        mine = sorted(select(rows, variant=variant), key=lambda row: row.params["processes"])
        x = [counts.index(row.params["processes"]) + (place - (len(variants) - 1) / 2) * width for row in mine]
        rates = [value / 1e6 for value in values(mine)]
        errors = errors_of(mine, 1e-6)
        axes.bar(x, rates, 0.92 * width, yerr=errors, color=COLOURS[place], label=variant, error_kw={"linewidth": 1})
        for at, row in zip(x, mine, strict=True):
            text = number(not_none(row.value) / 1e6, 3) + " M/s"
            write_at(axes, text, (at, not_none(row.ci_high) / 1e6), (0, 3), ha="center", fontsize=8)
    axes.set_xticks(range(len(counts)), [f"{count} process{'es' if count > 1 else ''}" for count in counts])
    axes.set(ylabel="million tokens/s, median with 95 % interval", ylim=(0, 1.18 * axes.get_ylim()[1]))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2, borderaxespad=0.2)
    ratios = measured(material.of("tokenizer_speed", metric="speedup"))
    speedups = [
        f"With {row.params['processes']} process{'es' * (row.params['processes'] > 1)}: {number(row.value, 3)} × as fast as "
        f"{row.params['over']} ({interval(row.value, row.ci_low, row.ci_high)})"
        for row in ratios
    ]
    cores = rows[0].params["cores"]
    add_notes(figure, [f"On {cores} cores, timed alternately, the same tokens. {'; '.join(speedups)}."])
    return figure


def loader_speed(material: Material) -> Figure | None:
    """Draw the samples per second of each loader alone, and the share of training time spent waiting for it.

    The rows of `loader_speed` with the metrics loader_samples_per_s and share are used.
    """
    rows = measured(material.of("loader_speed", metric="loader_samples_per_s"))
    if not rows:
        return None
    shares = [r for r in measured(material.of("loader_speed", metric="share")) if r.params["what"].startswith("waiting")]
    figure, (left, right) = new_figure("Loaders of text", material.machine("loader_speed"), 2, height=3.8)
    places = range(len(rows))
    errors = errors_of(rows, 1e-3)
    left.barh(places, [value / 1e3 for value in values(rows)], 0.7, xerr=errors, color=COLOURS[0], error_kw={"linewidth": 1})
    left.set_yticks(places, [_loader_name(row) for row in rows], fontsize=8)
    left.set(xlabel="thousand samples/s, median with 95 % interval", title="Alone")
    right.barh(range(len(shares)), [100 * value for value in values(shares)], 0.5, color=COLOURS[1])
    right.set_yticks(range(len(shares)), [_loader_name(row) for row in shares], fontsize=8)
    for place, row in enumerate(shares):
        percent = 100 * not_none(row.value)
        write_at(right, f"{number(percent, 2)} %", (percent, place), (4, 0), va="center", fontsize=8)
    right.set(xlabel="% of training time spent waiting", title="In a training step")
    right.set_xlim(0, max(1.0, 1.3 * right.get_xlim()[1]))
    for axes in (left, right):
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    batch, length = rows[0].params["batch"], rows[0].params["length"]
    add_notes(figure, [f"Batches of {batch} samples of {length} tokens. Padded batches have fewer tokens with a loss."])
    return figure


def _loader_name(row: Row) -> str:
    workers = row.params["workers"]
    return f"{row.variant}, {workers} thread{'s' if workers > 1 else ''}" if workers else row.variant


def _source(material: Material, experiment: str) -> str:
    """Return the name of the data set and its source, for the title of a figure."""
    rows = material.of(experiment, metric="count")
    names = sorted({row.variant for row in rows})
    sources = sorted({row.data_source for row in rows if row.data_source})
    return f"{', '.join(names)}, source {', '.join(sources)}"


def _visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("$", "\\$") or "(nothing)"


TITLES = {"text_pipeline": "Text", "tokenizer_speed": "Text to tokens", "loader_speed": "Loaders", "image_pipeline": "Images"}

PLOTS = (
    Plot("token_histogram", "text_pipeline", "Counts of the commonest tokens, and of all tokens by rank.", token_histogram),
    Plot("tokenizer_speed", "tokenizer_speed", "Tokens written per second, compared with datasets.map.", tokenizer_speed),
    Plot("loader_speed", "loader_speed", "Speed of each loader alone, and the time a step waits for it.", loader_speed),
    Plot("image_grid", "image_pipeline", "Some images of every class, as the classifier sees them.", image_grid),
)
