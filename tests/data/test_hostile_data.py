"""Hundreds of mutations of small data folders in their real formats: each is refused in words, put aside, or changes nothing.

Allowed are a HyperionError that says what, where and what to do, findings that name the file, or the result of the sound
folder. Not allowed: another exception, ten seconds of waiting, a file written outside of the folder, or a change accepted
where a rule speaks.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.data import (
    load_cifar10,
    load_instructions,
    load_tokenizer,
    load_wikitext2,
    open_prepared,
    prepare_images,
    prepare_text,
    read_tokenizer,
)
from hyperion.data.images.cifar10 import LAYOUTS, read_python_batch
from hyperion.data.images.imageset import synthetic_images
from hyperion.data.prepare.verify import examine, verify
from hyperion.data.store.folders import FILE_NAME, MARK, DataError, write_manifest
from hyperion.data.text.corpus import count_non_empty, count_words_with_eos
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.data.text.wikitext2 import synthetic_corpus
from hyperion.errors import HyperionError
from tests.data.cifar10_files import binary_batch, numbered_pictures, python_batch, write_layout
from tests.hostile import determined, watched

SPLITS = ("train", "valid", "test")
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def outcome(action) -> HyperionError | None:
    """The error in words that an action ends with, None if it succeeds; anything else fails the test."""
    with watched():
        try:
            action()
        except HyperionError as error:
            assert error.what and error.where is not None and error.next_step, repr(error)
            return error
    return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A prepared text, prepared images, and a mirror of each raw format, all small; the expected counts are theirs."""
    root = tmp_path_factory.mktemp("sound")
    corpus = synthetic_corpus({"train": 60, "valid": 20, "test": 20})
    tokenizer = train_tokenizer(corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(root / "data"))
        text = prepare_text(corpus, tokenizer).folder
        images = prepare_images(synthetic_images({"train": 20, "test": 10})).folder
        mirror = root / "mirror"
        (mirror / "wikitext-2").mkdir(parents=True)
        counts = {}
        for split, lines in corpus.splits.items():
            (mirror / "wikitext-2" / f"wiki.{split}.tokens").write_text("".join(lines))
            counts[split] = (len(lines), count_non_empty(lines), count_words_with_eos(lines))
        rows = [{"instruction": f"Say {number}.", "input": "", "output": str(number)} for number in range(1100)]
        (mirror / "instructions.json").write_text(json.dumps(rows))
        model = json.loads(tokenizer.definition())["model"]
        (mirror / "gpt2").mkdir()
        (mirror / "gpt2/vocab.json").write_text(json.dumps(model["vocab"]))
        (mirror / "gpt2/merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in model["merges"]))
        (root / "model").mkdir()
        (root / "model/tokenizer.json").write_text(tokenizer.definition())
        (root / "model/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
        batches = {name: (numbered_pictures(10, place), np.arange(10)) for place, name in enumerate(BATCHES)}
        for layout in LAYOUTS:
            write_layout(root / layout, layout, batches)
        patch.setattr("hyperion.data.text.wikitext2.COUNTS", counts)
        patch.setattr("hyperion.data.images.cifar10.COUNTS", {"train": 50, "test": 10})
        labels = np.tile(np.arange(10), 6).astype(np.uint8)
        patch.setattr("hyperion.data.images.cifar10.LABELS_SHA256", hashlib.sha256(labels.tobytes()).hexdigest())
        patch.setattr("hyperion.data.images.cifar10.MEAN_TOLERANCE_OTHER", 0.01)
        yield {"text": text, "images": images, "mirror": mirror, "model": root / "model", "root": root}


@contextmanager
def copied(source: Path):
    """A copy of a folder that may be broken, in a room of its own whose other contents must stay as they are."""
    with tempfile.TemporaryDirectory() as room:
        room = Path(room)
        (room / "outside").mkdir()
        (room / "outside/theirs.bin").write_bytes(b"theirs")
        shutil.copytree(source, room / "inside" / source.name)
        yield room / "inside" / source.name
        assert sorted(path.name for path in room.iterdir()) == ["inside", "outside"]
        assert [path.name for path in (room / "outside").iterdir()] == ["theirs.bin"]
        assert (room / "outside/theirs.bin").read_bytes() == b"theirs"


# --- What is done to a file as such --------------------------------------------------------------------------------------


def replaced_by(make):
    def do(path: Path, *_):
        path.unlink()
        make(path)

    return do


def make_socket(path: Path):
    # The name of a socket has at most 107 characters, so it is bound from its folder.
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def flip(path: Path, where: float, bit: int):
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


NODES = {
    "named pipe": replaced_by(os.mkfifo),
    "endless device": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "link to a file outside": replaced_by(lambda path: path.symlink_to(path.parents[2] / "outside/theirs.bin")),
    "link that leads nowhere": replaced_by(lambda path: path.symlink_to("absent")),
    "folder": replaced_by(Path.mkdir),
    "socket": replaced_by(make_socket),
    "nothing": replaced_by(lambda path: None),
}
BYTES = {
    "cut": lambda path, where, bit: os.truncate(path, int(where * path.stat().st_size)),
    "bit flipped": flip,
    "emptied": lambda path, *_: path.write_bytes(b""),
    "bytes appended": lambda path, where, bit: path.write_bytes(path.read_bytes() + bytes([bit] * 40)),
    "other bytes": lambda path, where, bit: path.write_bytes(bytes(range(256)) * (bit + 1)),
    "doubled": lambda path, *_: path.write_bytes(path.read_bytes() * 2),
}
damage = st.tuples(st.sampled_from([*NODES.items(), *BYTES.items()]), st.floats(0, 0.999), st.integers(0, 7))


def files_of(folder: Path) -> list[Path]:
    # Without the mark that tells `hyperion clean` whose files these are: it is no part of the data.
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARK)


@pytest.mark.slow
@determined(90)
@given(st.sampled_from(["text", "images"]), damage, st.integers(0, 100))
def test_a_damaged_store_is_found_and_named(sound, kind, damage, chosen):
    (_, change), where, bit = damage
    with copied(sound[kind]) as folder:
        path = files_of(folder)[chosen % len(files_of(folder))]
        before = path.read_bytes()
        change(path, where, bit)
        same = path.is_file() and not path.is_symlink() and path.read_bytes() == before
        with watched():
            findings = examine(folder)
        if same:
            assert not findings
            return
        if path.name == FILE_NAME and path.is_file():
            outcome(lambda: open_prepared(folder))  # a detail of a text may differ; what is checked is that nothing breaks
            return
        assert findings and all(finding.file and finding.fault for finding in findings)
        assert outcome(lambda: open_prepared(folder)), "an edited store was opened"
        with watched():
            (verdict,) = verify(folder)
        assert verdict.moved_to.parent == folder.parent / "quarantine" and not folder.exists()


# --- Manifests ------------------------------------------------------------------------------------------------------------


def with_file(name):
    def do(document):
        document["files"][name] = next(iter(document["files"].values()))

    return do


def at(*keys, value=None, remove=False):
    def do(document):
        for key in keys[:-1]:
            document = document[key]
        if remove:
            del document[keys[-1]]
        else:
            document[keys[-1]] = value

    return do


MANIFESTS = {
    "a name above": with_file("../../../outside/theirs.bin"),
    "an absolute name": with_file("/etc/hostname"),
    "a name with a control character": with_file("a\x1b[2J.npy"),
    "a name of a file that is not there": with_file("absent.npy"),
    "no files": at("files", value={}),
    "files in a list": at("files", value=[]),
    "an unknown field": at("comment", value="x"),
    "no name": at("name", remove=True),
    "a size in words": at("files", "train.npy", value={"sha256": "0", "bytes": "many"}),
    "a negative size": at("files", "train.npy", value={"sha256": "0", "bytes": -1}),
    "a huge size": at("files", "train.npy", value={"sha256": "0", "bytes": 10**30}),
    "an unknown kind": at("facts", "kind", value="sound"),
    "a kind in a list": at("facts", "kind", value=["text"]),
    "facts in words": at("facts", value="many"),
    "no steps": at("facts", "steps", remove=True),
    "steps in a list": at("facts", "steps", value=[]),
    "other counts": at("facts", "steps", "train", "tokenize", "tokens", value=7),
    "counts in words": at("facts", "steps", "valid", "filter", "non_empty", value="many"),
    "no opening": at("facts", "steps", "test", "tokenize", "opening", remove=True),
    "a vocabulary of nothing": at("facts", "vocab_size", value=0),
    "a vocabulary too small": at("facts", "vocab_size", value=5),
    "a vocabulary of 40 bits": at("facts", "vocab_size", value=1 << 40),
    "a vocabulary in words": at("facts", "vocab_size", value="large"),
    "no overlap": at("facts", "overlap", remove=True),
    "another overlap": at("facts", "overlap", "valid", "repeated", value=3),
    "another schema": at("schema_version", value=99),
    "a schema in words": at("schema_version", value="1"),
}
TEXTS = {
    "deep": lambda text: text.replace('"facts": {', '"facts": {"deep": ' + "[" * 100_000 + "]" * 100_000 + ",", 1),
    "a key twice": lambda text: text.replace('"name":', '"name": "other", "name":', 1),
    "not a number": lambda text: text.replace('"vocab_size": ', '"vocab_size": NaN, "v": ', 1),
    "a number of 10,000 digits": lambda text: text.replace('"vocab_size": ', '"vocab_size": ' + "9" * 10_000 + ', "v": ', 1),
    "another encoding": lambda text: text.encode("utf-16").decode("latin-1"),
}


@pytest.mark.parametrize("mutation", [*MANIFESTS, *TEXTS])
def test_a_changed_manifest_is_refused(sound, mutation):
    with copied(sound["text"]) as folder:
        path = folder / FILE_NAME
        if mutation in TEXTS:
            path.write_text(TEXTS[mutation](path.read_text()))
        else:
            document = json.loads(path.read_text())
            MANIFESTS[mutation](document)
            path.write_text(json.dumps(document))
        with watched():
            findings = examine(folder)
        assert findings, "the library accepted it"
        assert all(finding.file and finding.fault for finding in findings)
        outcome(lambda: open_prepared(folder))


# --- Arrays whose folder was hashed anew ----------------------------------------------------------------------------------


def saved(change):
    def do(path: Path):
        np.save(path, change(np.load(path)))

    return do


def put_first(value):
    def do(array):
        array = array.copy()
        array.reshape(-1)[0] = value
        return array

    return saved(do)


def header_of(shape: str, descr: str = "<u2"):
    """A file of 200 bytes whose header declares another shape."""

    def do(path: Path):
        header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(80))

    return do


def as_archive(path: Path):
    content = io.BytesIO()
    np.savez(content, a=np.arange(3))
    path.write_bytes(content.getvalue())


FORMS = {
    "big endian": saved(lambda array: array.astype(array.dtype.newbyteorder(">"))),
    "wider": saved(lambda array: array.astype(np.float64)),
    "complex": saved(lambda array: array.astype(np.complex64)),
    "texts": saved(lambda array: array.reshape(-1)[:9].astype("U5")),
    "one dimension more": saved(lambda array: array[..., None]),
    "no dimension": saved(lambda array: np.array(7, array.dtype)),
    "no rows": saved(lambda array: array[:0]),
    "Fortran order": saved(lambda array: np.asfortranarray(array[:, None].repeat(2, 1))),
    "a row less": saved(lambda array: array[:-1]),
    "an archive of arrays": as_archive,
    "a pickled object": lambda path: np.save(path, np.array([{}], dtype=object), allow_pickle=True),
    "a shape of terabytes": header_of("(1000000000000, )"),
    "a shape beyond 64 bits": header_of("(10000000000000000000000, )"),
    "a negative shape": header_of("(-1, )"),
    "a shape in words": header_of("('many', )"),
    "a type of no size": header_of("(3, )", "|V0"),
}
VALUES = {
    "an id of another vocabulary": ("text", "train.npy", put_first(60_000)),
    "a negative place": ("text", "valid_samples.npy", put_first(-1)),
    "a place beyond the stream": ("text", "test_samples.npy", put_first(1 << 40)),
    "a place that overflows": ("text", "test_samples.npy", put_first((1 << 63) - 1)),
    "negative ids": ("text", "train.npy", saved(lambda array: -array.astype(np.int32))),
    "ids that are no numbers": ("text", "train.npy", saved(lambda array: np.full(len(array), np.nan))),
    "a negative label": ("images", "train_labels.npy", put_first(-1)),
    "a huge label": ("images", "train_labels.npy", put_first(1 << 40)),
    "labels permuted among the classes": ("images", "train_labels.npy", saved(lambda array: array // 2)),
    "an image that is not finite": (
        "images",
        "test_images.npy",
        saved(lambda array: np.where(np.arange(10)[:, None, None, None] == 3, np.inf, array)),
    ),
    "splits swapped": ("text", "valid.npy", lambda path: shutil.copyfile(path.with_name("test.npy"), path)),
    "lines of train in test": (
        "text",
        "test.npy",
        lambda path: np.save(path, np.load(path.with_name("train.npy"))[: len(np.load(path))]),
    ),
    "test images among the train images": (
        "images",
        "test_images.npy",
        lambda path: np.save(path, np.load(path.with_name("train_images.npy"))[:10]),
    ),
}
EDITS = [
    *(
        (f"{file}: {name}", kind, file, change)
        for kind, file in (
            ("text", "train.npy"),
            ("text", "valid_samples.npy"),
            ("images", "test_images.npy"),
            ("images", "train_labels.npy"),
        )
        for name, change in FORMS.items()
        if (name, file) != ("big endian", "test_images.npy")
    ),  # a byte has no end
    *((name, *edit) for name, edit in VALUES.items()),
]


@pytest.mark.parametrize("name, kind, file, change", EDITS, ids=[edit[0] for edit in EDITS])
def test_an_edited_array_is_found_behind_a_manifest_hashed_anew(sound, name, kind, file, change):
    with copied(sound[kind]) as folder:
        change(folder / file)
        facts = json.loads((folder / FILE_NAME).read_text())["facts"]
        (folder / FILE_NAME).unlink()
        write_manifest(folder, name="n", source="synthetic", detail="", facts=facts)
        with watched():
            findings = examine(folder)
        assert findings, "the library accepted it"
        outcome(lambda: open_prepared(folder))


# --- Mirrors --------------------------------------------------------------------------------------------------------------


def load_from(mirror: Path, load):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA_MIRROR", str(mirror))
        return outcome(lambda: load("mirror"))


MIRRORED = {"wikitext-2": load_wikitext2, "gpt2": load_tokenizer, "instructions.json": load_instructions}


@determined(60)
@given(st.sampled_from(list(MIRRORED)), damage, st.integers(0, 100))
def test_a_damaged_mirror_ends_in_words(sound, name, damage, chosen):
    (done, change), where, bit = damage
    with copied(sound["mirror"]) as mirror:
        place = mirror / name
        files = files_of(place) if place.is_dir() else [place]
        change(files[chosen % len(files)], where, bit)
        fault = load_from(mirror, MIRRORED[name])
        if done in NODES or done in ("cut", "emptied", "other bytes", "doubled"):
            assert fault, f"{done} was accepted"


@determined(60)
@given(st.sampled_from(LAYOUTS), damage, st.integers(0, 5))
def test_a_damaged_cifar10_ends_in_words(sound, layout, damage, chosen):
    (done, change), where, bit = damage
    with copied(sound["root"] / layout) as mirror:
        files = [path for path in files_of(mirror) if path.name != "readme.html"]
        change(files[chosen % len(files)], where, bit)
        fault = load_from(mirror, load_cifar10)
        # An archive ends before its last bytes, so some of them may go.
        if done in NODES or done in ("emptied", "other bytes") or (done == "cut" and not layout.endswith(".gz")):
            assert fault, f"{done} was accepted"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sound_mirrors_are_read(sound, layout):
    assert load_from(sound["root"] / layout, load_cifar10) is None
    assert load_from(sound["mirror"], load_wikitext2) is None and load_from(sound["mirror"], load_instructions) is None
    assert read_tokenizer(sound["model"]).eos_id == 0


def test_lines_of_another_split_are_found(sound):
    """As many lines and words as before: a made-up line has 15 words."""
    with copied(sound["mirror"]) as mirror:
        lines = {split: (mirror / f"wikitext-2/wiki.{split}.tokens").read_text().splitlines(True) for split in SPLITS}
        (mirror / "wikitext-2/wiki.train.tokens").write_text("".join([*lines["valid"][:2], *lines["train"][2:]]))
        assert (
            "2 of 20 long lines of the valid split (10.00%) also occur in another split" in load_from(mirror, load_wikitext2).what
        )


ROWS = {
    "a key twice": lambda text: text.replace('"input": ""', '"input": "", "input": "x"', 1),
    "deep": lambda text: text.replace('"input": ""', '"input": ' + "[" * 100_000 + "]" * 100_000, 1),
    "half a character": lambda text: text.replace('"Say 0."', '"Say \\ud800."', 1),
    "an unknown key": lambda text: text.replace('"input": ""', '"input": "", "more": 1', 1),
    "not a number": lambda text: text.replace('"input": ""', '"input": NaN', 1),
    "a row less": lambda text: json.dumps(json.loads(text)[1:]),
    "a record that is a list": lambda text: json.dumps([["a"], *json.loads(text)[1:]]),
    "no answer": lambda text: text.replace('"output": "0"', '"output": ""', 1),
}


@pytest.mark.parametrize("mutation", ROWS)
def test_changed_rows_are_refused(sound, mutation):
    with copied(sound["mirror"]) as mirror:
        path = mirror / "instructions.json"
        path.write_text(ROWS[mutation](path.read_text()))
        fault = load_from(mirror, load_instructions)
        assert fault is not None and "instructions.json" in str(fault)


VOCABULARIES = {
    "an id of 70,000": lambda v: v | {max(v, key=v.get): 70_000},
    "an id of 40 bits": lambda v: v | {"!": 1 << 40},
    "a negative id": lambda v: v | {"!": -1},
    "an id twice": lambda v: v | {"!": 5},
    "an id that is true": lambda v: v | {"!": True},
    "an id in words": lambda v: v | {"!": "many"},
    "a list": list,
    "half a character": lambda v: v | {"\ud800": len(v)},
    "nothing": lambda v: {},
}


@pytest.mark.parametrize("mutation", VOCABULARIES)
def test_a_changed_vocabulary_is_refused(sound, mutation):
    with copied(sound["mirror"]) as mirror:
        path = mirror / "gpt2/vocab.json"
        path.write_text(json.dumps(VOCABULARIES[mutation](json.loads(path.read_text()))))
        assert load_from(mirror, load_tokenizer) is not None


@determined(40)
@given(damage, st.integers(0, 1))
def test_a_damaged_tokenizer_of_a_model_ends_in_words(sound, damage, chosen):
    """A folder of a model has no checksums: a flipped bit may leave a valid tokenizer, any other damage is refused."""
    (done, change), where, bit = damage
    with copied(sound["model"]) as folder:
        path = files_of(folder)[chosen]
        change(path, where, bit)
        try:
            with watched():
                tokenizer = read_tokenizer(folder)
        except DataError as error:
            assert error.where in (path, folder) and ("copy" in error.next_step or not path.exists())
        else:
            assert done == "bit flipped", f"{done} in {path.name} was accepted"
            assert tokenizer.library_tokenizer().id_to_token(tokenizer.eos_id) is not None
            assert tokenizer.sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


# --- Archives and pickles that were made to hurt ---------------------------------------------------------------------------


def archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def batch(number: int = 0) -> bytes:
    return binary_batch(numbered_pictures(10, number), np.arange(10))


def named(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def bomb(path: Path) -> None:
    """An archive of a few MB whose first member unpacks to 280 MB."""
    header = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    header.size = 280 << 20
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf())
        for _ in range(280):
            file.write(bytes(1 << 20))


def long_header(path: Path) -> None:
    """An archive whose extended header claims, and has, 280 MB."""
    header = named("x", tarfile.XHDTYPE)
    header.size = 280 << 20
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf())
        for _ in range(280):
            file.write(bytes(1 << 20))


PREFIX = "cifar-10-batches-bin/"
ARCHIVES = {
    "a bomb": bomb,
    "a header without end": long_header,
    "names above": lambda path: archive(path, [(named(f"../../{n}.bin"), batch(i)) for i, n in enumerate(BATCHES)]),
    "absolute names": lambda path: archive(path, [(named(f"/{n}.bin"), batch(i)) for i, n in enumerate(BATCHES)]),
    "links": lambda path: archive(path, [(named(f"{PREFIX}{n}.bin", tarfile.SYMTYPE, "/dev/zero"), b"") for n in BATCHES]),
    "devices": lambda path: archive(path, [(named(f"{PREFIX}{n}.bin", tarfile.CHRTYPE), b"") for n in BATCHES]),
    "a batch twice": lambda path: archive(
        path, [(named(f"{PREFIX}{n}.bin"), batch(i)) for i, n in enumerate((*BATCHES, BATCHES[0]))]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_made_to_hurt_is_refused(sound, tmp_path, kind):
    (tmp_path / "mirror").mkdir()
    ARCHIVES[kind](tmp_path / "mirror/cifar-10-binary.tar.gz")
    assert load_from(tmp_path / "mirror", load_cifar10) is not None
    assert [path.name for path in tmp_path.iterdir() if path.name != "data"] == ["mirror"]


def nested_tuples() -> bytes:
    """A key of tuples within tuples, the hash of which would take 2**60 steps."""
    return b"\x80\x02}(" + b")" + b"".join(b"q%c" % n + b"h%c" % n + b"\x86" for n in range(60)) + b"K\x01u."


def growing() -> bytes:
    """A list that is made the arguments of 60,000 calls."""
    calls = b"".join(b"cnumpy\ndtype\nh\x00R" for _ in range(40_000))
    return b"\x80\x02]q\x00(" + b"K\x01" * 60_000 + b"e" + calls + b"."


PICKLES = {
    "a table of any size": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a hash without end": nested_tuples(),
    "copies of a long list": growing(),
    "too many codes": b"\x80\x02" + b"N0" * 300_000 + b".",
    "an array of terabytes": b"\x80\x02}(U\x04datacnumpy\nndarray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85RU\x06labels]u.",
    "nothing": b"",
    "no end": b"\x80\x02}",
    "no mark": b"\x80\x02]K\x01e.",
    "a label of 200 bytes": python_batch(numbered_pictures(1, 0), np.arange(1), "b").replace(
        b"K\x00a", b"\x8a\xc8" + b"\x7f" * 200 + b"a"
    ),
    "a list": pickle.dumps([1, 2], protocol=2),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_made_to_hurt_is_refused(kind):
    assert outcome(lambda: read_python_batch(PICKLES[kind], "a batch")) is not None
