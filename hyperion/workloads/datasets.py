"""Load the book's text and image data sets from an experiment's data source, and prepare them on disk."""

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
from hyperion.data.store.overlap import TOLERANCE, SplitOverlap
from hyperion.results import Row

# Names of the data sets that `text` and `images` load, as in `hyperion.data.prepare.catalog`.
TEXT, IMAGES = ("wikitext-2", "gpt2"), ("cifar-10",)


def text(context: Context) -> tuple[TextCorpus, Tokenizer, PreparedText]:
    """Return (corpus, tokenizer, token streams on disk) for WikiText-2 or the synthetic corpus."""
    corpus = load_wikitext2(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_lines=context.synthetic["lines"],
        seed=context.seed,
    )
    # The tokenizer comes from the same source as the corpus. For a synthetic corpus, "auto" trains a tokenizer.
    tokenizer = load_tokenizer("auto" if corpus.source == "synthetic" else context.data_source, corpus)
    return corpus, tokenizer, prepare_text(corpus, tokenizer)


def images(context: Context) -> tuple[ImageSet, PreparedImages]:
    """Return (images, their arrays on disk) for CIFAR-10 or the synthetic images."""
    image_set = load_cifar10(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_counts=context.synthetic["images"],
        seed=context.seed,
    )
    return image_set, prepare_images(image_set)


def proof_rows(context: Context, loaded: TextCorpus | ImageSet, prepared: PreparedText | PreparedImages) -> list[Row]:
    """Return result rows that show whether the data are the publisher's and whether their splits overlap.

    The value of the first row is the share of files that have the publisher's checksum. Synthetic data have no publisher, so
    their row has no value. Each split has one more row, with the share of its records that another split also contains. The check
    of this row fails if the share exceeds the tolerance of `hyperion.data.store.overlap`.
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
        overlap = SplitOverlap(**counts)
        rows.append(
            context.error_row(
                loaded.name,
                "share",
                overlap.share,
                "share of records that stand in another split",
                TOLERANCE,
                data_source=loaded.source,
                params={"split": split, "what": "records that stand in another split", "records": overlap.records},
            )
        )
    return rows


def vocabulary_row(context: Context) -> Row | None:
    """Return the row with the vocabulary size measured by the experiment `text_pipeline`, or None if it has not run."""
    counted = (r for r in context.upstream if r.experiment == "text_pipeline" and r.params.get("what") == "vocabulary")
    return next(counted, None)
