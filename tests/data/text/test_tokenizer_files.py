"""The tokenizer in a model's folder: read with its special tokens, or refused."""

import json

import pytest

from hyperion.data import DataError, load_instructions, read_tokenizer
from hyperion.data.text.tokenizer import train_tokenizer


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
    with pytest.raises(DataError, match=r"not a JSON document.*(\n.*)*tokenizer_config.json"):
        read_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable tokenizer"):
        read_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="the model has no tokenizer.json"):
        read_tokenizer(folder)
