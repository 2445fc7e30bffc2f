"""Figures of the data chapter: how often tokens occur, and what the images look like."""

import numpy as np
from matplotlib.figure import Figure

from hyperion.book.formats import items, number
from hyperion.book.material import Material
from hyperion.book.style import COLOURS, MUTED, add_notes, new_figure

_COMMONEST = 20
_SIDE = 32


def token_histogram(material: Material) -> Figure | None:
    """Counts of the commonest tokens, and of all of them by rank beside Zipf's law.

    Reads the samples of `text_pipeline` with kind "token": columns split, token_id, text, count.
    """
    samples = material.samples("text_pipeline")
    if samples.empty:
        return None
    tokens = samples[samples["kind"] == "token"].sort_values("count", ascending=False, kind="stable")
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
        figure,
        [f"{number(counts.sum())} tokens of {len(counts):,} kinds; the {_COMMONEST} commonest make up {share:.0f} %."],
    )
    return figure


def image_grid(material: Material) -> Figure | None:
    """Images of every class, one class a column.

    Reads the samples of `image_pipeline` with kind "image": columns label, class, pixels (3 x 32 x 32 levels in a row).
    """
    samples = material.samples("image_pipeline")
    if samples.empty:
        return None
    images = samples[samples["kind"] == "image"].sort_values(["label", "index"], kind="stable")
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
    axes.set_xticks(
        [x * (_SIDE + 2) + _SIDE / 2 for x in range(len(columns))], [g["class"].iloc[0] for g in columns], fontsize=8
    )
    axes.tick_params(length=0, pad=4, top=True, bottom=False, labeltop=True, labelbottom=False)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


def _source(material: Material, experiment: str) -> str:
    """The data set and where it came from: what a title of this chapter must say in place of a device."""
    rows = material.of(experiment, metric="count")
    names = sorted({row.variant for row in rows})
    sources = sorted({row.data_source for row in rows if row.data_source})
    return f"{', '.join(names)}, source {', '.join(sources)}"


def _visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("$", "\\$") or "(nothing)"
