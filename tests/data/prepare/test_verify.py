"""Every way in which data files break, done to real files: found, named by file and record, and moved aside."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from hyperion import cli
from hyperion.data import load_instructions, load_wikitext2, prepare_images, prepare_text
from hyperion.data.images.imageset import synthetic_images
from hyperion.data.prepare.verify import REASON_FILE, DataFinding, quarantine, verify
from hyperion.data.store.folders import QUARANTINE, DataError, cache_root, processed_root, read_manifest, write_manifest
from hyperion.data.text.instructions import FILE
from hyperion.data.text.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """A prepared text and prepared images; tests break copies of them."""
    root = tmp_path_factory.mktemp("products")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(root))
        corpus = load_wikitext2("synthetic", synthetic_lines={"train": 600, "valid": 40, "test": 40})
        text = prepare_text(corpus, train_tokenizer(corpus))
        images = prepare_images(synthetic_images({"train": 60, "test": 60}))
    return {"text": text.folder, "images": images.folder}


@pytest.fixture
def copies(products):
    """The products in this test's own data folder, by kind."""
    return {kind: shutil.copytree(folder, processed_root() / folder.name) for kind, folder in products.items()}


def flip_bit(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def edit(path: Path, change) -> None:
    """Change an array and give the folder a manifest of what it holds now, as a careless tool would."""
    array = np.load(path)
    array = change(array)
    np.save(path, array)
    renewed(path.parent)


def renewed(folder: Path) -> None:
    facts = read_manifest(folder).facts
    (folder / "manifest.json").unlink()
    write_manifest(folder, name="n", source="synthetic", detail="", facts=facts)


def with_nan(images):
    images = images.astype(np.float32)
    images[7, 1, 2, 3] = np.nan
    return images


def with_label_10(labels):
    labels[11] = 10
    return labels


def cut(path: Path, bytes_lost: int) -> None:
    path.write_bytes(path.read_bytes()[:-bytes_lost])


def other_vocabulary(folder: Path) -> None:
    """Ids that fit the vocabulary, made by another tokenizer of its size."""
    edit(folder / "valid.npy", lambda tokens: (tokens + 1) % 500)


HEADER = 128
FAULTS = {
    "bit of an image": (
        "images",
        lambda f: flip_bit(f / "train_images.npy", HEADER + 3072 * 17 + 5),
        "train_images.npy",
        "damaged: record 17",
    ),
    "bit of a token": (
        "text",
        lambda f: flip_bit(f / "train.npy", HEADER + 2 * 3000),
        "train.npy",
        "damaged: records 2048 to 3071",
    ),
    "truncation": ("text", lambda f: cut(f / "train.npy", 8), "train.npy", "records 9596 to 9599 are missing"),
    "missing shard": ("text", lambda f: (f / "valid.npy").unlink(), "valid.npy", "is missing"),
    "wrong vocabulary, out of range": (
        "text",
        lambda f: edit(f / "test.npy", lambda t: t + 600),
        "test.npy",
        "token 0 has the id",
    ),
    "wrong vocabulary, in range": ("text", other_vocabulary, "valid.npy", "the tokens belong to another vocabulary"),
    "tokenizer of another text": ("text", lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json", "edited"),
    "NaN image": ("images", lambda f: edit(f / "test_images.npy", with_nan), "test_images.npy", "image 7 holds NaN"),
    "wrong label range": (
        "images",
        lambda f: edit(f / "train_labels.npy", with_label_10),
        "train_labels.npy",
        "record 11 has the label 10, outside 0 .. 9",
    ),
    "swapped splits": (
        "images",
        lambda f: swap(f / "train_images.npy", f / "test_images.npy"),
        "train_images.npy",
        "the files of the splits were swapped",
    ),
    "swapped splits of one size, manifest renewed": (
        "text",
        lambda f: (swap(f / "valid.npy", f / "test.npy"), renewed(f)),
        "valid.npy",
        "the file of another split",
    ),
    "swapped images, manifest renewed": (
        "images",
        lambda f: (swap(f / "train_images.npy", f / "test_images.npy"), renewed(f)),
        "test_images.npy",
        "the file of another split",
    ),
    "lines that reach beyond the text": (
        "text",
        lambda f: edit(f / "train_samples.npy", lambda s: s + 17),
        "train_samples.npy",
        "lies outside the 9600 tokens of its split",
    ),
    "a file too many": (
        "images",
        lambda f: (f / "extra.npy").write_bytes(b""),
        "extra.npy",
        "the manifest does not list this file",
    ),
    "cut manifest": ("text", lambda f: cut(f / "manifest.json", 40), "manifest.json", "unreadable manifest"),
    "no manifest": ("images", lambda f: (f / "manifest.json").unlink(), "manifest.json", "the manifest is missing"),
}


def command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hyperion", "data", "verify", *arguments])
    return cli.main()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_corruption_is_found_named_and_moved_aside(fault, copies, monkeypatch, capsys):
    kind, inject, file, words = FAULTS[fault]
    inject(copies[kind])
    assert command(monkeypatch) == 1
    said = capsys.readouterr().out
    assert any(line.strip().startswith(f"{file}: ") and words in line for line in said.splitlines()), said
    assert "next:  run `make reproduce ONLY=01_dataset_preparation`" in said and "2 data sets, 1 damaged" in said
    kept = list((processed_root() / QUARANTINE).iterdir())
    assert len(kept) == 1 and not copies[kind].exists(), "moved aside, and nothing else"
    reasons = json.loads((kept[0] / REASON_FILE).read_text())
    assert reasons["was"] == copies[kind].name and any(words in finding["fault"] for finding in reasons["findings"])
    assert command(monkeypatch) == 0, "what is left is sound, and the quarantine is not examined again"


def test_hidden_files_of_a_file_browser_damage_nothing(copies, monkeypatch):
    (copies["images"] / ".DS_Store").write_bytes(b"\0")
    assert command(monkeypatch) == 0 and copies["images"].exists()
    (copies["images"] / ".hidden").symlink_to("/etc")
    assert command(monkeypatch) == 1


def test_all_faults_of_a_folder_are_told_at_once(copies, monkeypatch, capsys):
    folder = copies["images"]
    flip_bit(folder / "train_images.npy", HEADER)
    flip_bit(folder / "train_images.npy", HEADER + 3072 * 59)
    cut(folder / "test_labels.npy", 1)
    assert command(monkeypatch, str(folder)) == 1
    said = capsys.readouterr().out
    assert "damaged: record 0, record 59" in said and "test_labels.npy: " in said


def test_sound_data_stay_where_they_are(copies, monkeypatch, capsys):
    assert command(monkeypatch) == 0 and command(monkeypatch, str(copies["text"])) == 0
    assert command(monkeypatch, str(processed_root())) == 0
    assert "        synthetic: made-up text, seed 0" in capsys.readouterr().out and command(monkeypatch) == 0
    assert all(folder.is_dir() for folder in copies.values()) and "0 damaged" in capsys.readouterr().out


def test_a_product_of_another_version_is_not_called_damaged(copies, monkeypatch, capsys):
    manifest = copies["images"] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 2'))
    assert command(monkeypatch) == 0 and copies["images"].is_dir()
    assert "another version of Hyperion wrote this folder" in capsys.readouterr().out


def test_a_prepared_set_that_was_damaged_is_made_again(monkeypatch, capsys):
    images = synthetic_images({"train": 20, "test": 10})
    folder = prepare_images(images).folder
    flip_bit(folder / "test_images.npy", HEADER + 1)
    with pytest.raises(DataError, match="edited"):
        prepare_images(images)
    assert command(monkeypatch) == 1
    assert prepare_images(images).folder == folder and command(monkeypatch) == 0


def test_staged_sets_are_verified_too(monkeypatch, capsys):
    rows = [{"instruction": "say", "input": "", "output": f"word {i}"} for i in range(1100)]
    folder = cache_root() / "instructions"
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps(rows))
    write_manifest(folder, name="instructions", source="mirror", detail="")
    assert load_instructions("cache").source == "cache" and command(monkeypatch) == 0
    assert "not official (0 of 1 files have the published sha256" in capsys.readouterr().out
    assert command(monkeypatch, str(folder)) == 0 and folder.is_dir()
    flip_bit(folder / FILE, 40)
    (verdict,) = verify(folder)
    assert verdict.findings[0].file == FILE and verdict.moved_to.parent == cache_root() / QUARANTINE
    assert "make fetch" in verdict.next_step and not folder.exists()


def test_no_folder_of_somebody_else_is_touched(tmp_path, monkeypatch, capsys):
    """Folders with arrays, and with a manifest.json of something else, are not ours to judge or to move."""
    for name, file in (("arrays", "a.npy"), ("website", "manifest.json"), ("photographs", "checksums/sha256.txt")):
        (tmp_path / "home" / name / file).parent.mkdir(parents=True)
        (tmp_path / "home" / name / file).write_text("{}")
    assert command(monkeypatch, str(tmp_path / "home")) == 2 and command(monkeypatch, str(tmp_path / "home" / "website")) == 2
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["arrays", "photographs", "website"]


def test_a_folder_without_data_is_refused(tmp_path, monkeypatch, capsys):
    for folder, words in ((tmp_path / "absent", "there is no such folder"), (tmp_path, "it holds no prepared data")):
        assert command(monkeypatch, str(folder)) == 2
        assert words in capsys.readouterr().err
    assert command(monkeypatch) == 0 and "nothing is prepared" in capsys.readouterr().out


def test_of_a_linked_folder_the_link_is_moved_and_nothing_written_where_it_leads(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "data").mkdir()
    linked = tmp_path / "data/wikitext-2"
    linked.symlink_to(theirs)
    kept = quarantine(linked, [DataFinding("train.txt", "truncated")])
    assert kept.is_symlink() and not linked.is_symlink() and not list(theirs.iterdir())
    (reason,) = [path for path in kept.parent.iterdir() if path != kept]
    assert json.loads(reason.read_text())["was"] == "wikitext-2"
