"""What an interpreter says about itself, and whether its torch opens the GPU."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.install import interpreter
from hyperion.install.plan import Build


@pytest.mark.process
def test_inspection_reads_the_real_torch_without_importing_it():
    found = interpreter.inspect(Path(sys.executable))
    assert found.torch == Build(str(torch.__version__), torch.version.cuda, torch.version.hip)
    assert found.version == sys.version_info[:3] and found.torchvision and "numpy" in found.packages


@pytest.mark.process
@pytest.mark.parametrize(("python", "cause"), [("/no/such/python", "cannot be run"), ("/bin/false", "does not work")])
def test_an_interpreter_that_does_not_run_is_named(python, cause):
    with pytest.raises(HyperionError, match=f"{python} {cause}"):
        interpreter.inspect(Path(python))


@pytest.mark.process
def test_an_old_python_is_refused(tmp_path):
    old = tmp_path / "python3"
    answer = '{"version": [3, 10, 13], "base": "/usr", "torch": null, "torchvision": false, "packages": {}}'
    old.write_text(f"#!/bin/sh\necho '{answer}'\n")
    old.chmod(0o755)
    with pytest.raises(HyperionError, match=r"is Python 3\.10\.13"):
        interpreter.inspect(old)


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's torch opens a GPU")
def test_a_gpu_build_that_opens_no_gpu_is_refused_with_the_masks(monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "7")
    with pytest.raises(HyperionError, match="torch cannot use a GPU") as caught:
        interpreter.check_gpu_opens(Path(sys.executable), dict(os.environ), Build("2.13.0", cuda="13.0"))
    assert "HIP_VISIBLE_DEVICES" in caught.value.where


@pytest.mark.process
def test_a_torch_that_cannot_be_imported_is_not_called_a_gpu_without_driver(tmp_path):
    (tmp_path / "torch.py").write_text("raise ValueError('TORCH_LOGS is empty')")
    with pytest.raises(HyperionError, match="cannot be imported: (.|\\n)*TORCH_LOGS is empty") as caught:
        interpreter.check_gpu_opens(
            Path(sys.executable), os.environ | {"PYTHONPATH": str(tmp_path)}, Build("2.13.0", cuda="13.0")
        )
    assert "driver" not in caught.value.next_step


@pytest.mark.parametrize(
    ("version", "requirement", "inside"),
    [
        ("2.13.0+cpu", "torch>=2.9", True),
        ("2.9", "torch>=2.9.0", True),
        ("2.8.1", "torch>=2.9", False),
        ("2.11.0a0+git1", "torch>=2.9", True),
        ("26.0.1", "pyarrow>=18", True),
    ],
)
def test_ranges_compare_release_numbers(version, requirement, inside):
    assert interpreter.in_range(version, requirement) is inside


@pytest.mark.process
def test_while_pip_is_silent_a_line_says_that_it_runs_and_an_interrupt_ends_it(tmp_path, monkeypatch, capfd):
    pip = tmp_path / "python3"
    pip.write_text("#!/bin/sh\nsleep $5\nexit $6\n")
    pip.chmod(0o755)
    monkeypatch.setattr(interpreter, "_NOTE_S", 0.1)
    interpreter.pip_install(pip, ["0.5", "0"], "two packages")
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "hyperion: two packages" and "hyperion: still installing, 0 s so far" in lines[1:] and len(lines) < 8
    with pytest.raises(HyperionError, match="pip could not install: two packages"):
        interpreter.pip_install(pip, ["0", "1"], "two packages")

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    class Recorded(subprocess.Popen):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            started.append(self)

    started: list[Recorded] = []
    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr("builtins.print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        interpreter._run_with_notes(["sleep", "60"])
    assert [process.returncode for process in started] == [-signal.SIGKILL]
