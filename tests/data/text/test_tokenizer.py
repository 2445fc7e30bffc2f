import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data import load_instructions, load_tokenizer, load_wikitext2, read_tokenizer
from hyperion.data.store.folders import DataError, cache_root
from hyperion.data.text.tokenizer import GPT2, HUB_FOLDER, train_tokenizer

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5)


@pytest.fixture(scope="module")
def corpus():
    return load_wikitext2("synthetic", synthetic_lines={"train": 4000, "valid": 100, "test": 100})


@pytest.fixture(scope="module")
def trained(corpus):
    return train_tokenizer(corpus)


@given(TEXTS)
def test_every_text_survives_a_trained_tokenizer(trained, texts):
    ids = trained.encode(texts)
    assert [trained.decode(one) for one in ids] == texts
    assert trained.decode(trained.encode_split(texts)) == "".join(texts)
    assert all(one.dtype == np.int32 and (one < trained.vocab_size).all() for one in ids)


def test_a_made_up_word_is_one_token_and_a_line_is_sixteen(corpus, trained):
    assert trained.source == "trained" and trained.name == f"bpe-{trained.vocab_size}-synthetic-echo"
    assert {len(ids) for ids in trained.encode([f" {word}" for word in corpus.language.words])} == {1}
    assert len(trained.encode_split(corpus.splits["valid"])) == 16 * 100


def test_the_end_of_text_is_one_id_of_the_vocabulary(trained):
    assert trained.decode([trained.eos_id]) == "<|endoftext|>"


def test_training_twice_gives_the_same_tokenizer(corpus, trained):
    assert train_tokenizer(corpus).sha256 == trained.sha256
    assert train_tokenizer(corpus, vocab_size=300).vocab_size == 300


def test_a_synthetic_corpus_gets_a_trained_one_and_says_so(corpus, capsys):
    assert load_tokenizer("auto", corpus).source == "trained"
    assert "tokenizer: source = TRAINED" in capsys.readouterr().out


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(DataError, match="no corpus to train a tokenizer on"):
        load_tokenizer("synthetic")
    with pytest.raises(DataError, match="no source has tokenizer"):
        load_tokenizer("auto")


@pytest.mark.slow
@pytest.mark.mirror
def test_gpt2_of_the_mirror(mirror, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    gpt2 = load_tokenizer("mirror")
    assert (gpt2.name, gpt2.source, gpt2.vocab_size, gpt2.eos_id) == ("gpt2", "mirror", 50257, 50256)
    assert gpt2.encode(["Hello world"])[0].tolist() == [15496, 995] and ", official (" in gpt2.detail
    valid = (mirror / "wikitext-2" / "wiki.valid.tokens").read_text()
    ids = gpt2.encode_split(valid.splitlines(keepends=True))
    assert gpt2.decode(ids) == valid
    np.testing.assert_array_equal(ids, gpt2.encode([valid])[0])  # line by line is as good as all at once


@pytest.mark.mirror
def test_gpt2_downloaded_then_from_the_cache(mirror, tmp_path, serve, monkeypatch):
    shutil.copytree(mirror / "gpt2", tmp_path / "hub" / HUB_FOLDER)
    monkeypatch.setenv("HF_ENDPOINT", serve(tmp_path / "hub"))
    one = load_tokenizer("download")
    assert one.source == "download"
    monkeypatch.setenv("HYPERION_OFFLINE", "1")
    other = load_tokenizer("auto")
    assert other.source == "cache" and other.sha256 == one.sha256 and GPT2.stage() == "present"
    (cache_root() / "gpt2" / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"merges.txt is missing"):
        load_tokenizer("auto")


@pytest.mark.slow
@pytest.mark.mirror
def test_another_tokenizer_is_not_taken_for_gpt2(mirror, tmp_path, monkeypatch, corpus):
    folder = tmp_path / "mirror" / "gpt2"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "mirror"))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((mirror / "gpt2" / name).read_bytes())
    vocabulary = json.loads((folder / "vocab.json").read_text())
    whole = (folder / "vocab.json").read_bytes()
    last = max(vocabulary.keys() - {"<|endoftext|>"}, key=vocabulary.get)
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {last: 70_000}))
    with pytest.raises(DataError, match="50257 entries with ids up to 70000"):
        load_tokenizer("auto")
    (folder / "vocab.json").write_bytes(whole)
    merges = (folder / "merges.txt").read_text().splitlines(keepends=True)
    (folder / "merges.txt").write_text("".join(merges[:1000]))
    with pytest.raises(DataError, match=r"not GPT-2's tokenizer: .*'Hello world' gives"):
        load_tokenizer("auto")
    (folder / "vocab.json").write_text("{")
    with pytest.raises(DataError, match="not a readable tokenizer"):
        load_tokenizer("auto")


@pytest.fixture
def folder(tmp_path):
    """A folder with a trained tokenizer in transformers' form."""
    trained = train_tokenizer(load_instructions("synthetic").as_corpus())
    trained._bpe.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_special_tokens_and_size_are_those_of_the_file(folder):
    found = read_tokenizer(folder, "cache")
    trained = train_tokenizer(load_instructions("synthetic").as_corpus())
    assert (found.vocab_size, found.eos_id, found.source) == (trained.vocab_size, trained.eos_id, "cache")
    assert found.bos_id == trained.encode(["a"])[0][0]
    assert found.encode(["Repeat the words."])[0].tolist() == trained.encode(["Repeat the words."])[0].tolist()


def test_a_token_added_behind_the_vocabulary_counts(folder):
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append(document["added_tokens"][0] | {"id": 900, "content": "<pad>"})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    before = len(document["model"]["vocab"])
    assert read_tokenizer(folder).vocab_size > before


def test_what_is_missing_or_broken_is_named(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="names an eos_token"):
        read_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match=r"not a valid JSON document.*(\n.*)*tokenizer_config.json"):
        read_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable tokenizer"):
        read_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="the model has no tokenizer.json"):
        read_tokenizer(folder)
