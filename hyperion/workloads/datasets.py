"""The two data sets of the book as an experiment gets them: prepared on disk, from the source its context asks for."""

from hyperion.chapter.context import Context
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
from hyperion.data.store.overlap import TOLERANCE, Overlap
from hyperion.results import Row

# What `text` and `images` load, by the names of `hyperion.data.prepare.catalog`.
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


def proof_rows(context: Context, loaded: TextCorpus | ImageSet, prepared: PreparedText | PreparedImages) -> list[Row]:
    """What is known of the data beyond their counts: files that are the publisher's, and records that splits share.

    The share of official files is null for synthetic data, which have no publisher. A row of overlap fails its check if more
    records than `hyperion.data.store.overlap` allows stand in another split.
    """
    checksums = loaded.checksums
    params = {"what": "files with the publisher's checksum"}
    if checksums is None:
        reason = f"{loaded.source} data have no publisher's checksums"
        columns = {"value": None, "value_reason": reason}
    else:
        columns = {"value": checksums.matching / checksums.files}
        params |= {"files": checksums.files, "official": checksums.official}
    rows = [context.row(loaded.name, "share", params=params, data_source=loaded.source, **columns)]
    for split, counts in prepared.manifest.facts["overlap"].items():
        overlap = Overlap(**counts)
        rows.append(
            context.row(
                loaded.name,
                "share",
                overlap.share,
                data_source=loaded.source,
                params={"split": split, "what": "records that stand in another split", "records": overlap.records},
                check="share of records that stand in another split",
                check_error=overlap.share,
                check_tolerance=TOLERANCE,
            )
        )
    return rows


def vocabulary_row(context: Context) -> Row | None:
    """The row in which this run's `text_pipeline` counted the vocabulary, None when it has not run."""
    counted = (r for r in context.upstream if r.experiment == "text_pipeline" and r.params.get("what") == "vocabulary")
    return next(counted, None)
