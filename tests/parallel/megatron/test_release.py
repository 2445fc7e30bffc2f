"""The adaptation applies, is idempotent and reversible, refuses foreign files, and each of its changes is necessary."""

import shutil
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hyperion.commands.megatron import app
from hyperion.errors import HyperionError
from hyperion.parallel.megatron import release
from hyperion.parallel.megatron.release import (
    ADAPTED,
    FOREIGN,
    PUBLISHED,
    Change,
    Replacement,
    adapt,
    changes,
    find_release,
    states,
)
from hyperion.processes import Job, run_job
from tests.parallel.megatron.probes import PROBES, probe_changes

installed = pytest.mark.skipif(bool(release.why_unavailable()), reason="megatron-core is not installed")


@pytest.fixture
def core(tmp_path) -> Path:
    """The files of the release that the adaptation reads."""
    names = [*(change.file for change in changes() if change.sha256), "package_info.py"]
    published = find_release()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(published / name, tmp_path / name)
    adapt(tmp_path, revert=True)
    return tmp_path


def contents(core: Path) -> dict[str, bytes]:
    return {str(path.relative_to(core)): path.read_bytes() for path in core.rglob("*.py")}


@installed
def test_the_adaptation_applies_once_and_is_reverted_byte_for_byte(core):
    before = contents(core)
    assert set(states(core).values()) == {PUBLISHED}
    assert sorted(adapt(core)) == sorted(change.file for change in changes())
    assert set(states(core).values()) == {ADAPTED} and adapt(core) == []
    adapted = contents(core)
    assert all(adapted[change.file] != before.get(change.file) for change in changes())
    assert len(adapt(core, revert=True)) == len(changes())
    assert contents(core) == before and adapt(core, revert=True) == []


@installed
@pytest.mark.parametrize("revert", [False, True])
def test_a_foreign_file_is_refused_and_nothing_changes(core, revert):
    if revert:
        adapt(core)
    path = core / "optimizer" / "grad_scaler.py"
    path.write_text(path.read_text() + "\n# edited\n")
    before = contents(core)
    with pytest.raises(HyperionError, match=r"neither the published nor the adapted text: optimizer/grad_scaler\.py") as refused:
        adapt(core, revert=revert)
    assert contents(core) == before
    # The command has no option to install again, and changes no environment that is installed.
    again = f"remove the environment in {release.data_folder() / 'frameworks'} and run `{release.INSTALL}`"
    assert refused.value.next_step == f"restore the published files, or {again}"


@installed
def test_the_command_adapts_and_reverts_a_folder(core):
    before = contents(core)
    done = CliRunner().invoke(app, ["adapt", "--path", str(core)])
    assert done.exit_code == 0 and f"{len(changes())} files changed" in done.output
    assert all(change.reason in done.output for change in changes())
    again = CliRunner().invoke(app, ["adapt", "--path", str(core)])
    assert "0 files changed" in again.output
    done = CliRunner().invoke(app, ["adapt", "--revert", "--path", str(core)])
    assert f"{len(changes())} files changed" in done.output and contents(core) == before


@installed
def test_another_version_is_refused(core):
    path = core / "package_info.py"
    path.write_text(path.read_text().replace("PATCH = 1", "PATCH = 2"))
    with pytest.raises(HyperionError, match=r"megatron-core 0\.16\.2 is installed, but the adaptation is for 0\.16\.1"):
        adapt(core)


def test_a_release_of_the_right_version_is_found_behind_another_one(tmp_path, monkeypatch):
    def package(folder: Path, version: str) -> Path:
        core = folder / "megatron" / "core"
        core.mkdir(parents=True)
        parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (core / "package_info.py").write_text("".join(f"{name} = {part}\n" for name, part in parts))
        return core

    other = package(tmp_path / "site", "0.12.0")
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    with pytest.raises(HyperionError, match=r"megatron-core 0\.12\.0 is installed") as caught:
        find_release()
    assert caught.value.where == str(other)
    wanted = package(tmp_path / "data/frameworks/megatron-core-x/lib/python3.11/site-packages", release.VERSION)
    assert find_release() == wanted


@installed
def test_the_copy_is_adapted_and_the_installed_package_unchanged(tmp_path, monkeypatch):
    installed_core = find_release()
    before = states(installed_core)
    monkeypatch.setattr(release, "find_release", lambda: installed_core)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    folder = release.adapted_copy()
    assert folder.is_relative_to(tmp_path) and set(states(folder / "megatron" / "core").values()) == {ADAPTED}
    assert states(installed_core) == before and release.adapted_copy() == folder


def test_only_expected_warnings_are_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "adapted_copy", lambda: tmp_path)
    # An earlier test of this process may have imported the adapted copy of the checkout.
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert release.use_adapted() == tmp_path and sys.path[0] == str(tmp_path)
        warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
        warnings.warn("the loss is not finite", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["the loss is not finite"]


def test_another_copy_that_is_imported_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "adapted_copy", lambda: tmp_path)
    imported = types.ModuleType("megatron.core")
    imported.__file__ = "/elsewhere/megatron/core/__init__.py"
    monkeypatch.setitem(sys.modules, "megatron.core", imported)
    with pytest.raises(HyperionError, match="this process has imported /elsewhere/megatron"):
        release.use_adapted()


def test_every_change_has_a_reason_and_a_probe():
    assert sorted(PROBES) == sorted(change.file for change in changes())
    assert all(len(change.reason) > 30 for change in changes())


def test_a_text_that_occurs_too_seldom_is_refused():
    change = Change("a.py", "0" * 64, "a reason", (Replacement("old", "new", 2),))
    with pytest.raises(HyperionError, match="occurs 1 times instead of 2 times"):
        change.apply("old")
    assert change.state("anything") == FOREIGN and change.state(None) == FOREIGN


def test_without_the_package_the_reason_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(release.sys, "path", [str(tmp_path)])
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    reason = release.why_unavailable()
    assert reason == f"unavailable: megatron-core is not installed; next step: {release.INSTALL}"


@installed
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA, the published files work")
def test_each_replacement_is_necessary(tmp_path):
    answer = run_job(Job(probe_changes, {"folder": str(tmp_path)}, timeout_s=300), on_line=lambda line: None)
    assert answer["with all changes"] == {}
    names = [f"{change.file}, {number}" for change in changes() for number in range(len(change.replace))]
    assert [name for name in names if name not in answer["without"]] == []
