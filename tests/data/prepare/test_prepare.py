from dataclasses import replace

import numpy as np
import pytest

from hyperion.data import load_tokenizer, load_wikitext2, open_prepared, prepare_images, prepare_text
from hyperion.data.images.imageset import synthetic_images
from hyperion.data.store.folders import DataError, processed_root, write_manifest
from hyperion.data.text.tokenizer import train_tokenizer

LINES = {"train": 600, "valid": 40, "test": 40}


@pytest.fixture(scope="module")
def text():
    corpus = load_wikitext2("synthetic", synthetic_lines=LINES)
    return corpus, train_tokenizer(corpus)


def test_text_is_prepared_once_and_read_back(text):
    corpus, tokenizer = text
    one, other = prepare_text(corpus, tokenizer), prepare_text(corpus, tokenizer)
    assert (one.reused, other.reused, one.folder) == (False, True, other.folder)
    assert list(one.steps["train"]) == ["read", "filter", "tokenize", "pack", "pad"] and other.steps == one.steps
    assert one.steps["train"]["read"] == {"lines": 600, "words_with_eos": 9600}
    assert one.steps["valid"]["tokenize"]["round_trip"] is True
    assert tokenizer.decode(one.tokens["test"]) == "".join(corpus.splits["test"])
    assert one.manifest.facts["tokenizer"]["sha256"] == tokenizer.sha256 and one.tokens["train"].dtype == np.uint16
    assert [path.name for path in processed_root().iterdir()] == [one.folder.name]


def test_another_tokenizer_or_length_makes_another_product(text):
    corpus, tokenizer = text
    folders = {
        prepare_text(corpus, tokenizer).folder,
        prepare_text(corpus, tokenizer, sequence_length=64).folder,
        prepare_text(corpus, train_tokenizer(corpus, vocab_size=300)).folder,
    }
    assert len(folders) == 3


def test_damaged_text_is_named_and_not_used(text):
    prepared = prepare_text(*text)
    path = prepared.folder / "valid.npy"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"valid.npy has .* truncated or edited"):
        prepare_text(*text)


def test_tokens_of_a_wrong_vocabulary_are_found(text):
    prepared = prepare_text(*text)
    facts = {**prepared.manifest.facts, "vocab_size": 256}
    (prepared.folder / "manifest.json").unlink()
    write_manifest(prepared.folder, name="synthetic-echo", source="synthetic", detail="", facts=facts)
    with pytest.raises(DataError, match="outside a vocabulary of 256"):
        open_prepared(prepared.folder)


def test_images_are_prepared_once_and_read_back():
    images = synthetic_images({"train": 200, "test": 100})
    one, other = prepare_images(images), prepare_images(images)
    assert (one.reused, other.reused) == (False, True)
    assert list(one.steps["train"]) == ["read", "verify", "classes", "channels", "augment"]
    assert one.steps["test"]["classes"] == dict.fromkeys(images.classes, 10)
    np.testing.assert_array_equal(one.arrays["test_images"], images.test_images)
    np.testing.assert_array_equal(one.arrays["train_labels"], images.train_labels)


def test_a_nan_image_is_found():
    prepared = prepare_images(synthetic_images({"train": 20, "test": 10}))
    images = np.array(prepared.arrays["test_images"], dtype=np.float32)
    images[7, 0, 0, 0] = np.nan
    np.save(prepared.folder / "test_images.npy", images)
    (prepared.folder / "manifest.json").unlink()
    write_manifest(prepared.folder, name="n", source="synthetic", detail="", facts=prepared.manifest.facts)
    with pytest.raises(DataError, match="image 7 holds NaN") as caught:
        open_prepared(prepared.folder)
    assert "test_images.npy" in str(caught.value)


@pytest.mark.parametrize("lines", [0, 1])
def test_lines_of_train_in_valid_are_refused(text, lines):
    corpus, tokenizer = text
    splits = corpus.splits | {"valid": [*corpus.splits["train"][:lines], *corpus.splits["valid"][lines:]]}
    leaked = replace(corpus, splits=splits)
    if not lines:
        assert prepare_text(leaked, tokenizer).manifest.facts["overlap"]["valid"] == {"records": 40, "repeated": 0, "first": None}
        return
    with pytest.raises(DataError, match=r"1 of 40 long lines of the valid split \(2.50%\) also occur in another split"):
        prepare_text(leaked, tokenizer)
    assert not list(processed_root().iterdir())


def test_test_images_among_the_train_images_are_refused():
    images = synthetic_images({"train": 200, "test": 100})
    images.test_images[3] = images.train_images[77]
    with pytest.raises(DataError, match=r"1 of 100 images of the test split .* the first is number 3"):
        prepare_images(images)


def test_a_product_of_an_unknown_kind_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    write_manifest(tmp_path, name="n", source="cache", detail="", facts={"kind": "sound"})
    with pytest.raises(DataError, match="unknown kind of data 'sound'"):
        open_prepared(tmp_path)


@pytest.mark.slow
@pytest.mark.mirror
def test_the_real_pipeline_gives_the_known_counts(mirror, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    corpus = load_wikitext2()
    prepared = prepare_text(corpus, load_tokenizer("auto", corpus))
    counts = {
        split: (steps["read"]["lines"], steps["filter"]["non_empty"], steps["tokenize"]["tokens"])
        for split, steps in prepared.steps.items()
    }
    assert counts == {
        "train": (36718, 23767, 2448382),
        "valid": (3760, 2461, 258659),
        "test": (4358, 2891, len(prepared.tokens["test"])),
    }
    assert prepared.manifest.facts["overlap"] == {
        "valid": {"records": 1746, "repeated": 0, "first": None},
        "test": {"records": 1995, "repeated": 0, "first": None},
    }
    padded = prepared.steps["train"]["pad"]
    assert padded["samples"] == 23767 and padded["tokens"] + padded["padding"] == 23767 * 128
    assert 0.40 < padded["padding_share"] < 0.46
