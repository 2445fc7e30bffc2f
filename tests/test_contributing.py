"""The recipes of CONTRIBUTING.md: the first two give experiments that run, the programs for data of one's own run, and the others
name files that exist."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hyperion.results import Run
from tests.reproduce.small_book import write_notebook

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RECIPE = TEXT[TEXT.index("## Add an experiment") : TEXT.index("## Add a subject of your own")]
OWN = TEXT[TEXT.index("## Add a subject of your own") : TEXT.index("## Add a model size")]
OWN_DATA = TEXT[TEXT.index("## Use data of your own") : TEXT.index("## Add a GPU of a known architecture")]
# "`path`, before `marker`:" and its code.
STEP = re.compile(
    r"`([^`\n]+\.(?:py|toml|ipynb))`(?:, (before|after|at the end)(?: `([^`]+)`)?)?[^\n]*:\n\n```\w+\n(.*?)```", re.S
)


def test_the_files_that_the_other_recipes_name_exist():
    names = re.findall(r"`((?:hyperion|tests|docs|results)/[\w/.]+\.\w+)`", TEXT.replace(RECIPE, "").replace(OWN, ""))
    assert len(names) > 10 and [name for name in names if not (ROOT / name).exists()] == []


def follow(copy: Path) -> list[str]:
    """Do what the recipe says; return the files it touched."""
    touched = []
    for name, where, marker, code in STEP.findall(RECIPE):
        path = copy / name
        touched.append(name)
        if path.suffix == ".ipynb":
            write_notebook(path.parent, path.stem, ["guess_softmax_gb_s = None", code], produces=["softmax"])
        elif not where:
            assert not path.exists()
            path.write_text(code)
        else:
            text = path.read_text()
            assert where == "at the end" or text.count(marker) == 1, f"{name} has no single {marker!r}"
            block = code.rstrip("\n")
            places = {"before": f"{block}\n\n\n{marker}", "after": f"{marker}\n{block}"}
            path.write_text(text + code if where == "at the end" else text.replace(marker, places[where]))
    return touched


@pytest.mark.book
@pytest.mark.slow
@pytest.mark.process
def test_the_first_recipe_gives_an_experiment_that_runs(tmp_path):
    copy = tmp_path / "copy"
    # The compiled modules are copied too: their sources keep their times, so they stay valid.
    ignored = shutil.ignore_patterns(".git", ".venv", ".overlay", "results", "data", ".*cache", ".hypothesis")
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: ignored(folder, names) if Path(folder) == ROOT else [])
    touched = follow(copy)
    assert len(set(touched)) == 5
    # Options for the tests outside, such as the names of files, do not apply to the tests of the copy.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {
        "PYTHONPATH": str(copy),
        "HYPERION_HOME": str(copy),
        "HYPERION_RESULTS": str(tmp_path / "results"),
        "HYPERION_DATA": str(tmp_path / "data"),
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=copy, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("hyperion", "reproduce", "--profile", "smoke", "--only", "06_softmax")
    latest = Run.open((tmp_path / "results" / "latest").resolve())
    assert [row.params["row_length"] for row in latest.rows("06_softmax")] == [64, 1024]
    assert (latest.folder / "benchmarks" / "hardware" / "softmax.png").is_file()
    assert "Softmax" in (latest.folder / "report.html").read_text()
    run("pytest", "-q", "-p", "no:cacheprovider", "tests/experiments/hardware/test_softmax.py", "tests/test_architecture.py")
    run("ruff", "check", "--no-cache", *sorted({name for name in touched if name.endswith(".py")}))


@pytest.mark.book
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("installed", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_recipe_for_a_subject_of_ones_own_gives_an_experiment_that_runs(tmp_path, installed):
    files = {name: code for name, where, _, code in STEP.findall(OWN) if not where and not name.endswith(".ipynb")}
    assert len(files) == 6
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    metadata, parameters, cell = re.findall(r"```(?:json|python)\n(.*?)```", OWN[OWN.index("A notebook `lines/") :], re.S)
    # `write_notebook` makes the cell with the tag. Only the reader's guess is added to it.
    guess = parameters.splitlines()[-1]
    book = write_notebook(tmp_path / "lines", "01_straight_line", [guess, cell], **json.loads(metadata)["hyperion"])
    book.write_text(json.dumps(json.loads(book.read_text()) | {"metadata": json.loads(metadata)}))  # the documented metadata only
    environment = os.environ | {"HYPERION_RESULTS": str(tmp_path / "results"), "HYPERION_DATA": str(tmp_path / "data")}
    if installed:
        site = tmp_path / "site"
        pip = ["pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps", "--target", str(site), str(tmp_path)]
        subprocess.run([sys.executable, "-m", *pip], check=True, timeout=300)
        environment["PYTHONPATH"] = str(site)
    else:
        environment["HYPERION_SUBJECTS"] = str(tmp_path / "lines")
    commands = re.findall(r"^\.venv/bin/hyperion (.*)$", OWN, re.M)
    assert len(commands) == 3
    for command in commands:
        words = [sys.executable, "-m", "hyperion", *command.split()]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    latest = Run.open((tmp_path / "results" / "latest").resolve())
    assert [row.metric for row in latest.rows("01_straight_line")] == ["line_loss", "call_time_s"]
    assert (latest.folder / "benchmarks" / "lines" / "losses.png").is_file()
    assert "A straight line" in (latest.folder / "report.html").read_text()


@pytest.mark.process
def test_the_programs_for_data_of_ones_own_run(tmp_path):
    generator = np.random.default_rng(0)
    for split, lines in (("train", 300), ("valid", 30), ("test", 30)):
        words = generator.integers(0, 50, (lines, 8))
        text = "".join(" ".join(f"word{number}" for number in line) + "\n" for line in words)
        (tmp_path / f"{split}.txt").write_text(text)
    for split, count in (("train", 6), ("test", 2)):
        for name in ("cats", "dogs"):
            folder = tmp_path / "pictures" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(generator.integers(0, 256, (40, 50), dtype=np.uint8)).save(folder / f"{number}.png")
    programs = re.findall(r"`(own_\w+\.py)`.*?```python\n(.*?)```", OWN_DATA, re.S)
    assert [name for name, _ in programs] == ["own_text.py", "own_images.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYPERION_DATA": str(tmp_path / "data")}
    printed = []
    for name, code in programs:
        (tmp_path / name).write_text(code)
        done = subprocess.run(
            [sys.executable, name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    assert re.search(r"batches of \[4, 16\] tokens", printed[0]) and "2 classes, 3 batches of [4, 3, 32, 32]" in printed[1]
    verify = [sys.executable, "-m", "hyperion", "data", "verify"]
    done = subprocess.run(verify, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and "2 data sets, 0 damaged" in done.stdout, done.stdout + done.stderr
