"""The two data sets of the book as an experiment gets them: prepared on disk, from the source its context asks for."""

from hyperion.data import (
    ImageSet,
    PreparedImages,
    PreparedText,
    TextCorpus,
    Tokenizer,
    load_cifar10,
    load_tokenizer,
    load_wikitext2,
    prepare_images,
    prepare_text,
)
from hyperion.experiments.context import Context
from hyperion.results import Row

# What `text` and `images` load, by the names of `hyperion.data.identity`.
TEXT, IMAGES = ("wikitext-2", "gpt2"), ("cifar-10",)


def text(context: Context) -> tuple[TextCorpus, Tokenizer, PreparedText]:
    """WikiText-2 or the synthetic corpus, its tokenizer, and the token streams that `prepare_text` keeps on disk."""
    corpus = load_wikitext2(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_lines=context.synthetic["lines"],
        seed=context.seed,
    )
    # The tokenizer comes from where the corpus came from; `auto` lets a made-up corpus train one of its own.
    tokenizer = load_tokenizer("auto" if corpus.source == "synthetic" else context.data_source, corpus)
    return corpus, tokenizer, prepare_text(corpus, tokenizer)


def images(context: Context) -> tuple[ImageSet, PreparedImages]:
    """CIFAR-10 or the synthetic images, and the arrays that `prepare_images` keeps on disk."""
    image_set = load_cifar10(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_counts=context.synthetic["images"],
        seed=context.seed,
    )
    return image_set, prepare_images(image_set)


def vocabulary_row(context: Context) -> Row | None:
    """The row in which this run's `text_pipeline` counted the vocabulary, None when it has not run."""
    counted = (r for r in context.upstream if r.experiment == "text_pipeline" and r.params.get("what") == "vocabulary")
    return next(counted, None)
