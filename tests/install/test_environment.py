"""The environment in the checkout: made once, updated, repaired, and never someone else's. Nothing is downloaded."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hyperion.errors import HyperionError
from hyperion.install import environment, interpreter
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import Build, Choice, choose

ROOT = Path(__file__).resolve().parents[2]
CPU, CPU_CHOICE = Build("2.13.0+cpu"), Choice("cpu")
NO_GPU = DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver")
AMD = DetectedAccelerator("rocm", "8 AMD GPU(s), gfx90a", rocm_version=(7, 1))


@pytest.fixture
def without_pip(monkeypatch):
    """New environments get no pip: its installation takes seconds, and nothing is installed with it."""
    run = subprocess.run

    def create_without_pip(command, **options):
        return run([*command, "--without-pip"] if command[1:3] == ["-m", "venv"] else command, **options)

    monkeypatch.setattr(environment.subprocess, "run", create_without_pip)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose packages are one file: installation is counted, everything else is real."""
    root = tmp_path / "a checkout"
    root.mkdir()
    for name in ("requirements.txt", "pyproject.toml"):
        (root / name).write_text((ROOT / name).read_text())
    calls = []

    def install_packages(root: Path, python: Path, choice: Choice) -> None:
        calls.append(choice.label)
        site = next((root / ".venv").glob("lib/python*/site-packages"))
        (site / "torch").mkdir(exist_ok=True)
        (site / "torch/__init__.py").write_text("")
        (site / "torch/version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\n")

    # Only the download is replaced; the environment, its stamp, its inspection and its check are the real ones.
    monkeypatch.setattr(environment, "install_packages", install_packages)
    return root, calls


CPU_CHOICE = Choice("cpu")


@pytest.mark.process
def test_a_second_set_up_installs_nothing_and_changed_requirements_update_in_place(checkout):
    root, calls = checkout
    python = environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    (root / ".venv/kept").write_text("")
    assert environment.ensure_environment(root, NO_GPU, CPU_CHOICE) == python
    assert calls == ["cpu"] and interpreter.inspect(python).torch == CPU
    assert list((root / ".venv").glob("lib/python*/site-packages/pip")), "the packages are installed with it"
    (root / "requirements.txt").write_text("numpy==2.4.6\n")
    assert environment.ensure_environment(root, NO_GPU, CPU_CHOICE) == python
    assert calls == ["cpu", "cpu"] and (root / ".venv/kept").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished environment, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("finished") / ".venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "torch").mkdir()
    content = {"state": "complete", "fingerprint": "0", "base": {}, "entries": environment.site_entries(folder)}
    environment.write_stamp(folder, content)
    return folder


@pytest.mark.parametrize("damage", ["none", "a package deleted", "interpreter gone", "interrupted", "stamp cut short"])
def test_damage_is_noticed(finished, tmp_path, damage):
    folder = tmp_path / ".venv"
    shutil.copytree(finished, folder, symlinks=True)
    stamp = folder / environment.STAMP
    if damage == "a package deleted":
        next(folder.glob("lib/python*/site-packages/torch")).rmdir()
    elif damage == "interpreter gone":
        (folder / "bin/python").unlink()
    elif damage == "interrupted":
        environment.write_stamp(folder, {"state": "building"})
    elif damage == "stamp cut short":
        stamp.write_text(stamp.read_text()[:40])
    assert environment.is_intact(folder, environment.read_stamp(folder)) is (damage == "none")


@pytest.mark.process
def test_a_moved_environment_is_made_anew(checkout, without_pip, tmp_path):
    root, calls = checkout
    environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    root = root.rename(tmp_path / "moved here")
    (root / ".venv/left over").write_text("")
    python = environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    assert calls == ["cpu", "cpu"] and interpreter.inspect(python).torch == CPU
    assert not (root / ".venv/left over").exists()


@pytest.mark.process
def test_an_install_that_fails_leaves_no_finished_stamp(checkout, without_pip, monkeypatch):
    root, calls = checkout
    works = environment.install_packages

    def fail(*arguments):
        raise HyperionError("pip could not install: torch")

    monkeypatch.setattr(environment, "install_packages", fail)
    with pytest.raises(HyperionError, match="pip could not"):
        environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    monkeypatch.setattr(environment, "install_packages", works)
    environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    assert calls == ["cpu"]


def test_an_environment_of_the_readers_own_is_not_touched(checkout):
    root, calls = checkout
    venv.create(root / ".venv", with_pip=False)
    with pytest.raises(HyperionError, match="did not make") as caught:
        environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    assert "PYTHON=.venv/bin/python" in caught.value.next_step and not calls and (root / ".venv/bin/python").exists()


@pytest.mark.process
def test_a_build_that_pip_made_unfit_is_refused_and_not_stamped(checkout, without_pip):
    root, _ = checkout
    with pytest.raises(HyperionError, match="cannot use this machine's AMD GPU"):
        environment.ensure_environment(root, AMD, choose(AMD))
    assert environment.read_stamp(root / ".venv")["state"] == "building"


def test_too_little_disk_is_said_before_anything_is_made(checkout, monkeypatch):
    root, calls = checkout
    monkeypatch.setitem(environment.NEEDED_GB, "cpu", 10**9)
    with pytest.raises(HyperionError, match="needs 1000000000 GB, but the disk has only"):
        environment.ensure_environment(root, NO_GPU, CPU_CHOICE)
    assert not (root / ".venv").exists() and not calls


@pytest.mark.process
@pytest.mark.skipif(not (Path(sys.prefix) / "hyperion-setup.json").is_file(), reason="not an environment of make setup")
def test_a_script_in_the_parent_folder_of_a_clone_imports_the_library(tmp_path):
    """With setuptools' import hook, the folder "hyperion" beside the script would be imported as an empty namespace package."""
    (tmp_path / "hyperion").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("import hyperion.results\nprint(hyperion.__file__)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("hyperion/__init__.py"), done.stderr
