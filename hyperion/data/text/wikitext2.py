"""Load WikiText-2 (word level, with <unk>) from a mirror, the cache or the Hugging Face hub, and verify its counts.

Source: Merity et al., Pointer Sentinel Mixture Models, arXiv:1609.07843; hub data set Salesforce/wikitext,
wikitext-2-v1.
"""

from pathlib import Path

from hyperion.data.store.folders import DataError, DataUnavailable, read_manifest, staged, write_manifest
from hyperion.data.store.overlap import line_overlap, require_little_overlap
from hyperion.data.store.sources import Checksums, PublishedSet, compare_checksums, download, hub_endpoint, require_network, take
from hyperion.data.text.corpus import (
    LINES_LIKE_WIKITEXT2,
    SPLITS,
    EchoLanguage,
    TextCorpus,
    count_non_empty,
    count_words_with_eos,
    read_lines,
    require_counts,
)

FOLDER = "wikitext-2"
UNITS = ("lines", "non-empty lines", "words with one <eos> per line")
COUNTS = {"train": (36718, 23767, 2088628), "valid": (3760, 2461, 217646), "test": (4358, 2891, 245569)}
# Hashes of the files in wikitext-2-v1.zip, from the loaders of MXNet and GluonNLP.
SHA1 = {
    "train": "863f29c46ef9d167fff4940ec821195882fe29d1",
    "valid": "0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422",
    "test": "c7b8ce0aa086fb34dab808c5c49224211eb2b172",
}
HUB_FILES = {
    "train": "train-00000-of-00001.parquet",
    "valid": "validation-00000-of-00001.parquet",
    "test": "test-00000-of-00001.parquet",
}
HUB_FOLDER = "datasets/Salesforce/wikitext/resolve/main/wikitext-2-v1"
TABLE_BYTES = 1 << 26  # maximum size of the text of a split; the train split has 10.8 MB
EMPTY_LINE = " \n"  # an empty line in the original files; the hub's table has "" instead of it


def load_wikitext2(
    source: str = "auto", *, allow_synthetic: bool = True, synthetic_lines: dict[str, int] = LINES_LIKE_WIKITEXT2, seed: int = 0
) -> TextCorpus:
    """Load WikiText-2, or the synthetic corpus if it is requested or allowed as a fallback.

    Args:
        source: 'auto', 'mirror', 'cache', 'download' or 'synthetic'.
        allow_synthetic: if True, 'auto' uses the synthetic corpus if no other source has WikiText-2.
        synthetic_lines, seed: number of lines per split, and seed, of the synthetic corpus; not used for WikiText-2.

    Raises:
        DataError: a file is missing, is not UTF-8 or has wrong counts; long lines of one split also occur in another split; or
            no source has the data. If a file is not UTF-8, the error names the line and the byte offset.
    """
    suppliers = {**WIKITEXT2.suppliers(), "synthetic": lambda: synthetic_corpus(synthetic_lines, seed)}
    return take("wikitext-2", source, suppliers, allow_synthetic)


def synthetic_corpus(lines: dict[str, int] = LINES_LIKE_WIKITEXT2, seed: int = 0) -> TextCorpus:
    """Return synthetic text of known entropy (see `synthetic_text`), named 'synthetic-echo'."""
    language = EchoLanguage()
    splits = {split: language.sample(lines[split], seed=(seed, index)) for index, split in enumerate(SPLITS)}
    detail = (
        f"made-up text, seed {seed}, {sum(lines.values())} lines, "
        f"entropy rate {language.entropy_rate_nats_per_word():.4f} nats per word"
    )
    return TextCorpus("synthetic-echo", "synthetic", detail, splits, language)


def checksums(folder: Path) -> Checksums:
    """Compare the three files in `folder` with the published hashes."""
    note = "counts and overlap of the splits are checked"
    return compare_checksums({folder / _file(split): expected for split, expected in SHA1.items()}, "sha1", note)


def _file(split: str) -> str:
    return f"wiki.{split}.tokens"


def _read(folder: Path, source: str, label: str) -> TextCorpus:
    if not folder.is_dir():
        raise DataUnavailable(
            f"{label} has no {FOLDER}/", where=folder, next_step="put wiki.{train,valid,test}.tokens there, or run `make fetch`"
        )
    # Files in a mirror have no manifest, because the user put them there. So the checks of counts and checksums below are the
    # only ones.
    manifest = read_manifest(folder)
    if manifest is not None:
        manifest.verify(folder)
    splits = {}
    for split in SPLITS:
        path = folder / _file(split)
        if path.is_file() and path.stat().st_size > TABLE_BYTES:
            fault = f"{path.name} has {path.stat().st_size} bytes, expected at most {TABLE_BYTES}"
            raise DataError(fault, where=path, next_step="this file is not from WikiText-2: copy the original file again")
        splits[split] = lines = read_lines(path)
        found = (len(lines), count_non_empty(lines), count_words_with_eos(lines))
        require_counts(path.name, found, COUNTS[split], UNITS, path)
    require_little_overlap(line_overlap(splits), "long lines", folder)
    corpus, found = TextCorpus(FOLDER, source, "", splits), checksums(folder)
    origin = f", {manifest.detail}" if manifest is not None else ""
    detail = f"word-level files{origin}, {found}, counts verified, sha256 {corpus.sha256[:12]}"
    return TextCorpus(FOLDER, source, detail, splits, checksums=found)


def _fetch(target: Path) -> None:
    require_network(hub_endpoint())
    with staged(target) as work:
        for split in SPLITS:
            parquet = work / HUB_FILES[split]
            download(f"{hub_endpoint()}/{HUB_FOLDER}/{parquet.name}", parquet)
            lines = _lines_of_table(parquet, COUNTS[split][0])
            found = (len(lines), count_non_empty(lines), count_words_with_eos(lines))
            require_counts(parquet.name, found, COUNTS[split], UNITS, f"{hub_endpoint()}/{HUB_FOLDER}")
            # Line endings are not translated, because the hashes and counts refer to Unix line endings.
            (work / _file(split)).write_text("".join(lines), encoding="utf-8", newline="\n")
            # Remove the table first, because the manifest lists all files in the folder.
            parquet.unlink()
        write_manifest(work, name=FOLDER, source="download", detail="downloaded from the hub's Salesforce/wikitext")


WIKITEXT2 = PublishedSet(FOLDER, _read, lambda folder: [folder / _file(split) for split in SPLITS], _fetch)


def _lines_of_table(path: Path, expected: int) -> list[str]:
    """Return the lines of a Parquet table with `expected` rows.

    The size that the file declares is checked before the file is decompressed, because a small file can decompress to any size.
    """
    import pyarrow
    import pyarrow.compute as compute
    import pyarrow.parquet

    rows: list[str] = []
    read = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            declared = sum(table.metadata.row_group(n).total_byte_size for n in range(table.metadata.num_row_groups))
            require_counts(path.name, [table.metadata.num_rows], [expected], UNITS[:1], path)
            # The declared size may be wrong, so the size of the decoded text is limited as well.
            for part in table.iter_batches(1024, columns=["text"]) if declared <= TABLE_BYTES else ():
                # Type checkers do not know pyarrow's compute functions, because pyarrow generates them at import.
                lengths = compute.call_function("binary_length", [part.column(0)])
                read += compute.call_function("sum", [lengths]).as_py() or 0
                if read > TABLE_BYTES:
                    break
                rows += part.column(0).to_pylist()
    except (pyarrow.ArrowException, OSError, KeyError, IndexError) as error:
        raise DataError(f"{path.name} is not a readable Parquet table: {error}", where=path, next_step="try again") from error
    if max(declared, read) > TABLE_BYTES or not all(isinstance(row, str) for row in rows):
        fault = (
            f"{path.name} declares {declared} bytes, or has more than {TABLE_BYTES} bytes of text, or values that are not text"
        )
        raise DataError(fault, where=path, next_step="try again")
    return [row if row.endswith("\n") else row + "\n" if row else EMPTY_LINE for row in rows]
