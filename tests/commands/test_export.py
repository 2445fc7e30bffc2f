"""A run in the formats of other tools: what was written is read back and compared with the rows.

TensorBoard and wandb are optional. `.ci/run` installs them for this file.
"""

import errno
import json
import math
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from hyperion.cli import app, main
from hyperion.commands.export import bencher_metrics, curves, scalars, start_times_s
from hyperion.errors import HyperionError
from hyperion.results import Row, Run
from hyperion.results.places import stored_references

TAG = "02_x/training/loss/step lm bf16 seed=0"
# Names of columns that may contain losses.
LOSSES = r"loss|accuracy|perplexity|^alone$|^sharded$"
# Columns of the ends of an interval, which are no curves.
INTERVAL_ENDS = ("_ci_low", "_ci_high")
# Experiments whose samples have steps and such columns, but no curves, with the reason.
NO_CURVES = {"02_core_framework/recovery": "one row for each interruption; `losses` says whether the losses were equal"}


@pytest.fixture
def run(tmp_path) -> Run:
    """Two rows with a value, one of them with an interval, a row without a value, and three curves."""
    run = Run.create(tmp_path / "run", {"profile": "smoke", "environment": {}})
    where = {"notebook": "02_x", "experiment": "training"}
    limit = {"limit_source": "no limit: made up"}
    rows = [
        Row(**where, variant="lm", dtype="bf16", metric="training_loss", value=2.5, params={"batch": 8, "epoch": 1}, **limit),
        Row(**where, variant="lm", metric="latency_s", value=0.5, n=30, ci_low=0.4, ci_high=0.7, rank=1, **limit),
        Row(**where, variant="lm", metric="count", value=None, value_reason="out of memory"),
    ]
    steps = pd.DataFrame(
        {"kind": "step", "step": [1, 2, 3], "loss": [4.0, 3.0, 2.5], "variant": "lm", "dtype": "bf16", "seed": 0}
    )
    twin = pd.DataFrame({"kind": ["twin"], "step": [1], "loss": [9.0], "variant": ["lm"], "dtype": ["bf16"], "twin": [2]})
    evaluation = pd.DataFrame({"kind": ["evaluation"], "step": [3], "accuracy": [0.75], "variant": ["lm"], "dtype": ["bf16"]})
    run.record("02_x", "training", rows, pd.concat([steps, twin, evaluation], ignore_index=True), input_hash="h")
    return run


def export(run: Run, *arguments: str):
    return CliRunner().invoke(app, ["export", str(run.folder), *arguments], catch_exceptions=False)


def test_bencher_metrics_have_values_and_intervals(run, tmp_path):
    done = export(run, "--to", "bmf", "--output", str(tmp_path / "bmf.json"))
    assert done.exit_code == 0 and "2 values of 2 benchmarks" in done.output
    assert json.loads((tmp_path / "bmf.json").read_text()) == {
        "02_x/training/lm bf16 batch=8 epoch=1": {"training_loss": {"value": 2.5}},
        "02_x/training/lm rank=1": {"latency_s": {"value": 0.5, "lower_value": 0.4, "upper_value": 0.7}},
    }


def test_flat_tables_are_files_of_a_new_folder(run, tmp_path):
    done = export(run, "--to", "csv", "--out", str(tmp_path / "flat"))
    file = tmp_path / "flat/training/epoch_metrics.csv"
    assert done.exit_code == 0 and done.output.split() == [str(file)]
    (line,) = file.read_text().splitlines()[1:]
    assert line.startswith("training,lm,,1,train,2.5,")
    assert [path for path in (tmp_path / "flat").rglob("*") if path.is_file()] == [file]


def test_a_run_without_flat_tables_is_refused_and_no_folder_is_left(run, tmp_path):
    run.record("02_x", "training", [row for row in run.rows() if row.metric != "training_loss"], pd.DataFrame(), input_hash="h")
    with pytest.raises(HyperionError, match="no flat table") as refused:
        export(run, "--to", "csv", "--output", str(tmp_path / "flat"))
    # The rows of a researcher's own subject are a CSV already, and its figures.py may define tables.
    assert "rows.csv" in refused.value.next_step and "flat_tables" in refused.value.next_step
    assert not (tmp_path / "flat").exists()


def test_no_two_rows_of_a_reference_have_one_name():
    run = Run.open(_reference("h100"))
    rows = [row for row in run.rows() if row.value is not None]
    assert sum(map(len, bencher_metrics(rows).values())) == len(rows)


def test_curves_are_those_of_the_samples(run):
    assert curves(run) == {
        TAG: [(1, 4.0), (2, 3.0), (3, 2.5)],
        "02_x/training/loss/twin lm bf16 twin=2": [(1, 9.0)],
        "02_x/training/accuracy/evaluation lm bf16": [(3, 0.75)],
    }
    losses = curves(Run.open(_reference("h100")))
    model = "02_core_framework/language_model/loss/step lm_d256_h4_l2 seed=0"
    found = [tag for tag in losses if tag.startswith("02_core_framework/language_model/loss/step")]
    assert found and all(len({step for step, _ in losses[tag]}) == len(losses[tag]) > 10 for tag in found), model


@pytest.mark.parametrize("reference", stored_references(), ids=lambda run: run.folder.name)
def test_every_loss_over_steps_of_a_reference_is_a_point_of_one_curve(reference):
    found = curves(reference)
    for name in reference.experiments():
        samples = reference.samples(*name.split("/"))
        if "step" not in samples.columns or name in NO_CURVES:
            continue
        points = [point for tag, curve in found.items() if tag.startswith(f"{name}/") for point in curve]
        columns = [column for column in samples.columns if re.search(LOSSES, column) and not column.endswith(INTERVAL_ENDS)]
        values = samples[columns]
        assert len(points) == values[samples["step"].notna()].notna().sum().sum() > 0, name
    assert all(len({step for step, _ in curve}) == len(curve) for curve in found.values())
    assert not any("again=" in tag for tag in found)  # all columns that tell curves apart are known


def test_curves_are_told_apart_by_all_texts_and_by_their_order_if_nothing_else_does(run):
    table = pd.DataFrame(
        {
            "step": [1, 2, 1, 2, 1, 1],
            "loss": [5.0, 4.0, 7.0, 6.0, 3.0, 8.0],
            "layout": ["DP 2", "DP 2", "TP 2", "TP 2", None, "TP 2"],
            "ranks": [1, 1, 1, 1, 4, 1],
            "norm": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        }
    )
    run.record("02_x", "training", [], table, input_hash="h")
    run.record("02_x", "alone", [], pd.DataFrame({"step": [1, 2], "loss": [5.0, 4.0]}), input_hash="h")
    assert curves(run) == {
        "02_x/training/loss/layout=DP 2 ranks=1": [(1, 5.0), (2, 4.0)],
        "02_x/training/loss/layout=TP 2 ranks=1": [(1, 7.0), (2, 6.0)],
        "02_x/training/loss/layout=TP 2 ranks=1 again=1": [(1, 8.0)],
        "02_x/training/loss/ranks=4": [(1, 3.0)],
        "02_x/alone/loss": [(1, 5.0), (2, 4.0)],
    }


def test_an_output_that_exists_is_kept(run, tmp_path):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(HyperionError, match="exists already"):
        export(run, "--to", "bmf", "--output", str(tmp_path / "there"))
    assert (tmp_path / "there").read_text() == "mine"


@pytest.mark.parametrize(("to", "function"), [("bmf", "Path.write_text"), ("csv", "write_flat_tables")])
def test_of_an_output_that_does_not_fit_on_the_disk_nothing_is_left(run, tmp_path, monkeypatch, to, function):
    def fill(*arguments, **named):
        path = next(one for one in arguments if isinstance(one, Path))
        path.mkdir() if to == "csv" else path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"hyperion.commands.export.{function}", fill)
    with pytest.raises(HyperionError, match="the disk is full; nothing of the output is kept") as refusal:
        export(run, "--to", to, "--output", str(tmp_path / "out"))
    assert "--output" in str(refusal.value) and str(tmp_path / "out") in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("an error of wandb")], ids=["Ctrl-C", "other"])
def test_of_an_interrupted_output_nothing_is_left_and_the_next_call_writes_it(run, tmp_path, monkeypatch, error):
    def fail(run, folder):
        folder.mkdir()
        (folder / "part").touch()
        raise error

    arguments = ["export", str(run.folder), "--to", "wandb", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("hyperion.commands.export.write_wandb", fail)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0 and not (tmp_path / "out").exists()
    monkeypatch.setattr("hyperion.commands.export.write_wandb", lambda run, folder: 3)
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_the_time_of_an_experiment_is_its_start_or_that_of_the_rows(run):
    run.record("02_x", "later", [], pd.DataFrame({"x": [1.0]}), input_hash="h", started_at="2026-11-26T01:00:21.963+00:00")
    os.utime(run.folder / "rows.csv", (1e9, 1e9))
    assert start_times_s(run) == {"02_x/training": 1e9, "02_x/later": 1795654821.963}


def test_the_folder_of_a_new_file_is_created(run, tmp_path):
    export(run, "--to", "bmf", "--output", str(tmp_path / "new" / "run.json"))
    assert json.loads((tmp_path / "new" / "run.json").read_text())


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_named(run, tmp_path, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["hyperion", "export", str(run.folder), "--to", package, "--output", str(tmp_path / "out")])
    assert main() == 2
    assert f"python -m pip install {package}" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_tensorboard_reads_what_was_written(run, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = export(run, "--to", "tensorboard", "--output", str(tmp_path / "events"))
    assert done.exit_code == 0 and "9 points" in done.output
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (tmp_path / "events").iterdir()
    read: dict[str, list[tuple[int, float]]] = {}
    times_s: dict[str, list[float]] = {}
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
            read.setdefault(value.tag, []).append((event.step, number))
            times_s.setdefault(value.tag, []).append(event.wall_time)
    start_s = start_times_s(run)["02_x/training"]
    assert start_s > 0 and times_s[TAG] == [start_s, start_s + 1, start_s + 2]
    assert all(times[0] == start_s for times in times_s.values())
    _assert_same(read, scalars(run), relative=2.0**-23)


@pytest.mark.slow
@pytest.mark.process
def test_an_offline_run_of_weights_and_biases_holds_what_was_written(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    done = export(run, "--to", "wandb", "--output", str(tmp_path / "offline"))
    assert done.exit_code == 0 and "9 points" in done.output
    from wandb.proto import wandb_internal_pb2

    (file,) = (tmp_path / "offline").rglob("*.wandb")
    read, summary = {}, {}
    for data in _log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        history = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for tag in (name for name in history if f"{name}/at" in history):
            read.setdefault(tag, []).append((history[f"{tag}/at"], history[tag]))
        summary |= {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.summary.update}
    assert read == curves(run)
    expected = {tag: points[0][1] for tag, points in scalars(run).items() if tag not in read}
    assert {tag: summary[tag] for tag in expected} == expected


def _log_records(content: bytes) -> Iterator[bytes]:
    """The records of a wandb file: LevelDB's log format in blocks of 32 KiB, after a header of 7 bytes."""
    assert content[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # too little is left of the block for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)  # after the checksum
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def _assert_same(read: dict, written: dict, relative: float) -> None:
    assert read.keys() == written.keys()
    for tag, points in written.items():
        assert [step for step, _ in read[tag]] == [step for step, _ in points]
        assert all(math.isclose(a, b, rel_tol=relative) for (_, a), (_, b) in zip(read[tag], points, strict=True))


def _reference(name: str):
    from hyperion.paths import reference_folder

    return reference_folder() / name
