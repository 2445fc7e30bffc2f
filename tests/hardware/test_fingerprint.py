import json
import os
import socket
import subprocess

import hyperion
from hyperion.hardware import fingerprint, git_state, source_hash
from tests.hardware.machines import facts


def test_it_is_json_and_tells_no_names_or_paths():
    text = json.dumps(fingerprint())
    assert '"torch"' in text and '"host_hash"' in text
    assert "/" not in text.replace("GNU/Linux", "").replace("MI250X/MI250", "")
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    assert hyperion.__file__ not in text and f'"{os.environ.get("USER", "nobody at all")}"' not in text


def test_gpu_serials_are_hashed():
    text = json.dumps(fingerprint(facts("H200")))
    assert "64654e92" not in text and "NVIDIA H200" in text


def test_the_source_hash_follows_content_and_names_only(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n")
    (tmp_path / "specs.toml").write_text("y = 2\n")
    first = source_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not source")
    assert source_hash(tmp_path) == first
    (tmp_path / "room" / "a.py").write_text("x = 2\n")
    changed = source_hash(tmp_path)
    (tmp_path / "room" / "a.py").rename(tmp_path / "room" / "b.py")
    assert len({first, changed, source_hash(tmp_path)}) == 3
    assert len(source_hash()) == 64


def _git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    subprocess.run(["git", *identity, "-C", str(folder), *arguments], check=True, capture_output=True)


def test_the_commit_comes_from_git_then_from_the_file_then_from_nowhere(tmp_path):
    assert git_state(tmp_path) == {"commit": None, "modified": None}
    (tmp_path / "SOURCE_COMMIT").write_text("0123abcd\n")
    assert git_state(tmp_path) == {"commit": "0123abcd", "modified": None}
    (tmp_path / "hyperion").mkdir()
    (tmp_path / "hyperion" / "a.py").write_text("x = 1\n")
    _git(tmp_path, "init", "-q")
    assert git_state(tmp_path)["commit"] == "0123abcd"  # a repository without a commit
    _git(tmp_path, "add", "SOURCE_COMMIT")
    _git(tmp_path, "commit", "-qm", "of another project")
    assert git_state(tmp_path) == {"commit": "0123abcd", "modified": None}  # a copy of the package in another repository
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "start")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["modified"] is False
    (tmp_path / "hyperion" / "a.py").write_text("x = 2\n")
    assert git_state(tmp_path)["modified"] is True


def test_no_git_program_and_a_broken_file_do_not_fail(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "SOURCE_COMMIT").write_bytes(b"\xff\xfe\xff")
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == {"commit": None, "modified": None}
