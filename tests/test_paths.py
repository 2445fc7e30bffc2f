import os
from pathlib import Path

import pytest

import hyperion
from hyperion import paths
from hyperion.errors import HyperionError

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working folder without a checkout, and none of the variables."""
    for name in ("HYPERION_HOME", "HYPERION_RESULTS", "HYPERION_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The library in site-packages."""
    monkeypatch.setattr(hyperion, "__file__", str(tmp_path / "lib/python3/site-packages/hyperion/__init__.py"))


def made_checkout(folder: Path) -> Path:
    (folder / "phase1_hardware").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("")
    return folder


def test_in_a_checkout_the_root_is_the_one_around_the_working_folder(tmp_path, monkeypatch):
    assert paths.project_root() == CHECKOUT
    other = made_checkout(tmp_path / "other")
    monkeypatch.chdir(other / "phase1_hardware")
    assert paths.project_root() == other


def test_installed_the_root_is_the_working_folder_and_never_site_packages(tmp_path, installed):
    assert paths.project_root() == tmp_path
    assert paths.results_folder() == tmp_path / "results" and paths.data_folder() == tmp_path / "data"


def test_hyperion_home_comes_first_and_must_be_a_folder(tmp_path, monkeypatch, installed):
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HYPERION_HOME", "home")
    assert paths.project_root() == tmp_path / "home" and paths.reference_folder() == tmp_path / "home/results/reference"
    monkeypatch.setenv("HYPERION_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(HyperionError, match="names no folder"):
        paths.project_root()


def test_a_home_folder_that_is_not_known_is_an_error_only_where_it_is_named(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setenv("HYPERION_DATA", "~/data")
    with pytest.raises(HyperionError, match="home folder of user") as refusal:
        paths.data_folder()
    assert refusal.value.next_step.startswith("set HOME")
    assert os.path.isdir(paths.home_folder())
