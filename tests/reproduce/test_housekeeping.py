import os
import time
from pathlib import Path

import pandas as pd
import pytest

from hyperion.data.prepare.verify import DataFinding, quarantine
from hyperion.data.store.folders import staged, write_manifest
from hyperion.errors import HyperionError
from hyperion.experiments.memory.memory_trace import KERNELS, SNAPSHOT, TRACE
from hyperion.reproduce import housekeeping
from hyperion.reproduce.housekeeping import _is_live, removable, remove
from hyperion.reproduce.runs import claimed_launch, claimed_run
from hyperion.results import Row, Run


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of Hyperion with caches, runs and data, and things of the user's beside them."""
    monkeypatch.setattr(housekeeping, "_SETTLED_S", 0.0)  # the runs below are new
    for name in (".pytest_cache", "hyperion/x/__pycache__", "phase1_hardware/.ipynb_checkpoints", ".venv/lib/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "hyperion"\n')
    for name in ("reference/h100", "no-run"):
        (tmp_path / "results" / name).mkdir(parents=True)
    for name in ("old", "relaunch/A/1", "relaunch/B/1", "h200-launches/1"):
        run = Run.create(tmp_path / "results" / name, {"profile": "smoke"})
        row = Row(notebook="n", experiment="e", variant="v", metric="count", value=1.0)
        run.record("n", "e", [row], pd.DataFrame({"x": [1.0]}), input_hash="h")
    checkpoint = tmp_path / "results/old/checkpoints/n.e/0123/seed-0/step-00000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(8))
    for name in (TRACE, SNAPSHOT, KERNELS):
        (checkpoint.parents[1] / name).write_bytes(bytes(8))
    for name in ("work/tokens.npy", "turns/turn-3/go", "turns/turn-3/stop", "turns/turn-3/ready-0-of-1"):
        file = tmp_path / "results/old/checkpoints/n.e/4567" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "results/latest").symlink_to("old")
    for name in ("raw/wikitext-2", "processed/wikitext-2-0123", "raw/hub/org--model"):
        with staged(tmp_path / "data" / name) as work:
            (work / "records").mkdir()
            (work / "records/train.bin").write_bytes(bytes(100))
            write_manifest(work, name=name, source="mirror", detail="")
    (tmp_path / "data/README.md").write_text("")
    for name in ("fabric-0123456789ab", "megatron-core-0123456789ab"):
        (tmp_path / "data/frameworks" / name / "lib").mkdir(parents=True)
        (tmp_path / "data/frameworks" / name / "pyvenv.cfg").touch()
    return tmp_path


def names(checkout: Path, **options) -> set[str]:
    found = removable(checkout, checkout / "results", checkout / "data", **options)
    return {str(path.relative_to(checkout)) for path in found}


def everything(folder: Path) -> set[Path]:
    return {Path(place, name) for place, folders, files in os.walk(folder) for name in folders + files}


CACHES = {".pytest_cache", "hyperion/x/__pycache__", "phase1_hardware/.ipynb_checkpoints"}
RUNS = {"results/old", "results/latest", "results/relaunch", "results/h200-launches"}
DATA = {"data/raw", "data/processed", "data/frameworks"}


def test_caches_go_and_runs_and_data_only_when_asked(checkout):
    assert names(checkout) == CACHES
    assert names(checkout, staged_data=True) == CACHES | DATA
    results, data = checkout / "results", checkout / "data"
    with claimed_run(results, "live", {"profile": "smoke"}, {}):
        assert names(checkout, runs=True) == CACHES | RUNS
    for path in removable(checkout, results, data, runs=True, staged_data=True):
        remove(path)
    assert names(checkout, runs=True, staged_data=True) == set()
    assert (results / "reference/h100").is_dir() and (results / "no-run").is_dir() and (data / "README.md").is_file()


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("data/thesis.tex", "staged_data"),
        ("data/raw/thesis.tex", "staged_data"),
        ("data/raw/llama/model.safetensors", "staged_data"),
        ("data/raw/hub/mine/model.safetensors", "staged_data"),
        ("data/raw/wikitext-2/records/thesis.tex", "staged_data"),
        ("data/processed/wikitext-2-0123/thesis.tex", "staged_data"),
        ("data/raw/quarantine/thesis.tex", "staged_data"),
        ("data/frameworks/thesis.tex", "staged_data"),
        ("data/frameworks/mine-0123456789ab/pyvenv.cfg", "staged_data"),
        ("data/frameworks/fabric/pyvenv.cfg", "staged_data"),
        ("results/old/thesis.tex", "runs"),
        ("results/old/samples/thesis.tex", "runs"),
        ("results/old/checkpoints/n.e/0123/seed-0/step-best/model.safetensors", "runs"),
        ("results/old/checkpoints/n.e/0123/go", "runs"),
        ("results/relaunch/thesis.tex", "runs"),
        ("results/relaunch/A/thesis.tex", "runs"),
        ("results/relaunch/B/1/thesis.tex", "runs"),
        ("results/h200-launches/thesis.tex", "runs"),
        ("results/h200-launches/1/thesis.tex", "runs"),
    ],
)
def test_what_hyperion_did_not_write_is_listed_and_nothing_is_removed(checkout, place, option):
    (checkout / place).parent.mkdir(parents=True, exist_ok=True)
    (checkout / place).write_text("years of work")
    before = everything(checkout)
    with pytest.raises(HyperionError, match="nothing was removed") as refusal:
        names(checkout, **{option: True})
    listed = [Path(line.strip()) for line in str(refusal.value.where).splitlines()]
    assert any((checkout / place).is_relative_to(path) for path in listed), listed
    assert everything(checkout) == before


@pytest.mark.parametrize("place", ["data/raw/wikitext-2/records/train.bin", "results/old/rows.csv"])
def test_a_file_that_was_changed_since_is_the_users(checkout, place):
    with open(checkout / place, "ab") as file:
        file.write(b"my notes")
    with pytest.raises(HyperionError, match="changed after Hyperion wrote") as refusal:
        names(checkout, runs=True, staged_data=True)
    assert str(refusal.value.where) == str(checkout / place)


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("data/processed", "staged_data"),
        ("data/raw/wikitext-2", "staged_data"),
        ("data/raw/wikitext-2/records/linked", "staged_data"),
        ("data/raw/hub", "staged_data"),
        ("results/old/checkpoints", "runs"),
        ("results/old/checkpoints/n.e/linked", "runs"),
    ],
)
def test_links_are_not_followed(checkout, tmp_path_factory, place, option):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "thesis.tex").write_text("years of work")
    if (checkout / place).exists():
        os.rename(checkout / place, outside / "theirs")
    (checkout / place).symlink_to(outside)
    with pytest.raises(HyperionError, match="nothing was removed") as refusal:
        names(checkout, **{option: True})
    assert str(checkout / place) in str(refusal.value.where)


def test_linked_caches_and_runs_stay(checkout, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for name in ("build", "phase9_mine", "hyperion/y", "results/mine"):
        (checkout / name).symlink_to(outside)
    (outside / "__pycache__").mkdir()
    Run.create(outside, {"profile": "smoke"})
    assert names(checkout, runs=True) == CACHES | RUNS


def test_quarantine_and_a_killed_staging_are_removed_unless_the_user_put_something_there(checkout):
    moved = quarantine(checkout / "data/raw/wikitext-2", [DataFinding("train.bin", "a bit was flipped")])
    (checkout / "data/raw/quarantine/vocab.json.0123abcd").write_text("a proxy's login page")
    killed = checkout / "data/raw/.cifar-10.4711.0123abcd.part"
    killed.mkdir()
    (killed / "data_batch_1").write_bytes(bytes(10))
    assert names(checkout, staged_data=True) == CACHES | DATA
    (moved / "thesis.tex").write_text("years of work")
    with pytest.raises(HyperionError, match="nothing was removed"):
        names(checkout, staged_data=True)


@pytest.mark.parametrize("toml", ["", '[project]\nname = "other"\n', "not = [toml"])
def test_another_projects_caches_stay(checkout, toml):
    (checkout / "pyproject.toml").write_text(toml)
    (checkout / "build").mkdir()
    assert names(checkout) == set()


def test_without_a_checkout_there_are_no_caches(tmp_path):
    for name in ("build", "dist", "x.egg-info", "hyperion/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    assert removable(tmp_path, tmp_path / "results", tmp_path / "data", runs=True, staged_data=True) == []


def test_a_data_folder_that_is_the_home_folder_is_refused_without_being_searched(checkout):
    home = checkout / "home"
    (home / "photos/2024").mkdir(parents=True)
    (home / "photos/2024/a.jpg").write_bytes(b"x")
    with pytest.raises(HyperionError) as refusal:
        removable(checkout, checkout / "results", home, staged_data=True)
    assert str(refusal.value.where) == str(home / "photos")


def test_a_run_is_one_that_hyperion_made(checkout):
    (checkout / "results/theirs").mkdir()
    (checkout / "results/theirs/run.json").write_text("{}")
    assert names(checkout, runs=True) == CACHES | RUNS


def test_a_run_that_changed_within_the_hour_stays(checkout, monkeypatch):
    monkeypatch.setattr(housekeeping, "_SETTLED_S", 3600.0)
    assert names(checkout, runs=True) == CACHES
    for place, folders, files in os.walk(checkout / "results/old"):
        for name in [".", *folders, *files]:
            os.utime(Path(place, name), (0, 0))
    assert names(checkout, runs=True) == CACHES | {"results/latest", "results/old"}


def test_a_run_is_as_new_as_its_newest_file(tmp_path):
    file = tmp_path / "checkpoints" / "log.json"
    file.parent.mkdir()
    file.write_text("{}")
    before_s = time.time() - 7200
    for path in (file, file.parent, tmp_path):
        os.utime(path, (before_s, before_s))
    assert not _is_live(tmp_path)
    os.utime(file)
    assert _is_live(tmp_path)


def test_the_link_latest_is_removed_with_its_run_or_if_its_run_is_missing(checkout):
    link = checkout / "results/latest"
    with claimed_run(checkout / "results", "busy", {"profile": "smoke"}, {"profile": "smoke"}):
        link.unlink()
        link.symlink_to("busy")
        assert names(checkout, runs=True) == CACHES | RUNS - {"results/latest"}
        link.unlink()
        link.symlink_to("gone")
        assert names(checkout, runs=True) == CACHES | RUNS


def test_launches_that_are_being_measured_stay(checkout):
    with claimed_launch(checkout / "results/h200-launches/1"):
        assert names(checkout, runs=True) == CACHES | RUNS - {"results/h200-launches"}
    assert names(checkout, runs=True) == CACHES | RUNS


def test_what_a_killed_writer_left_is_removed_with_its_run(checkout):
    (checkout / "results/old/.rows.csv.0123456789abcdef0123456789abcdef.tmp").touch()
    assert names(checkout, runs=True) == CACHES | RUNS


@pytest.mark.parametrize("name", ["checkpoints/n.e/thesis.md", "logs/notes.odt"])
def test_files_that_no_training_writes_are_the_users(checkout, name):
    (checkout / "results/old" / name).parent.mkdir(exist_ok=True)
    (checkout / "results/old" / name).touch()
    with pytest.raises(HyperionError) as refusal:
        names(checkout, runs=True)
    assert name in str(refusal.value)


def test_an_edit_of_the_same_size_is_noticed_and_quarantined_data_may_have_changed(checkout):
    (checkout / "data/raw/wikitext-2/records/train.bin").write_bytes(b"x" * 100)
    with pytest.raises(HyperionError, match="train.bin"):
        names(checkout, staged_data=True)
    quarantine(checkout / "data/raw/wikitext-2", [DataFinding("records/train.bin", "changed")])
    assert names(checkout, staged_data=True) == CACHES | DATA
