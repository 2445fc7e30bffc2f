"""Tokenizing a text of any length: the tokenizer's own ids, the same from any number of workers, in bounded memory."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.data import corpus_of_files, load_wikitext2, prepare_text
from hyperion.data.store.folders import MARK, DataError
from hyperion.data.text.encoding import LineEncoder, in_chunks
from hyperion.data.text.tokenizer import id_count, train_tokenizer

LINES = {"train": 600, "valid": 40, "test": 40}
WHITE = " \t\n\r\x0b\x1c\x85\u00a0\u180e\u2003\u3000\ufeff"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(load_wikitext2("synthetic", synthetic_lines=LINES), vocab_size=400)


text = st.text(st.one_of(st.sampled_from(WHITE + "\0ab'1."), st.characters(exclude_categories=["Cs"])), max_size=24)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(text, st.lists(st.sampled_from([" ", "ba", " de", "fi.", "\n", "'s", "  "])).map("".join))))
def test_words_one_by_one_give_the_ids_of_the_whole_line(tokenizer, lines):
    encoded, whole = LineEncoder(tokenizer._bpe).encode(lines), tokenizer.encode(lines)
    assert encoded.ids.tolist() == [token for ids in whole for token in ids]
    assert encoded.sizes.tolist() == [len(ids) for ids in whole] and encoded.lost == ""
    assert encoded.blank.tolist() == [not line.strip() for line in lines]
    assert encoded.words_with_eos == sum(len(line.split()) + 1 for line in lines)


def test_what_is_forgotten_is_learned_again(tokenizer, monkeypatch):
    lines = load_wikitext2("synthetic", synthetic_lines=LINES).splits["train"]
    monkeypatch.setattr("hyperion.data.text.encoding.REMEMBERED_BYTES", 2000)
    encoder = LineEncoder(tokenizer._bpe)
    parts = [encoder.encode(chunk).ids for chunk in in_chunks(lines, 500)]
    assert np.concatenate(parts).tolist() == tokenizer.encode_split(lines).tolist() and len(encoder._place) < 200


def test_text_that_does_not_come_back_is_named(tokenizer):
    lossy = tokenizers.Tokenizer.from_str(tokenizer.definition())
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    assert LineEncoder(lossy).encode(["a b\n", "a Title\n"]).lost == "a Title\n"


@pytest.mark.process
def test_the_files_are_the_same_for_any_number_of_workers(tmp_path, tokenizer, monkeypatch):
    """None and two, a chunk of a few lines each time, and blanks at the ends of chunks."""
    monkeypatch.setattr("hyperion.data.text.encoding.CHUNK_CHARACTERS", 2000)
    splits = load_wikitext2("synthetic", synthetic_lines=LINES).splits
    for split, lines in splits.items():
        (tmp_path / split).write_text("".join(line + " \n" for line in lines))
    lines = splits["train"]
    corpus = corpus_of_files("mine", {split: tmp_path / split for split in ("train", "valid", "test")})
    contents = []
    for workers in (1, 2):
        monkeypatch.setenv("HYPERION_DATA", str(tmp_path / f"data-{workers}"))
        prepared = prepare_text(corpus, tokenizer, workers=workers)
        # The mark holds the files' times of change, which differ between two preparations.
        files = [path for path in prepared.folder.rglob("*") if path.is_file() and path.name != MARK]
        contents.append({path.name: path.read_bytes() for path in files})
    assert contents[0] == contents[1] and len(contents[0]) > 6
    whole = tokenizer.encode_split([part for line in lines for part in (line, " \n")])
    np.testing.assert_array_equal(prepared.tokens["train"], whole)
    assert len(prepared.samples["train"]) == 600 and prepared.steps["train"]["read"]["lines"] == 1200
    start, size = prepared.samples["train"][7]
    assert tokenizer.decode(prepared.tokens["train"][start : start + size]) == lines[7]


def sparse_tokenizer(largest: int):
    """A tokenizer of few entries, the last of which has the id `largest`."""
    small = train_tokenizer(load_wikitext2("synthetic", synthetic_lines=LINES), vocab_size=300)
    definition = json.loads(small.definition())
    definition["model"]["vocab"][max(definition["model"]["vocab"], key=definition["model"]["vocab"].get)] = largest
    return small, tokenizers.Tokenizer.from_str(json.dumps(definition))


def test_one_id_of_70000_among_300_entries_is_stored_as_it_is(tmp_path, monkeypatch):
    """The type follows the largest id, not the number of entries: in 16 bits the id would be 4464, and decode to another text."""
    corpus = load_wikitext2("synthetic", synthetic_lines=LINES)
    small, bpe = sparse_tokenizer(70_000)
    assert bpe.get_vocab_size() == 300 and id_count(bpe) == 70_001
    sparse = replace(small, name="sparse", vocab_size=id_count(bpe), sha256="sparse", _bpe=bpe)
    prepared = prepare_text(corpus, sparse)
    assert prepared.tokens["train"].dtype == np.uint32 and prepared.tokens["train"].max() == 70_000
    for split, lines in corpus.splits.items():
        assert sparse.decode(prepared.tokens[split]) == "".join(lines)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "other"))
    with pytest.raises(DataError, match="is 70000, which uint16 cannot represent"):
        prepare_text(corpus, replace(sparse, vocab_size=300))


@pytest.mark.process
def test_a_worker_that_dies_is_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr("hyperion.data.text.encoding.sys.executable", "/bin/false")
    with pytest.raises(DataError, match="a tokenizing worker ended"), tokenizer.encoding(2) as encoding:
        list(encoding.encode([" ba\n"] * 100))


IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from hyperion.data import corpus_of_files, prepare_text, load_wikitext2
from hyperion.data.text.tokenizer import id_count, train_tokenizer

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
tokenizer = train_tokenizer(load_wikitext2("synthetic", synthetic_lines={"train": 600, "valid": 9, "test": 9}), 400)
tokenizer.encode(["warm"])
corpus = corpus_of_files("mine", {split: folder / split for split in ("train", "valid", "test")})
now = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + limit, now + limit))
try:
    held = list(corpus.splits["train"])
    print("held")
except MemoryError:
    held = None
prepared = prepare_text(corpus, tokenizer, workers=1)
print(len(prepared.tokens["train"]), prepared.steps["train"]["read"]["lines"])
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's data is Linux's")
def test_a_corpus_larger_than_memory_is_tokenized(tmp_path, tokenizer):
    """The kernel grants 8 MiB beyond what the process has at its start; the text has three times as many."""
    splits = load_wikitext2("synthetic", synthetic_lines={"train": 4000, "valid": 900, "test": 900}).splits
    lines, limit = splits["train"], 8 << 20
    copies = -(-3 * limit // len("".join(lines)))
    for split, count in (("train", copies), ("valid", 1), ("test", 1)):
        with open(tmp_path / split, "w") as file:
            for _ in range(count):
                file.writelines(splits[split])
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()[-1].split()
    assert "held" not in done.stdout, "the limit must not let the text into memory"
    assert said == [str(copies * len(tokenizer.encode_split(lines))), str(copies * 4000)]
