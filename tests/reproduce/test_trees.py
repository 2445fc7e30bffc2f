"""The documented trees: a run has the files that docs/running.md lists and no others; data has the folders of data/README.md."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from hyperion.data import prepare_images
from hyperion.data.images.imageset import synthetic_images
from hyperion.data.store.folders import cache_root, processed_root
from hyperion.engines.environments import environment_folder
from hyperion.paths import data_folder
from hyperion.reproduce import Request, reproduce
from hyperion.results import Run
from tests.reproduce.small_book import MACHINE, counting, write_notebook

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^\| (`[^|]+) \| ([^|]+) \|$", re.MULTILINE)


def documented(page: str) -> dict[str, bool]:
    """Return the names at the top of a documented tree, and whether a tree always has them."""
    names = {}
    for paths, content in LINE.findall((ROOT / page).read_text("utf-8")):
        for path in re.findall(r"`([^`]+)`", paths):
            names[path.split("/")[0]] = not content.startswith("only ")
    return names


def faults_of_run(folder: Path) -> list[str]:
    """Return each difference between the files of a run and the documented ones. Names with a leading dot are locks."""
    known = {
        name: always for name, always in documented("docs/running.md").items() if name not in ("smoke", "full", "study", "replay")
    }
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    missing = {name for name, always in known.items() if always} - found
    return [f"{name} lacks" for name in sorted(missing)] + [f"{name} is not documented" for name in sorted(found - known.keys())]


@pytest.mark.book
@pytest.mark.process
def test_a_run_has_the_documented_files_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperion.reproduce.driver.waiting_threads", lambda: 0.0)
    monkeypatch.chdir(tmp_path)
    for name in ("HYPERION_RESULTS", "HYPERION_DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pyproject.toml").write_text("")
    write_notebook(tmp_path / "phase1_hardware", "01_first", [counting("01_first")])
    assert reproduce(Request(), machine=MACHINE, console=Console(file=io.StringIO(), width=160)) == 0
    run = (tmp_path / "results/latest").resolve()
    assert faults_of_run(run) == []
    assert Run.open(run).information()["command_line"] == "hyperion reproduce"
    (run / "notes.txt").write_text("mine")
    (run / "report.html").unlink()
    assert faults_of_run(run) == ["report.html lacks", "notes.txt is not documented"]


def test_data_has_the_documented_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    places = [prepare_images(synthetic_images({"train": 40, "test": 20})).folder, cache_root(), processed_root()]
    places.append(environment_folder("deepspeed"))
    used = {place.relative_to(data_folder()).parts[0] for place in places}
    assert used == documented("data/README.md").keys()
    assert [path.name for path in tmp_path.iterdir()] == ["processed"]
