"""Which run a call works in, and the ledger there."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pandas as pd
import pytest

from hyperion.errors import HyperionError
from hyperion.reproduce.runs import Entry, Ledger, claimed_run, earlier_seconds, in_use, peek
from hyperion.results import Row, Run, StoreError
from hyperion.results.execution import unexpected_in

SETTING = {"profile": "smoke", "seed": 0}


def claim(results: Path, name=None, setting=SETTING):
    return claimed_run(results, name, setting, {"profile": setting["profile"]})


def test_the_newest_run_of_the_same_setting_is_continued(tmp_path):
    with claim(tmp_path) as (first, existed):
        assert not existed
    with claim(tmp_path, setting=SETTING | {"seed": 1}) as (other, existed):
        assert not existed and other.run.folder != first.run.folder
    with claim(tmp_path) as (again, existed):
        assert existed and again.run.folder == first.run.folder


def test_two_calls_at_once_get_two_folders(tmp_path):
    with claim(tmp_path) as (first, _), claim(tmp_path) as (second, _):
        assert first.run.folder != second.run.folder
        assert in_use(first.run.folder) and in_use(second.run.folder)
        with pytest.raises(HyperionError, match="another call"), claim(tmp_path, first.run.folder.name):
            pass
    assert not in_use(first.run.folder)


def test_new_and_named_runs(tmp_path):
    with claim(tmp_path, "mine") as (ledger, existed):
        assert not existed and ledger.run.folder == tmp_path / "mine"
    with claim(tmp_path, "mine") as (_, existed):
        assert existed
    with claim(tmp_path, "new") as (ledger, existed):
        assert not existed and ledger.run.folder != tmp_path / "mine"
    other = SETTING | {"seed": 7}
    with pytest.raises(HyperionError, match="another setting: seed is 0 there and 7 now"), claim(tmp_path, "mine", other):
        pass
    with pytest.raises(HyperionError, match="cannot be the name"), claim(tmp_path, "latest"):
        pass


@pytest.mark.parametrize("name", ["rows.csv", "reproduce.json"])
def test_an_edited_run_is_never_built_upon(tmp_path, name):
    with claim(tmp_path) as (ledger, _):
        row = Row(notebook="n", experiment="e", variant="v", metric="count", value=1.0)
        ledger.run.record("n", "e", [row], pd.DataFrame({"x": [1]}), input_hash="h")
        path = ledger.run.folder / name
    path.write_text(path.read_text().replace("1", "2", 1) + " ")
    with pytest.raises(StoreError) as caught, claim(tmp_path):
        pass
    assert str(path) in str(caught.value) and "RUN=new" in caught.value.next_step
    with claim(tmp_path, "new"):
        pass


def test_a_folder_that_lost_its_run_json_is_no_run(tmp_path):
    with claim(tmp_path) as (lost, _):
        pass
    (lost.run.folder / "run.json").unlink()
    with claim(tmp_path) as (other, existed):
        assert not existed and other.run.folder != lost.run.folder
    assert earlier_seconds(tmp_path, SETTING, "01_x") is None


def test_a_results_folder_that_cannot_be_written_is_named_and_left_alone(tmp_path):
    blocker = tmp_path / "results"
    blocker.write_text("a file where the folder should be")
    with pytest.raises(StoreError) as caught, claim(blocker):
        pass
    assert str(blocker) in str(caught.value)
    assert os.listdir(tmp_path) == ["results"]


def test_a_run_that_cannot_be_started_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError), claimed_run(tmp_path, None, SETTING, {"not json-able": float("nan")}):
        pass
    assert os.listdir(tmp_path) == []


def test_earlier_durations_are_those_of_goes_that_measured_all_in_the_newest_run_of_the_setting(tmp_path):
    with claim(tmp_path) as (ledger, _):
        ledger.keep("01_x", Entry("done", {"a": "h"}, 0.5, 1, whole_s=12.0))
        ledger.keep("02_y", Entry("done", {"a": "h"}, 9.0, 1))  # measured but a part
    (tmp_path / "damaged").mkdir()
    for name in ("run.json", "reproduce.json"):
        (tmp_path / "damaged" / name).write_text("{")
    assert earlier_seconds(tmp_path, SETTING, "01_x") == 12.0
    assert earlier_seconds(tmp_path, SETTING, "02_y") is None
    assert earlier_seconds(tmp_path, SETTING | {"seed": 5}, "01_x") is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_runs_are_claimed_without_flock(tmp_path, monkeypatch, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claim(tmp_path, "mine") as (ledger, _):
        assert in_use(ledger.run.folder)
        with pytest.raises(HyperionError, match="another call"), claim(tmp_path, "mine"):
            pass
    assert not in_use(tmp_path / "mine")
    with claim(tmp_path, "mine") as (_, existed):
        assert existed


@pytest.mark.parametrize(("number", "refused"), [(errno.EROFS, False), (errno.EACCES, True)])
def test_a_run_on_a_read_only_file_system_is_not_in_use(tmp_path, monkeypatch, number, refused):
    with claim(tmp_path, "mine"):
        pass
    opened = os.open

    def refuse(path, flags, *options):
        if Path(path).name == ".driver.lock":
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *options)

    monkeypatch.setattr(os, "open", refuse)
    if not refused:
        assert not in_use(tmp_path / "mine")
        return
    with pytest.raises(StoreError, match="cannot find out whether a running call uses this run: Permission denied") as caught:
        in_use(tmp_path / "mine")
    assert "use a copy of the run" in caught.value.next_step and "RUN=new" not in caught.value.next_step


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_driver_lock_or_ledger_that_is_no_regular_file_is_refused(tmp_path, kind):
    for name in (".driver.lock", "reproduce.json"):
        with claim(tmp_path / name, "mine") as (ledger, _):
            path = ledger.run.folder / name
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "outside")
        with pytest.raises(StoreError), claim(tmp_path / name, "mine"):
            pass
        assert not (tmp_path / "outside").exists()


def test_entries_survive_and_answer_what_is_done(tmp_path):
    ledger = Ledger.new(Run.create(tmp_path, {}), {"profile": "smoke"})
    ledger.keep("01_x", Entry("done", {"a": "bc"}, 1.5, 3), {"notebooks/01_x.html": b"page"})
    ledger.keep("02_y", Entry("failed", {"a": "bc"}, 1.5, 0, "why"))
    assert unexpected_in(ledger.run) == {}
    ledger.keep("04_w", Entry("unexpected", {"a": "bc"}, 1.5, 2, "1 unexpected", remeasure=True, unexpected=("loss 7, above 4",)))
    ledger.keep_exported("rows and code")
    again = Ledger.of(Run.open(tmp_path))
    assert again.entries == ledger.entries and again.setting == {"profile": "smoke"} and again.exported == "rows and code"
    assert again.is_done("01_x", {"a": "bc"}) and not again.is_done("01_x", {"a": "other"})
    assert unexpected_in(again.run) == {"04_w": ["loss 7, above 4"]} and not again.is_done("04_w", {"a": "bc"})
    assert not again.is_done("02_y", {"a": "bc"}) and not again.is_done("03_z", {"a": "bc"})
    assert Run.open(tmp_path).read("notebooks/01_x.html") == b"page"


def test_a_ledger_of_version_0_1_is_read_and_its_notebooks_are_stale(tmp_path):
    ledger = Ledger.new(Run.create(tmp_path, {}), {"profile": "smoke", "mirror": True})
    ledger.keep("01_x", Entry("done", {"a": "bc"}, 1.5, 3))
    old = json.loads((tmp_path / "reproduce.json").read_text())
    old["notebooks"]["01_x"]["hash"] = "".join(old["notebooks"]["01_x"].pop("inputs").values())
    ledger.run.write({"reproduce.json": json.dumps(old).encode()})
    assert Ledger.of(Run.open(tmp_path)).entries["01_x"].inputs == {"all inputs": "bc"}
    assert peek(tmp_path).notebooks["01_x"].seconds == 1.5 and peek(tmp_path).setting == {"profile": "smoke"}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"setting": {}}'])
def test_a_damaged_ledger_is_named(tmp_path, damage):
    (tmp_path / "reproduce.json").write_text(damage)
    with pytest.raises(StoreError) as caught:
        peek(tmp_path)
    assert caught.value.where == tmp_path / "reproduce.json" and "RUN=new" in caught.value.next_step
