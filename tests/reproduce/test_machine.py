import contextlib
import io
import subprocess
import sys

import pytest

from hyperion.errors import HyperionError
from hyperion.hardware.cpu import read_cpu
from hyperion.reproduce import machine
from hyperion.reproduce.machine import examine_machine


@pytest.fixture
def in_this_process(monkeypatch):
    """The process that examines the machine takes seconds to load torch; here its entry is called, and its output is returned."""

    run = subprocess.run

    def examine(command, **options) -> subprocess.CompletedProcess:
        if command[:4] != [sys.executable, "-s", "-m", "hyperion.reproduce.machine"]:
            return run(command, **options)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            machine._main(*command[4:])
        return subprocess.CompletedProcess(command, 0, said.getvalue(), "")

    monkeypatch.setattr(machine.subprocess, "run", examine)


@pytest.mark.process
def test_the_machine_answers_with_profile_setting_and_run_information():
    found = examine_machine("auto", "synthetic", 3, [])
    assert found.profile in ("smoke", "full") and found.settings["sizes"]
    assert set(found.setting) == {"device", "arch", "torch", "hyperion"} and all(found.setting.values())
    settings = found.settings
    assert set(settings) == {"sizes", "synthetic", "allow_synthetic"} and settings["synthetic"]["lines"]
    assert found.information["seed"] == 3 and found.information["environment"]


def test_a_replay_measures_nothing_and_so_its_notebooks_share_the_machine(in_this_process):
    found = examine_machine("replay", "auto", 0, [])
    assert found.profile == "replay" and list(found.masks) == [{}] * min(read_cpu().cores, 8)


def test_an_unknown_profile_is_told_in_the_librarys_words(in_this_process):
    with pytest.raises(HyperionError, match="unknown profile 'nope'") as caught:
        examine_machine("nope", "auto", 0, [])
    assert "PROFILE=smoke" in caught.value.next_step


def test_an_unknown_data_source_is_told_before_anything_runs(in_this_process):
    with pytest.raises(HyperionError, match="unknown data source 'internet'") as caught:
        examine_machine("smoke", "internet", 0, [])
    assert "synthetic" in caught.value.next_step


@pytest.mark.process  # a process keeps the subjects that it found first
def test_sizes_of_the_experiments_that_will_run_are_checked(tmp_path, monkeypatch):
    subject = tmp_path / "odd"
    subject.mkdir()
    (subject / "__init__.py").write_text("")
    (subject / "sizes.toml").write_text("[smoke.odd_work]\nlength = 0\n")
    (subject / "odd_work.py").write_text(
        "from pydantic import Field\n"
        "from hyperion.chapter.context import Experiment, Options\n"
        "class OddOptions(Options):\n"
        "    length: int = Field(ge=1)\n"
        "EXPERIMENT = Experiment(lambda context: [], lambda context, report: None, options=OddOptions)\n"
    )
    monkeypatch.setenv("HYPERION_SUBJECTS", str(subject))
    with pytest.raises(HyperionError, match="length"):
        examine_machine("smoke", "auto", 0, ["odd_work"])
    assert examine_machine("smoke", "auto", 0, ["counting"]).settings["sizes"]["odd_work"] == {"length": 0}


@pytest.mark.process
def test_a_library_that_does_not_load_is_told_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HyperionError, match="torch") as caught:
        examine_machine("smoke", "auto", 0, [])
    assert "hyperion doctor" in caught.value.next_step
