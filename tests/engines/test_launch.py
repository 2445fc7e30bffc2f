"""Launching frameworks: the others continue after one was killed, and what is unavailable is no failure."""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hyperion.commands.frameworks import app
from hyperion.engines import STACKS, Record, Stack, stack_named
from hyperion.engines.launch import (
    Outcome,
    Unavailable,
    exit_code,
    failure_of,
    launch,
    launch_all,
    launch_in_turn,
    train_on_rank,
    wait_for_turn,
)
from hyperion.errors import HyperionError


def command(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def options(work, output: Path) -> list[str]:
    return ["--work", work.folder, "--steps", str(work.steps), "--batch-size", str(work.batch_size), "--output", str(output)]


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_framework_is_named_and_the_others_finish(tiny_work, tmp_path, monkeypatch):
    monkeypatch.setitem(STACKS, "killed", Stack("killed", "tests.engines.killed", ("transformers",)))
    ballast = b"x" * (1 << 30)  # memory of this process, which is no memory of a framework
    done = command("train", "killed", "plain loop", *options(tiny_work, tmp_path))
    del ballast
    assert done.exit_code == 1
    assert "1 of 2 frameworks failed: killed" in done.output
    assert "SIGKILL" in done.output
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["plain-loop.json"]
    record = Record.of(json.loads((tmp_path / "plain-loop.json").read_text()))
    assert len(record.losses) == tiny_work.steps and record.versions["transformers"]
    assert record.peak_memory_gib is None or 0.1 < record.peak_memory_gib < 1.0


@pytest.mark.parametrize("name", ["NeMo", "Primus", "Megatron-DeepSpeed"])
def test_an_unavailable_framework_ends_with_code_3_and_no_json(name, tiny_work, tmp_path, monkeypatch):
    for variable in ("PRIMUS_PATH", "MEGATRON_DEEPSPEED_PATH"):
        monkeypatch.delenv(variable, raising=False)
    done = command("train", name, *options(tiny_work, tmp_path / "out"))
    assert done.exit_code == 3, done.output
    assert "unavailable" in done.output and not (tmp_path / "out").exists()
    with pytest.raises(Unavailable) as error:
        launch(stack_named(name), tiny_work, tmp_path / "out")
    assert error.value.exit_code == 3 and error.value.next_step


def test_one_failure_decides_the_exit_code_and_the_unavailable_do_not():
    absent, failed = Outcome("a", reason="unavailable: not installed"), Outcome("b", reason="failed: killed by SIGKILL")
    trained = Outcome("c", record=object())  # type: ignore[arg-type]
    assert exit_code([trained, absent]) == 0
    assert exit_code([trained, absent, failed]) == 1
    assert exit_code([absent]) == 3


def test_the_others_are_launched_after_a_failure(monkeypatch):
    def launch_one(stack: Stack):
        if stack.name == "HF Trainer":
            raise HyperionError("was killed by SIGKILL\nline one\nlast line of the log")
        return stack.name

    outcomes = list(launch_all(map(stack_named, ("HF Trainer", "accelerate")), launch_one))
    assert [outcome.failed for outcome in outcomes] == [True, False]
    assert outcomes[0].reason == "failed: was killed by SIGKILL: last line of the log"


def test_frameworks_train_at_the_same_time_only_if_asked(monkeypatch):
    meeting = threading.Barrier(2, timeout=20)

    def launch_one(stack: Stack):
        meeting.wait()
        return stack.name

    outcomes = list(launch_all(map(stack_named, ("HF Trainer", "accelerate")), launch_one, at_once=2))
    assert [outcome.record for outcome in outcomes] == ["HF Trainer", "accelerate"]


def test_all_frameworks_start_before_the_first_one_trains_and_train_in_order(tmp_path):
    events = []

    def launch_one(stack: Stack, turn: Path, before: int):
        if stack.name == "HF Trainer":
            raise HyperionError("was killed by SIGKILL")
        time.sleep(0.3 if stack.name == "accelerate" else 0)  # the last framework imports longest
        events.append(("imported", stack.name))
        wait_for_turn(turn)
        events.append(("trains", stack.name))
        time.sleep(0.1)
        events.append(("ended", stack.name, before))
        return stack.name

    names = ("plain loop", "HF Trainer", "hyperion", "accelerate")
    outcomes = list(launch_in_turn([stack_named(name) for name in names], launch_one, tmp_path))
    assert [(outcome.stack, outcome.failed) for outcome in outcomes] == [(name, name == "HF Trainer") for name in names]
    assert "SIGKILL" in outcomes[1].log
    assert sorted(events[:3]) == [("imported", name) for name in ("accelerate", "hyperion", "plain loop")]
    trained = [("plain loop", 0), ("hyperion", 2), ("accelerate", 3)]
    assert events[3:] == [event for name, n in trained for event in (("trains", name), ("ended", name, n))]


def test_after_an_error_the_frameworks_that_wait_end(tmp_path):
    ended = []

    def launch_one(stack: Stack, turn: Path, before: int):
        try:
            wait_for_turn(turn)
        except HyperionError as error:
            ended.append(stack.name)
            raise error
        return stack.name

    outcomes = launch_in_turn([stack_named(name) for name in ("plain loop", "hyperion", "accelerate")], launch_one, tmp_path)
    assert next(outcomes).stack == "plain loop"
    outcomes.close()  # as after an interrupt
    assert sorted(ended) == ["accelerate", "hyperion"]


@pytest.mark.process
@pytest.mark.long
def test_the_ranks_of_a_framework_wait_for_their_turn(tiny_work, tmp_path):
    stacks = [stack_named(name) for name in ("hyperion ddp", "plain loop")]

    def launch_one(stack: Stack, turn: Path, before: int) -> Record:
        return launch(stack, tiny_work, tmp_path / stack.name.replace(" ", "-"), timeout_s=200, turn=turn)

    outcomes = list(launch_in_turn(stacks, launch_one, tmp_path / "turns"))
    assert [outcome.record and outcome.record.ranks for outcome in outcomes] == [2, 1], [one.log for one in outcomes]
    ready = sorted(path.name for path in (tmp_path / "turns").glob("turn-*/ready-*"))
    assert ready == ["ready-0-of-1", "ready-0-of-2", "ready-1-of-2"]


def test_a_run_without_the_packages_of_its_framework_is_refused(tiny_work, tmp_path, monkeypatch):
    monkeypatch.setattr("hyperion.engines.launch.run_job", lambda *arguments: _record_without_versions())
    with pytest.raises(HyperionError, match="did not import accelerate"):
        launch(stack_named("accelerate"), tiny_work, tmp_path)


def test_a_failure_in_a_traced_step_is_no_failure_of_the_framework(tiny_work, tmp_path, monkeypatch):
    adapter = ModuleType("failing_adapter")

    def train(work, observer):
        observer.start(observer, None, {"weight": torch.zeros(1)})
        for _ in range(tiny_work.steps + 1):
            observer.step(1.0, 1.0, 1)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(adapter, "train", train, raising=False)
    monkeypatch.setitem(sys.modules, "failing_adapter", adapter)
    values = {"adapter": "failing_adapter", "name": "failing", "packages": [], "folder": str(tmp_path), "options": {}}
    timed = replace(tiny_work, timed=True)
    record = Record.of(train_on_rank(work=replace(timed, traced=2).as_dict(), **values))
    assert len(record.step_times_s) == tiny_work.steps and record.trace is None
    assert record.unreadable["trace"] == "not traced: RuntimeError: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        train_on_rank(work=timed.as_dict(), **values)


def test_the_steps_of_a_run_are_reported(tiny_work, tmp_path, monkeypatch):
    def run_job(job, on_line, on_progress) -> dict:
        for done, loss in ((1, "5.25"), (2, ""), (3, "nan")):
            on_progress(done, 3, loss)
        return _record_without_versions() | {"versions": {"accelerate": "1"}}

    monkeypatch.setattr("hyperion.engines.launch.run_job", run_job)
    steps = []
    launch(stack_named("accelerate"), tiny_work, tmp_path, on_step=lambda step, loss: steps.append((step, str(loss))))
    assert steps == [(1, "5.25"), (2, "None"), (3, "nan")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: "),
        (b"text", "cannot be read: "),
        (np.array([{}], dtype=object), "cannot be read: "),
        (np.arange(10), r"has the shape \[10\]"),
        (np.zeros((4, 17)), "dtype float64, not rows of integers"),
        (np.zeros((4, 1), np.int64), r"has the shape \[4, 1\]"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_refused(content, said, tmp_path):
    if isinstance(content, bytes):
        (tmp_path / "tokens.npy").write_bytes(content)
    elif content is not None:
        np.save(tmp_path / "tokens.npy", content, allow_pickle=True)
    with pytest.raises(HyperionError, match=said) as error:
        CliRunner().invoke(app, ["train", "plain loop", "--work", str(tmp_path)], catch_exceptions=False)
    assert error.value.where == tmp_path / "tokens.npy" and error.value.next_step


def test_a_number_format_that_no_adapter_knows_is_refused(tiny_work, tmp_path):
    """All of them would train in float32 under its name."""
    with pytest.raises(HyperionError, match="the number format of the work is 'fp16'"):
        replace(tiny_work, dtype="fp16")
    assert command("train", "plain loop", *options(tiny_work, tmp_path), "--dtype", "fp16").exit_code == 2


def test_unknown_names_are_listed(tiny_work, tmp_path):
    with pytest.raises(HyperionError, match="no framework is named 'acelerate'") as error:
        stack_named("acelerate")
    assert "accelerate" in str(error.value)


def test_the_cause_of_a_failure_is_short():
    assert failure_of(HyperionError("one line")) == "one line"
    assert len(failure_of(HyperionError("a\n" + "b" * 1000))) == 300


def _record_without_versions() -> dict:
    values = {name: [] for name in ("losses", "norms", "clipped_norms", "step_times_s", "rows", "groups")}
    texts = dict.fromkeys(("stack", "engine", "device", "initial_sha256", "final_file"), "")
    numbers = dict.fromkeys(("ranks", "counted_tokens", "optimizer_steps", "peak_memory_gib", "energy_steps"), 0)
    return values | texts | numbers | {"versions": {}, "reduced": {}, "energy_j": None, "trace": None, "unreadable": {}}
