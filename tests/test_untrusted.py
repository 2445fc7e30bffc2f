"""Files that somebody else wrote: names that leave their folder, pipes, endless devices, JSON that is not ours."""

import json
import os
import socket
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.untrusted import inner_path, is_private, open_regular, parse_json, printable, read_bounded, read_json

STEP = "move the file away"


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b", "a\x1b[2Jb", 7, None, ["a"]]
)
def test_a_name_that_leaves_its_folder_is_refused(tmp_path, name):
    with pytest.raises(HyperionError) as caught:
        inner_path(tmp_path, name, HyperionError, STEP)
    assert caught.value.next_step == STEP


def test_a_name_through_a_link_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "file").symlink_to(outside / "target")
    for name in ("link/target", "file", "link"):
        with pytest.raises(HyperionError, match="symbolic link"):
            inner_path(inside, name, HyperionError, STEP)
    (tmp_path / "latest").symlink_to(inside)
    assert inner_path(inside, "file", HyperionError, STEP, links=True) == inside / "file"
    assert inner_path(tmp_path / "latest", "a/b.csv", HyperionError, STEP) == tmp_path / "latest" / "a" / "b.csv"


@given(st.text())
def test_every_accepted_name_stays_inside(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp()
    try:
        path = inner_path(folder, name, HyperionError, STEP)
    except HyperionError:
        return
    assert os.path.commonpath([folder, os.path.normpath(path)]) == str(folder)
    assert path != folder


def test_pipes_sockets_devices_and_folders_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path, kind in ((tmp_path / "pipe", "named pipe"), ("/dev/zero", "character device"), (tmp_path, "folder")):
            with pytest.raises(HyperionError, match=kind):
                open_regular(path, HyperionError, STEP)
        with pytest.raises(OSError):
            open_regular(tmp_path / "socket", HyperionError, STEP)


def test_reads_are_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_bounded(tmp_path / "file", HyperionError, STEP, limit_bytes=100) == b"x" * 100
    with pytest.raises(HyperionError, match="larger than"):
        read_bounded(tmp_path / "file", HyperionError, STEP, limit_bytes=99)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", HyperionError, STEP)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a": 1, "a": 2}',
        "NaN",
        '{"a": -Infinity}',
        "[" * 100_000,
        b"\xff",
        "1" * 5000,
        "",
        "[" * 101 + "]" * 101,
        "1e999",
        '["\\ud800"]',
        '{"\\uDFFF": 1}',
    ],
)
def test_json_that_is_not_ours_is_refused(text):
    with pytest.raises(HyperionError) as caught:
        parse_json(text, HyperionError, STEP, where="here")
    assert caught.value.where == "here"


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_json_of_ours_is_read(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "document.json"
    path.write_text(json.dumps(document))
    assert read_json(path, HyperionError, STEP) == document


def test_json_at_the_edge_of_what_is_refused():
    assert parse_json("[" * 99 + "]" * 99, HyperionError, STEP)
    assert parse_json('["\\ud83d\\ude00", 1e308]', HyperionError, STEP) == ["\U0001f600", 1e308]


def test_duplicate_keys_are_found_in_linear_time():
    pairs = ", ".join(f'"k{number}": 1' for number in range(200_000))
    with pytest.raises(HyperionError, match="k199999"):
        parse_json(f'{{{pairs}, "k199999": 2}}', HyperionError, STEP)


def test_control_characters_are_shown_not_obeyed():
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[31mred\x07\r\x9b\u202e\udc80") == r"\x1b[31mred\x07\r\x9b\u202e\udc80"
    assert printable("größer als 5 × σ") == "größer als 5 × σ"


def test_a_small_file_takes_little_memory_however_large_the_limit_is(tmp_path):
    (tmp_path / "small").write_bytes(b"12")
    tracemalloc.start()
    try:
        assert read_bounded(tmp_path / "small", HyperionError, STEP, 1 << 40) == b"12"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_private_folder_is_made_and_found_again(tmp_path):
    assert is_private(tmp_path / "own") and is_private(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "own").chmod(0o720)
    assert not is_private(tmp_path / "own")


def test_a_link_to_a_private_folder_is_not_private(tmp_path):
    assert is_private(tmp_path / "own")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "file").touch()
    assert not is_private(tmp_path / "link") and not is_private(tmp_path / "file")
