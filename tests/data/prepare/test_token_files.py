"""A corpus as Megatron's token files: documents and sequences, splits, bad input, existing files, and damaged files."""

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hyperion.data.prepare import token_files
from hyperion.data.prepare.token_files import articles, check_token_files, split_of, write_corpus_tokens, write_jsonl_tokens
from hyperion.data.store.folders import DataError
from hyperion.data.text.corpus import TextCorpus
from hyperion.data.text.indexed_tokens import read_index
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.errors import HyperionError

ARTICLE = [" \n", " = Gold = \n", " \n", " gold is a metal . \n", " = = Use = = \n", " \n", " = Wins = \n", " coins \n", " \n"]
CORPUS = TextCorpus("toy", "files", "", {"train": 3 * ARTICLE, "valid": ARTICLE, "test": [" no title \n"]})
TEXTS = [f"document {number}\nwith two lines" for number in range(60)]
HELD_OUT = (33, 36)  # by their hashes


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(CORPUS, vocab_size=300)


def texts_of(prefix: Path, split: str, tokenizer) -> list[list[str]]:
    """Return the decoded sequences of each document."""
    index, tokens = read_index(Path(f"{prefix}_{split}.idx")), np.fromfile(f"{prefix}_{split}.bin", np.uint16)
    sequences = [tokenizer.decode(part) for part in np.split(tokens, np.cumsum(index.lengths)[:-1])]
    return [sequences[first:last] for first, last in pairwise(index.documents)]


def jsonl(path: Path, texts: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def test_an_article_is_a_document_and_a_line_that_is_not_empty_a_sequence(tmp_path, tokenizer):
    made = write_corpus_tokens(tmp_path / "new" / "toy", CORPUS, tokenizer)
    lines = [line for line in ARTICLE if line.strip()]
    document = [*lines[:-1], lines[-1] + "<|endoftext|>"]
    assert texts_of(tmp_path / "new" / "toy", "train", tokenizer) == 3 * [document]
    assert texts_of(tmp_path / "new" / "toy", "validation", tokenizer) == [document]
    assert texts_of(tmp_path / "new" / "toy", "test", tokenizer) == [[" no title \n<|endoftext|>"]]
    assert (made.splits["train"].documents, made.splits["train"].sequences, made.dtype) == (3, 15, "uint16")
    assert check_token_files(tmp_path / "new" / "toy") == made


def test_a_legend_of_a_table_is_no_title():
    assert [len(article) for article in articles(2 * ARTICLE)] == [5, 5]
    assert articles([" = A = \n", " \n", " = B = \n", " \n"]) == [[" = A = \n"], [" = B = \n"]] and articles([" \n"]) == []


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path, tokenizer):
    for name in ("one", "other/two"):
        write_corpus_tokens(tmp_path / name, CORPUS, tokenizer)
    contents = [(tmp_path / f"{name}.json").read_bytes() for name in ("one", "other/two")]
    assert contents[0] == contents[1] and b"tmp" not in contents[0]


def test_the_hash_of_a_text_decides_its_split(tmp_path, tokenizer):
    write_jsonl_tokens(tmp_path / "a", jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer)
    held_out = [text for text in TEXTS if split_of(text) == "test"]
    assert held_out == [TEXTS[number] for number in HELD_OUT]  # on every machine, and in every process
    for split, texts in (("test", held_out), ("train", [text for text in TEXTS if text not in held_out])):
        assert texts_of(tmp_path / "a", split, tokenizer) == [[f"{text}<|endoftext|>"] for text in texts]
    packed = write_jsonl_tokens(tmp_path / "b", jsonl(tmp_path / "b.json.gz", TEXTS), tokenizer)
    assert packed.splits == check_token_files(tmp_path / "a").splits
    more = next(text for text in ("more", "much more", "still more") if split_of(text) == "train")
    # Other documents in the file, and another order, change the split of no document.
    write_jsonl_tokens(tmp_path / "c", jsonl(tmp_path / "c.jsonl", [*TEXTS[::-1], *TEXTS, more]), tokenizer)
    assert texts_of(tmp_path / "c", "test", tokenizer) == [[f"{text}<|endoftext|>"] for text in [*held_out[::-1], *held_out]]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"", "not a valid JSON document"),
        (b'{"text": "cut', "not a valid JSON document"),
        (b'{"text": "\xff"}', "not a valid JSON document"),
        (b'["text"]', 'the line has no "text"'),
        (b'{"texts": "x"}', 'the line has no "text"'),
        (b'{"text": 3}', 'the line has no "text"'),
        (b'{"text": ""}', 'the line has no "text"'),
        (b'{"text": "' + b"x" * 300 + b'"}', "the line has more than 0 MiB"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_nothing_is_written(tmp_path, tokenizer, monkeypatch, line, what):
    monkeypatch.setattr(token_files, "LINE_BYTES", 200)
    path = jsonl(tmp_path / "a.jsonl", TEXTS[:2])
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with pytest.raises(DataError, match=what) as caught:
        write_jsonl_tokens(tmp_path / "out" / "a", path, tokenizer)
    assert str(caught.value.where) == f"{path}, line 3" and caught.value.next_step
    assert list((tmp_path / "out").iterdir()) == []


def test_the_end_of_text_inside_a_document_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match="document 2 contains the end-of-text token"):
        write_jsonl_tokens(tmp_path / "a", jsonl(tmp_path / "a.jsonl", ["one", "two <|endoftext|> three"]), tokenizer)


def test_a_file_that_cannot_be_read_or_has_no_test_document_is_named(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"cannot read absent\.jsonl: No such file"):
        write_jsonl_tokens(tmp_path / "a", tmp_path / "absent.jsonl", tokenizer)
    path = jsonl(tmp_path / "a.jsonl.gz", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot read a\.jsonl\.gz after line \d+: Compressed file ended"):
        write_jsonl_tokens(tmp_path / "a", path, tokenizer)
    path.write_bytes(path.read_bytes()[:20] + 20 * b"\xff" + path.read_bytes()[40:])
    with pytest.raises(DataError, match=r"cannot read a\.jsonl\.gz after line 0: Error -3 while decompressing"):
        write_jsonl_tokens(tmp_path / "a", path, tokenizer)
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"cannot read a\.jsonl\.gz after line 0: Not a gzipped file"):
        write_jsonl_tokens(tmp_path / "a", path, tokenizer)
    train = [text for text in TEXTS if split_of(text) == "train"]
    with pytest.raises(DataError, match=r"no document of b\.jsonl is in the split test"):
        write_jsonl_tokens(tmp_path / "a", jsonl(tmp_path / "b.jsonl", train), tokenizer)


def test_an_existing_file_is_never_written_over(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a_test.idx").write_text("mine")
    with pytest.raises(DataError, match=r"a_test\.idx exists"):
        write_corpus_tokens(tmp_path / "a", CORPUS, tokenizer)
    # A file that another process writes meanwhile: the files that already have their names lose them.
    encode = token_files._encode

    def slow(*arguments):
        encode(*arguments)
        (tmp_path / "b_test.idx").write_text("theirs")

    monkeypatch.setattr(token_files, "_encode", slow)
    with pytest.raises(DataError, match="cannot write token files: File exists"):
        write_corpus_tokens(tmp_path / "b", CORPUS, tokenizer)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a_test.idx": "mine", "b_test.idx": "theirs"}


def test_files_that_the_disk_changed_get_no_name(tmp_path, tokenizer, monkeypatch):
    encode = token_files._encode

    def damaged(documents, writers, *arguments):
        encode(documents, writers, *arguments)
        writers["test"]._tokens.flush()
        os.truncate(writers["test"]._tokens.name, 2)
        os.truncate(writers["test"]._tokens.name, writers["test"]._tokens.tell())

    monkeypatch.setattr(token_files, "_encode", damaged)
    with pytest.raises(DataError, match="the files of the split test differ from what was written"):
        write_corpus_tokens(tmp_path / "a", CORPUS, tokenizer)
    assert list(tmp_path.iterdir()) == []


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def state_another_count(path: Path) -> None:
    path.write_text(path.read_text().replace('"documents": 3', '"documents": 4'))


def use_the_index_of_another_corpus(path: Path) -> None:
    # The same number of tokens in other sequences: only the hash of the index shows it.
    index = read_index(path)
    lengths = index.lengths.copy()
    lengths[:2] = lengths[0] - 1, lengths[1] + 1
    starts = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    path.write_bytes(path.read_bytes()[:34] + lengths.tobytes() + starts.tobytes() + index.documents.tobytes())


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("a_train.bin", change_a_byte, r"a_train\.bin was changed: sha256 of train"),
        ("a_train.idx", use_the_index_of_another_corpus, r"a_train\.idx was changed: index_sha256 of train"),
        ("a_validation.idx", change_a_byte, "the documents do not divide"),
        ("a_test.bin", Path.unlink, r"a_test\.bin is missing"),
        ("a_test.idx", Path.unlink, r"cannot read a_test\.idx"),
        ("a.json", state_another_count, r"a\.json was changed: documents of train is 3, but a\.json states 4"),
        ("a.json", Path.unlink, r"cannot read the fingerprint a\.json"),
        ("a.json", lambda path: path.write_text("{}"), r"missing field a\.json\.data"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, tokenizer, name, damage, what):
    write_corpus_tokens(tmp_path / "a", CORPUS, tokenizer)
    damage(tmp_path / name)
    with pytest.raises(HyperionError, match=what) as caught:
        check_token_files(tmp_path / "a")
    assert name in str(caught.value) and caught.value.next_step
