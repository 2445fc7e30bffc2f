"""Checkpoints that somebody has edited: refused by name, the older good one is used, and nothing else happens.

Every mutation is made to the newest of two real checkpoints, after which its manifest vouches for the new bytes wherever
the mutation is not about the manifest itself: hashes protect against accidents, not against an editor.
"""

import hashlib
import json
import os
import re
import shutil
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hyperion.checkpoints import CheckpointError, newest_good, read_sharded, saving, verify, write_sharded
from hyperion.checkpoints.folders import step_of
from hyperion.training.snapshots import read_run, write_run
from tests.checkpoints.single import load_latest, save
from tests.hostile import watched
from tests.training.small import small_engine

HOSTILE = settings(derandomize=True, database=None, deadline=None, max_examples=30)


def state(value: float) -> dict:
    generator = torch.Generator().manual_seed(int(value))
    return {
        "model": {"weight": torch.randn(4, 3, generator=generator), "bias": torch.full((3,), value)},
        "steps": [1, 2.5, None, True, "text"],
        "count": torch.tensor(7),
    }


def write_single(folder: Path) -> None:
    for step in (1, 2):
        save(folder, step, state(step))


def read_single(folder: Path) -> tuple[int, torch.Tensor] | None:
    found = load_latest(folder)
    return found and (found.step, found.state["model"]["bias"])


def write_shards(folder: Path) -> None:
    for step in (1, 2):
        with saving(folder, step) as new:
            (new / "engine").mkdir()
            write_sharded(new / "engine", state(step))


def read_shards(folder: Path) -> tuple[int, torch.Tensor] | None:
    def read(path):
        verify(path)
        return step_of(path.name), read_sharded(path / "engine", state(9))["model"]["bias"]

    return newest_good(folder, read)


FORMS = {"single": (write_single, read_single), "sharded": (write_shards, read_shards)}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two checkpoints of each form, and a file next to them that must not change."""
    made = {}
    for form, (write, _) in FORMS.items():
        made[form] = tmp_path_factory.mktemp(form) / "run"
        write(made[form])
    return made


@contextmanager
def copy_of(originals, form, place: Path):
    root = place / "copy"
    shutil.copytree(originals[form], root / "run")
    (root / "secret.txt").write_text("of the user")
    try:
        yield root / "run"
    finally:
        shutil.rmtree(root)


def newest(run: Path) -> Path:
    return run / "step-00000002"


def tree_file(folder: Path) -> Path:
    return next(folder.rglob("state.json"))


def tensor_file(folder: Path) -> Path:
    return next(folder.rglob("*.safetensors"))


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    changed = change(document)
    path.write_text(json.dumps(document if changed is None else changed))


def vouch(folder: Path) -> None:
    """A manifest for what lies there."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "manifest.json":
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(folder / "manifest.json", lambda document: document | {"files": files})


def manifest(change):
    return lambda folder: edit(folder / "manifest.json", change)


def first_entry(change):
    def edited(document):
        name = next(iter(document["files"]))
        document["files"][name] = change(document["files"][name])

    return manifest(edited)


def renamed(name):
    def edited(document):
        document["files"][name] = document["files"].pop(next(iter(document["files"])))

    return manifest(edited)


def vouched(change):
    def edited(folder):
        change(folder)
        vouch(folder)

    return edited


def tree(change):
    return vouched(lambda folder: edit(tree_file(folder), change))


def text_of_tree(make):
    return vouched(lambda folder: tree_file(folder).write_text(make(tree_file(folder).read_text())))


def bytes_of(which, make):
    return vouched(lambda folder: which(folder).write_bytes(make(which(folder).read_bytes())))


def header(change):
    """Edit the JSON header of the safetensors file; the numbers behind it stay."""

    def edited(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        document = json.loads(content[8 : 8 + size])
        changed = change(document)
        text = changed if isinstance(changed, bytes) else json.dumps(document).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return bytes_of(tensor_file, edited)


def tensors(change):
    def edited(folder):
        path = tensor_file(folder)
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about = file.metadata()
        held = load_file(path)
        change(held)
        save_file(held, path, metadata=about)

    return vouched(edited)


def weight(held: dict) -> str:
    return next(name for name in held if name.endswith("weight"))


def dtype_of(name, dtype):
    def change(document):
        document[weight(document)]["dtype"] = dtype

    return header(change)


def replace_by(which, make):
    """Something else in the place of a file."""

    def edited(folder):
        path = which(folder)
        path.unlink()
        make(path)

    return edited


def linked_to(target):
    return lambda path: path.symlink_to(target(path) if callable(target) else target)


def secret(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "copy") / "secret.txt"


def moved_away(path_of):
    """The file itself moved out of the checkpoint, and a link to it left behind."""

    def edited(folder):
        path = path_of(folder)
        outside = folder.parent.parent / path.name
        path.rename(outside)
        path.symlink_to(outside)

    return edited


def as_link(folder: Path) -> None:
    outside = folder.parent.parent / "elsewhere"
    folder.rename(outside)
    folder.symlink_to(outside)


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def as_fifo(folder: Path) -> None:
    shutil.rmtree(folder)
    os.mkfifo(folder)


def deep(levels):
    return lambda text: "[" * levels + "]" * levels


def offsets(change):
    """Edit where the shards of DCP say that they lie."""

    def edited(document):
        about = document.get("__metadata__", {})
        if "DCP_SHARDING_INFO" in about:
            info = json.loads(about["DCP_SHARDING_INFO"])
            change(info)
            about["DCP_SHARDING_INFO"] = json.dumps(info)
        else:
            del document[weight(document)]  # one process's form has no such table: a tensor less

    return header(edited)


def set_in(path, value):
    def change(document):
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


MUTATIONS = {
    # the manifest
    "manifest missing": lambda f: (f / "manifest.json").unlink(),
    "manifest empty": lambda f: (f / "manifest.json").write_bytes(b""),
    "manifest of bytes": lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "manifest a list": manifest(lambda d: []),
    "manifest null": manifest(lambda d: None if d.clear() else [None]),
    "manifest deep": lambda f: (f / "manifest.json").write_text("[" * 200_000),
    "manifest a deep object": lambda f: (f / "manifest.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000),
    "manifest with NaN": lambda f: (f / "manifest.json").write_text('{"format": NaN}'),
    "manifest with a key twice": lambda f: (f / "manifest.json").write_text(
        (f / "manifest.json").read_text().replace('"step"', '"step": 2, "step"')
    ),
    "manifest larger than any": lambda f: os.truncate(f / "manifest.json", 2**27),
    "manifest a folder": replace_by(lambda f: f / "manifest.json", Path.mkdir),
    "manifest a pipe": replace_by(lambda f: f / "manifest.json", os.mkfifo),
    "manifest a link to an endless device": replace_by(lambda f: f / "manifest.json", linked_to("/dev/zero")),
    "manifest a link outside": moved_away(lambda f: f / "manifest.json"),
    "manifest a loop of links": replace_by(lambda f: f / "manifest.json", linked_to(lambda p: p)),
    "manifest without step": manifest(lambda d: {k: v for k, v in d.items() if k != "step"}),
    "manifest without files": manifest(lambda d: {k: v for k, v in d.items() if k != "files"}),
    "manifest with one field more": manifest(lambda d: d | {"pickle": "yes"}),
    "other format": manifest(lambda d: d | {"format": "hyperion-checkpoint-3"}),
    "format a list": manifest(lambda d: d | {"format": [d["format"]]}),
    "step 3": manifest(lambda d: d | {"step": 3}),
    "step 1": manifest(lambda d: d | {"step": 1}),
    "step negative": manifest(lambda d: d | {"step": -2}),
    "step text": manifest(lambda d: d | {"step": "2"}),
    "step float": manifest(lambda d: d | {"step": 2.0}),
    "step bool": manifest(lambda d: d | {"step": True}),
    "step huge": manifest(lambda d: d | {"step": 10**300}),
    "files a list": manifest(lambda d: d | {"files": list(d["files"])}),
    "files empty": manifest(lambda d: d | {"files": {}}),
    "entry a list": first_entry(lambda e: [e["bytes"], e["sha256"]]),
    "entry null": first_entry(lambda e: None),
    "entry with a field more": first_entry(lambda e: e | {"link": "/etc/passwd"}),
    "entry without sha256": first_entry(lambda e: {"bytes": e["bytes"]}),
    "size huge": first_entry(lambda e: e | {"bytes": 2**62}),
    "size negative": first_entry(lambda e: e | {"bytes": -1}),
    "size text": first_entry(lambda e: e | {"bytes": str(e["bytes"])}),
    "size float": first_entry(lambda e: e | {"bytes": e["bytes"] + 0.0}),
    "sha256 of others": first_entry(lambda e: e | {"sha256": "0" * 64}),
    "sha256 short": first_entry(lambda e: e | {"sha256": e["sha256"][:10]}),
    "sha256 null": first_entry(lambda e: e | {"sha256": None}),
    "name absolute": renamed("/etc/hostname"),
    "name upwards": renamed("../../secret.txt"),
    "name with a dot": renamed("./state.json"),
    "name empty": renamed(""),
    "name with a control character": renamed("a\x1b[2Jb"),
    "name with NUL": renamed("a\x00b"),
    "name very long": renamed("x" * 100_000),
    "name with a lone surrogate": renamed("\ud800"),
    "a file more in the manifest": manifest(lambda d: d["files"].update({"more": {"bytes": 0, "sha256": "0" * 64}})),
    # files
    "file missing": lambda f: tensor_file(f).unlink(),
    "file more": lambda f: (f / "more.bin").write_bytes(b"more"),
    "file cut": lambda f: os.truncate(tensor_file(f), 100),
    "file longer": lambda f: tensor_file(f).write_bytes(tensor_file(f).read_bytes() + b"\0"),
    "file a pipe": replace_by(tensor_file, os.mkfifo),
    "document a pipe": replace_by(tree_file, os.mkfifo),
    "file a folder": replace_by(tensor_file, Path.mkdir),
    "file a link outside": moved_away(tensor_file),
    "document a link to the user's file": replace_by(tree_file, linked_to(secret)),
    "file a link to an endless device": replace_by(tensor_file, linked_to("/dev/zero")),
    "document a link to memory": replace_by(tree_file, linked_to("/proc/self/mem")),
    "a link more": lambda f: (f / "more").symlink_to("/etc/passwd"),
    "a link to a folder more": lambda f: (f / "more").symlink_to("/etc"),
    "a pipe more": lambda f: os.mkfifo(f / "more"),
    "a folder of files more": lambda f: (f / "sub").mkdir() or (f / "sub" / "manifest.json").write_text("{}"),
    "the folder a link": as_link,
    "the folder a file": as_file,
    "the folder a pipe": as_fifo,
    "files swapped": lambda f: shutil.copy(tensor_file(f), tree_file(f)),
    "the tensors of the checkpoint before": lambda f: shutil.copy(tensor_file(f.parent / "step-00000001"), tensor_file(f)),
    # documents that the manifest vouches for
    "document empty": text_of_tree(lambda text: ""),
    "document cut": text_of_tree(lambda text: text[:-5]),
    "document deep": text_of_tree(deep(200_000)),
    "document deep enough to parse": text_of_tree(lambda text: '{"a":' * 700 + "1" + "}" * 700),
    "document with NaN": text_of_tree(lambda text: text.replace("2.5", "NaN")),
    "document with Infinity": text_of_tree(lambda text: text.replace("2.5", "-Infinity")),
    "document with 1e999": text_of_tree(lambda text: text.replace("2.5", "1e999")),
    "document with a number of 10^5 digits": text_of_tree(lambda text: text.replace("2.5", "9" * 100_000)),
    "document with a key twice": text_of_tree(lambda text: text.replace('"count"', '"count": 1, "count"')),
    "document not UTF-8": bytes_of(tree_file, lambda content: content.replace(b"text", b"\xff\xff\xff\xff")),
    "document a list": tree(lambda d: [d]),
    "document a number": tree(lambda d: 3),
    "document null": text_of_tree(lambda text: "null"),
    "document a pickle": bytes_of(tree_file, lambda content: b"\x80\x04N."),
    "a mark of another tensor": tree(set_in(("model", "weight"), {"$tensor": "model/bias"})),
    "a mark of no tensor": tree(set_in(("model", "weight"), {"$tensor": "model/none"})),
    "a mark that is a list": tree(set_in(("model", "weight"), {"$tensor": ["model/weight"]})),
    "a mark that is a number": tree(set_in(("model", "weight"), {"$tensor": 3})),
    "a mark with more": tree(set_in(("model", "weight"), {"$tensor": "model/weight", "more": 1})),
    "a tensor without a place": tree(lambda d: {"steps": d["steps"]}),
    "a tensor in two places": tree(set_in(("again",), {"$tensor": "model/weight"})),
    "a number for a tensor": tree(set_in(("model", "weight"), 3)),
    # tensors that the manifest vouches for
    "tensors empty": bytes_of(tensor_file, lambda content: b""),
    "tensors cut": bytes_of(tensor_file, lambda content: content[:-4]),
    "tensors longer": bytes_of(tensor_file, lambda content: content + b"1234"),
    "tensors a pickle": bytes_of(tensor_file, lambda content: b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "tensors a zip": bytes_of(tensor_file, lambda content: b"PK\x03\x04" + content),
    "header longer than the file": bytes_of(tensor_file, lambda content: struct.pack("<Q", 2**40) + content[8:]),
    "header of 2^64 - 1": bytes_of(tensor_file, lambda content: b"\xff" * 8 + content[8:]),
    "header deep": header(lambda d: b"[" * 100_000),
    "header a list": header(lambda d: b"[]"),
    "header with NaN": header(lambda d: b'{"a": NaN}'),
    "shape huge": header(lambda d: d[weight(d)].update(shape=[2**40, 2**40])),
    "shape of a zero and a huge one": header(lambda d: d[weight(d)].update(shape=[0, 2**62, 2**62])),
    "shape negative": header(lambda d: d[weight(d)].update(shape=[-4, -3])),
    "shape text": header(lambda d: d[weight(d)].update(shape="12")),
    "numbers outside the file": header(lambda d: d[weight(d)].update(data_offsets=[0, 2**50])),
    "numbers that overlap": header(lambda d: d[weight(d)].update(data_offsets=[0, 48])),
    "type unknown": dtype_of("weight", "F99"),
    "type of another size": dtype_of("weight", "F64"),
    "a tensor less": tensors(lambda held: held.pop(weight(held))),
    "a tensor more": tensors(lambda held: held.update(more=torch.ones(2))),
    "shards that leave a part out": offsets(lambda info: info[weight(info)].update(saved_offsets=[2, 0])),
    "shards far away": offsets(lambda info: info[weight(info)].update(saved_offsets=[2**50, 0])),
    "shards at negative places": offsets(lambda info: info[weight(info)].update(saved_offsets=[-1, 0])),
    "shards of other dimensions": offsets(lambda info: info[weight(info)].update(saved_offsets=[0])),
    "shards at places of text": offsets(lambda info: info[weight(info)].update(saved_offsets="00")),
    "no table of shards": offsets(lambda info: info.clear()),
}

# What only a reader who knows the state can refuse: the sharded form is read into tensors that are there.
MISFITS = {
    "type of the same size": dtype_of("weight", "I32"),
    "shape turned": tensors(lambda held: held.update({weight(held): held[weight(held)].t().contiguous()})),
    "type half": tensors(lambda held: held.update({weight(held): held[weight(held)].half()})),
}

CASES = [(form, name) for form in FORMS for name in MUTATIONS] + [("sharded", name) for name in MISFITS]


def listing(folder: Path) -> dict[str, object]:
    """Every name below a folder, with the bytes of small regular files and the targets of links."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and path.stat().st_size < 2**20:
            found[name] = path.read_bytes()
        else:
            found[name] = path.lstat().st_mode
    return found


@pytest.mark.parametrize(("form", "name"), CASES)
def test_an_edited_checkpoint_is_refused_by_name_and_the_one_before_is_used(originals, form, name, tmp_path, capsys):
    with copy_of(originals, form, tmp_path) as run:
        (MUTATIONS | MISFITS)[name](newest(run))
        before = listing(tmp_path)
        with watched():
            step, bias = FORMS[form][1](run)
        assert step == 1 and torch.equal(bias, state(1)["model"]["bias"])
        warning = capsys.readouterr().err
        assert "WARNING: this checkpoint cannot be used" in warning and "step-00000002" in warning and "next:" in warning
        assert "\x1b" not in warning
        assert listing(tmp_path) == before, "reading changed a file"


@pytest.mark.parametrize("form", FORMS)
def test_an_edited_checkpoint_alone_is_an_error(originals, form, tmp_path, capsys):
    with copy_of(originals, form, tmp_path) as run:
        shutil.rmtree(run / "step-00000001")
        text_of_tree(deep(200_000))(newest(run))
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints can be used; .*nested too deeply") as caught:
            FORMS[form][1](run)
        assert caught.value.where.name == "state.json"


@pytest.mark.slow
@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
@HOSTILE
def test_bytes_changed_anywhere_are_noticed(originals, tmp_path_factory, form, data):
    with copy_of(originals, form, tmp_path_factory.mktemp("bytes")) as run:
        victims = sorted(path for path in newest(run).rglob("*") if path.is_file() and path.name != "manifest.json")
        victim = data.draw(st.sampled_from(victims))
        content = bytearray(victim.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        victim.write_bytes(content)
        with watched():
            step, bias = FORMS[form][1](run)
        assert step == 1 and torch.equal(bias, state(1)["model"]["bias"])


VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = VALUE | st.lists(VALUE, max_size=3) | st.dictionaries(st.text(max_size=8), VALUE, max_size=3)


@pytest.mark.slow
@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
@HOSTILE
def test_any_value_anywhere_in_the_manifest_is_refused_or_what_was_there(originals, tmp_path_factory, form, data):
    with copy_of(originals, form, tmp_path_factory.mktemp("manifest")) as run:
        place = newest(run) / "manifest.json"
        document = json.loads(place.read_text())
        names = [("format",), ("step",), ("files",)]
        names += [("files", name) for name in document["files"]]
        names += [("files", name, field) for name in document["files"] for field in ("bytes", "sha256")]
        path, value = data.draw(st.sampled_from(names)), data.draw(JSON)
        before = place.read_text()
        set_in(path, value)(document)
        place.write_text(json.dumps(document))
        with watched():
            step, _ = FORMS[form][1](run)
        assert step == (2 if json.dumps(json.loads(before)) == place.read_text() else 1)


@given(form=st.sampled_from(sorted(FORMS)), data=st.data())
@HOSTILE
def test_any_header_of_tensors_is_refused_or_fits(originals, tmp_path_factory, form, data):
    """A header that is vouched for may name other numbers of the file, of the right type and shape, and nothing else."""
    with copy_of(originals, form, tmp_path_factory.mktemp("header")) as run:
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        value = data.draw(JSON | st.lists(st.integers(-(2**63), 2**63), max_size=4))

        def change(document):
            document[weight(document)][field] = value

        header(change)(newest(run))
        with watched():
            step, bias = FORMS[form][1](run)
        assert step == 1 and torch.equal(bias, state(1)["model"]["bias"])


# names


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000001", 1),
        ("step-00000000", 0),
        ("step-99999999", 10**8 - 1),
        ("step-100000000", 10**8),
        ("step-12345678901234567890", 12345678901234567890),
    ],
)
def test_a_name_of_eight_digits_or_more_is_a_step(name, step):
    assert step_of(name) == step


@given(st.text(max_size=12).map("step-{}".format) | st.from_regex(r"step-[0-9]{1,7}", fullmatch=True) | st.text())
@HOSTILE
def test_every_other_name_is_none(name):
    if not re.fullmatch(r"step-([1-9][0-9]{8,}|[0-9]{8})", name, re.ASCII):
        assert step_of(name) is None


@pytest.mark.parametrize("name", ["step-٠٠٠٠٠٠٠١", "step-0000000001", "step-00000001\n", "step-00000001 ", "STEP-00000001"])
def test_names_that_only_look_alike_are_none(name):
    assert step_of(name) is None


def test_copies_of_other_names_are_neither_read_nor_removed(tmp_path):
    run = tmp_path / "run"
    write_single(run)
    for name in ("step-best", "step-first-try", "step-00000002-copy", "step-000000099", ".replaced-best", ".unfinished-mine"):
        shutil.copytree(run / "step-00000001", run / name)
    others = {path.name for path in run.iterdir() if step_of(path.name) is None}
    assert read_single(run)[0] == 2
    for step in (3, 4):
        path = save(run, step, state(step))
        assert path.is_dir()
    assert {path.name for path in run.iterdir()} == others | {"step-00000003", "step-00000004"}
    assert len(others) == 6


def test_steps_are_sorted_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        save(tmp_path, step, state(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-100000000", "step-1000000000"]
    assert load_latest(tmp_path).step == 1_000_000_000


def test_the_checkpoint_just_written_is_never_removed(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step, state(1), keep=3)
    path = save(tmp_path, 150, state(2), keep=1)  # after a resume from an older one
    assert [found.name for found in tmp_path.iterdir()] == [path.name] == ["step-00000150"]


def test_what_is_no_checkpoint_of_ours_is_not_removed(tmp_path, capsys):
    run = tmp_path / "run"
    write_single(run)
    (run / "step-00000000").mkdir()
    (run / "step-00000000" / "thesis.tex").write_text("mine")
    (tmp_path / "mine").mkdir()
    (run / "step-00000001").rename(tmp_path / "mine" / "moved")
    (run / "step-00000001").symlink_to(tmp_path / "mine" / "moved")
    for step in (3, 4, 5):
        save(run, step, state(step))
    assert {path.name for path in run.iterdir()} == {"step-00000000", "step-00000001", "step-00000004", "step-00000005"}
    assert (run / "step-00000000" / "thesis.tex").read_text() == "mine"
    assert verify(tmp_path / "mine" / "moved")["step"] == 1


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


@pytest.mark.parametrize("make", [a_folder, lambda path: path.write_text("mine"), lambda path: path.symlink_to("/etc")])
def test_what_has_the_name_of_the_new_checkpoint_is_set_aside(tmp_path, capsys, make):
    make(tmp_path / "step-00000003")
    before = listing(tmp_path)
    verify(save(tmp_path, 3, state(3)))
    after = listing(tmp_path)
    assert {name.replace("00000003", "00000003.aside-1", 1): what for name, what in before.items()}.items() <= after.items()
    assert "step-00000003.aside-1" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", [".unfinished-", ".replaced-"])
def test_links_with_names_of_leftovers_are_left_alone(tmp_path, prefix):
    outside = tmp_path / "outside"
    a_folder(outside)
    run = tmp_path / "run"
    write_single(run)
    (run / f"{prefix}step-00000007").symlink_to(outside)
    save(run, 3, state(3))
    assert load_latest(run).step == 3
    assert (run / f"{prefix}step-00000007").is_symlink() and (outside / "thesis.tex").read_text() == "mine"


# A run's checkpoint: the loop's state, each rank's, and the engine's.


@pytest.fixture(scope="module")
def run_original(tmp_path_factory):
    from hyperion.training import TrainingPlan, train
    from tests.training.small import small_batches

    folder = tmp_path_factory.mktemp("training") / "run"
    train(small_engine(), small_batches(), TrainingPlan(steps=9, checkpoint_every=8), folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000009"]
    return folder


def in_part(part, path, value):
    return lambda folder: edit(folder / part / "state.json", set_in(path, value))


def rng(*path):
    return ("rng", *path)


RUN_MUTATIONS = {
    "another step": in_part("loop", ("step",), 8),
    "step text": in_part("loop", ("step",), "9"),
    "no ranks": in_part("loop", ("ranks",), 0),
    "ranks text": in_part("loop", ("ranks",), "1"),
    "learning rate text": in_part("loop", ("learning_rate",), "fast"),
    "learning rate negative": in_part("loop", ("learning_rate",), -1.0),
    "seed negative": in_part("loop", ("seed",), -1),
    "steps in the epoch": in_part("loop", ("steps_in_epoch",), 10),
    "batches a list": in_part("loop", ("batches",), []),
    "a field more": in_part("loop", ("more",), 1),
    "history a list": in_part("loop", ("history",), []),
    "history of images": in_part("loop", ("history", "item"), "image"),
    "history resumed later": in_part("loop", ("history", "resumed_at"), [10]),
    "history resumed at text": in_part("loop", ("history", "resumed_at"), ["1"]),
    "an epoch of text": in_part("loop", ("history", "epochs", 0), "first"),
    "an epoch without fields": in_part("loop", ("history", "epochs", 0), {}),
    "an epoch's loss text": in_part("loop", ("history", "epochs", 0, "loss"), "low"),
    "an epoch of the future": in_part("loop", ("history", "epochs", 0, "step"), 100),
    "an epoch with more": in_part("loop", ("history", "epochs", 0, "more"), 1),
    "losses a list": in_part("rank-00000", ("losses",), {"0": 1.0}),
    "losses of text": in_part("rank-00000", ("losses",), ["low"]),
    "more losses than steps": in_part("rank-00000", ("losses",), [1.0] * 50),
    "meter with a method": in_part("rank-00000", ("meter", "pause"), 1),
    "meter text": in_part("rank-00000", ("meter", "time_s"), "long"),
    "meter a list": in_part("rank-00000", ("meter",), []),
    "Python's generator short": in_part("rank-00000", rng("python", 1), [1, 2, 3]),
    "Python's generator of text": in_part("rank-00000", rng("python", 1), "random"),
    "Python's version": in_part("rank-00000", rng("python", 0), 99),
    "NumPy's position": in_part("rank-00000", rng("numpy", 1), 2**31),
    "NumPy's position negative": in_part("rank-00000", rng("numpy", 1), -1),
    "NumPy's state short": in_part("rank-00000", rng("numpy"), []),
    "no generator of torch": in_part("rank-00000", rng("torch"), None),
    "steps of the engine text": in_part("engine", ("steps",), "nine"),
    "steps of the engine null": in_part("engine", ("steps",), None),
    "steps of the engine negative": in_part("engine", ("steps",), -9),
    "items of the engine huge": in_part("engine", ("items_seen",), 2**70),
    "no model": in_part("engine", ("model",), 3),
    "groups a number": in_part("engine", ("optimizer", "param_groups"), 3),
    "groups none": in_part("engine", ("optimizer", "param_groups"), []),
    "a group of text": in_part("engine", ("optimizer", "param_groups", 0), "all"),
    "a group without parameters": in_part("engine", ("optimizer", "param_groups", 0, "params"), []),
    "a group of others": in_part("engine", ("optimizer", "param_groups", 0, "params", 0), "others"),
    "betas of text": in_part("engine", ("optimizer", "param_groups", 0, "betas"), "high"),
    "three betas": in_part("engine", ("optimizer", "param_groups", 0, "betas"), [0.9, 0.9, 0.9]),
    "decay of text": in_part("engine", ("optimizer", "param_groups", 0, "weight_decay"), "much"),
    "decay an object": in_part("engine", ("optimizer", "param_groups", 0, "weight_decay"), {}),
    "scale of fp16": in_part("engine", ("scaler",), {"scale": 2.0}),
    "scaler a list": in_part("engine", ("scaler",), []),
    "scaler null": in_part("engine", ("scaler",), None),
    "no scaler": lambda folder: edit(folder / "engine" / "state.json", lambda d: d.pop("scaler") and None),
    "another rank's state missing": lambda folder: shutil.rmtree(folder / "rank-00000"),
    "loop missing": lambda folder: shutil.rmtree(folder / "loop"),
}


@pytest.mark.parametrize("name", RUN_MUTATIONS)
def test_an_edited_run_goes_on_from_the_checkpoint_before(run_original, name, tmp_path, capsys):
    shutil.copytree(run_original, tmp_path / "run")
    folder = tmp_path / "run" / "step-00000009"
    RUN_MUTATIONS[name](folder)
    vouch(folder)
    engine = small_engine(seed=1)
    with watched():
        shared, own = newest_good(tmp_path / "run", lambda path: read_run(path, engine, 9))
    assert shared["step"] == engine.steps == 8 and len(shared["history"]["losses"]) == 8 and own is not None
    warning = capsys.readouterr().err
    assert "WARNING: this checkpoint cannot be used" in warning and "step-00000009" in warning


def test_an_error_of_the_engines_own_code_is_raised_as_it_is(tmp_path):
    engine = small_engine()
    write_run_of(tmp_path, engine)
    engine.load = lambda folder: len(3)
    with pytest.raises(TypeError, match="has no len"):
        newest_good(tmp_path, lambda path: read_run(path, engine, 9))


def write_run_of(folder: Path, engine) -> None:
    from hyperion.training import rng_state
    from hyperion.training.clocks import EpochMeter
    from hyperion.training.loop import History

    shared = {
        "steps_in_epoch": 0,
        "learning_rate": 0.0,
        "history": History("token").state_dict(),
        "batches": {},
        "seed": 0,
        "items_in_epoch": 0,
    }
    own = {"rng": rng_state(), "meter": EpochMeter(engine.device).state_dict(), "losses": [], "earlier_items": 0}
    write_run(folder, 0, 2, engine, shared, own)
