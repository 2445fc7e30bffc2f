"""Archives: what is packed can be checked and read again, and an invalid or existing file is refused."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperion.commands.frameworks import app
from hyperion.errors import HyperionError
from hyperion.frameworks import archive as archives
from hyperion.frameworks.comparison import load_results
from hyperion.frameworks.config import OUTPUT
from hyperion.frameworks.progress import EVENTS, append_event
from hyperion.frameworks.result import write_result
from tests.frameworks.results import result
from tests.frameworks.test_run import plan

FILES = [
    "train_amd_deep_llama.json",
    "train_amd_tran_llama.json",
    "logs/train_amd_tran_llama.log",
    EVENTS,
    "comparison_report.md",
    "compare.png",
]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "results"
    monkeypatch.setenv(OUTPUT, str(folder))
    for framework in ("tran", "deep"):
        write_result(result(framework=framework), folder)
    append_event(folder, plan("tran"), "started")
    (folder / "logs").mkdir()
    for name in (FILES[2], *FILES[4:], "other.txt"):
        (folder / name).write_bytes(b"content of " + name.encode())
    return folder


def archive(*arguments: str):
    return CliRunner().invoke(app, ["archive", *arguments])


def test_an_unpacked_archive_is_what_was_packed(folder, tmp_path):
    done = archive(str(tmp_path / "new/a.zip"))
    assert done.exit_code == 0 and done.output.split() == [*FILES, "SHA256SUMS", "archive:", str(tmp_path / "new/a.zip")]
    with zipfile.ZipFile(tmp_path / "new/a.zip") as packed:
        packed.extractall(tmp_path / "unpacked")
    unpacked = tmp_path / "unpacked"
    assert load_results(unpacked) == load_results(folder)
    sums = dict(reversed(line.split("  ")) for line in (unpacked / "SHA256SUMS").read_text().splitlines())
    assert list(sums) == FILES
    for name, digest in sums.items():
        assert (unpacked / name).read_bytes() == (folder / name).read_bytes()
        assert hashlib.sha256((unpacked / name).read_bytes()).hexdigest() == digest
    assert os.listdir(tmp_path / "new") == ["a.zip"] and (tmp_path / "new/a.zip").stat().st_mode & 0o777 == 0o644


def test_results_alone_are_packed_beside_them(folder):
    for name in FILES[2:]:
        (folder / name).unlink()
    assert archive("--results-dir", str(folder)).exit_code == 0
    assert zipfile.ZipFile(folder / "archive.zip").namelist() == [*FILES[:2], "SHA256SUMS"]


def test_an_existing_file_is_not_replaced(folder, tmp_path):
    assert archive().exit_code == 0
    before = (folder / "archive.zip").read_bytes()
    (folder / FILES[0]).unlink()
    error = archive().exception
    assert isinstance(error, HyperionError) and error.exit_code == 2 and error.where == folder / "archive.zip"
    assert "not replaced" in error.what and "archive OUTPUT" in (error.next_step or "")
    assert (folder / "archive.zip").read_bytes() == before and not list(folder.glob(".archive*"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (FILES[0], b'{"schema_version": 1}', "missing field"),
        (FILES[0], b"{", "not a valid JSON document"),
        (EVENTS, b'{"event": "started"}', "missing field event.time"),
    ],
)
def test_an_invalid_file_is_refused_and_nothing_is_written(name, content, said, folder):
    (folder / name).write_bytes(content)
    error = archive().exception
    assert isinstance(error, HyperionError) and error.exit_code == 2 and said in error.what
    assert name in str(error.where) and error.next_step and not (folder / "archive.zip").exists()


def test_a_folder_without_results_is_refused(tmp_path):
    done = archive("--results-dir", str(tmp_path / "absent"))
    error = done.exception
    assert isinstance(error, HyperionError) and "no file train_*.json" in error.what and "run" in (error.next_step or "")
    assert not (tmp_path / "absent").exists()


def test_a_failure_leaves_no_file(folder, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archives.zipfile.ZipFile, "writestr", full)
    before = sorted(os.listdir(folder))
    assert isinstance(archive().exception, OSError) and sorted(os.listdir(folder)) == before
