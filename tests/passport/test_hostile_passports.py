"""Passports of somebody else: every mutation of a real one is refused in words and in seconds, or changes nothing that counts."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.passport import PassportError, verify_passport
from hyperion.passport.verify import hashes_of
from tests.hostile import JUNK, SPOILED, command, determined, refused, snapshot, spoil, watched

REAL = Path(__file__).resolve().parents[2] / "results/passports/cpu-2-cores.json"
CONTENT = json.loads(REAL.read_text())


def leaves(value, path=()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [leaf for key, item in items for leaf in leaves(item, (*path, key))]


PLACES = leaves(CONTENT)


@pytest.fixture
def place(tmp_path):
    """Makes a passport in a folder of its own, beside a file that nobody may touch."""

    def make(text: str) -> Path:
        (tmp_path / "outside").write_bytes(b"mine")
        path = tmp_path / "passport.json"
        if path.is_symlink() or path.exists() or path.is_fifo():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        path.write_text(text)
        return path

    return make


def drive(path, monkeypatch, capsys) -> bool:
    """Show a passport to its readers; return whether it was refused."""
    before = snapshot(path.parent)
    verdict = refused(lambda: verify_passport(path))
    code, said = command(monkeypatch, capsys, "passport", "--verify", path)
    assert code == int(verdict) and str(path) in said and "Traceback" not in said
    assert snapshot(path.parent) == before
    return verdict


def test_the_real_one_is_accepted(place, monkeypatch, capsys):
    assert not drive(place(REAL.read_text()), monkeypatch, capsys)


@determined(20)
@given(st.sampled_from(sorted(SPOILED)))
def test_spoiled_files_are_refused(place, monkeypatch, capsys, how):
    path = place(REAL.read_text())
    spoil(path, how, path.with_name("outside"))
    harmless = how == "extended"  # a newline behind a JSON document is white space
    assert drive(path, monkeypatch, capsys) != harmless


@pytest.mark.slow
@determined(60)
@given(st.sampled_from(PLACES), st.sampled_from(JUNK), st.booleans())
def test_junk_anywhere_is_refused_by_a_hash_or_a_rule(place, monkeypatch, capsys, where, junk, rehashed):
    content = copy.deepcopy(CONTENT)
    holder = content
    for part in where[:-1]:
        holder = holder[part]
    before, holder[where[-1]] = holder[where[-1]], "JUNK"
    text = json.dumps(content).replace('"JUNK"', junk)
    try:
        value = json.loads(junk)
        holder[where[-1]] = value
        if rehashed and "hashes" in content:
            text = json.dumps(content | {"hashes": hashes_of(content)})
    except (ValueError, KeyError, RecursionError, TypeError):
        value, rehashed = None, False  # nothing that a hash can be taken of
    verdict = drive(place(text), monkeypatch, capsys)
    changed = value != before or type(value) is not type(before)
    assert verdict or rehashed or not changed


@determined(30)
@given(st.integers(0, 10**6), st.integers(1, 127))
def test_bytes_flipped_are_refused(place, position, flip):
    content = bytearray(REAL.read_bytes())
    content[position % len(content)] ^= flip
    path = place("")
    path.write_bytes(content)
    try:
        same = json.loads(content) == CONTENT
    except ValueError:
        same = False
    assert refused(lambda: verify_passport(path)) != same


def test_sixty_thousand_keys_are_read_in_linear_time(place):
    keys = ", ".join(f'"k{number}": 1' for number in range(60_000))
    for text in (f"{{{keys}}}", f'{{{keys}, "k0": 1}}'):
        with watched(), pytest.raises(PassportError):
            verify_passport(place(text))


def test_an_enormous_file_is_not_read(place):
    path = place('{"a": "' + "x" * (17 * 2**20) + '"}')
    with pytest.raises(PassportError, match="larger than 16 MiB"):
        verify_passport(path)
