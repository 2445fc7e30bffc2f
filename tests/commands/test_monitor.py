"""`hyperion monitor --run`: the energy per token of the experiments that ran meanwhile, and of no others."""

import os
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from hyperion.cli import app
from hyperion.commands import monitor
from hyperion.commands.monitor import measured_rates
from hyperion.errors import HyperionError
from hyperion.hardware.device import Device
from hyperion.hardware.monitoring import Reading
from hyperion.hardware.telemetry import Telemetry
from hyperion.results import Row, Run
from hyperion.results.store import samples_name

NOTEBOOK = "02_core_framework"


def rate(experiment: str, value: float, rank: int | None = None, **params) -> Row:
    return Row(
        notebook=NOTEBOOK,
        experiment=experiment,
        variant="v",
        dtype="bf16",
        metric="tokens_per_s",
        value=value,
        n=3,
        ci_low=value,
        ci_high=value,
        params=params,
        rank=rank,
        limit_source="no limit: made up",
    )


def record(run: Run, experiment: str, rows: list[Row], started_at: str) -> Path:
    run.record(NOTEBOOK, experiment, rows, pd.DataFrame({"x": [1.0]}), input_hash="h", started_at=started_at)
    return run.folder / samples_name(NOTEBOOK, experiment)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", {"profile": "smoke"})


def at(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")


def test_only_experiments_that_started_meanwhile_count_with_all_their_rows_of_all_ranks(run):
    record(run, "before", [rate("before", 10.0)], at(999.0))
    record(run, "unknown", [rate("unknown", 10.0)], "")
    rows = [rate("inside", 20.0, epoch=1), rate("inside", 40.0, epoch=2), rate("inside", 5.0, rank=0, epoch=2)]
    os.utime(record(run, "inside", rows, at(1001.0)), (1009.0, 1009.0))
    found = measured_rates(str(run.folder), 1000.0)
    assert [(one.name, one.tokens_per_s) for one in found] == [("inside v bf16 epoch=1", 20.0), ("inside v bf16 epoch=2", 40.0)]
    assert {(one.started_s, one.ended_s) for one in found} == {(1001.0, 1009.0)}


def test_a_touched_file_makes_no_row_new(run):
    samples = record(run, "before", [rate("before", 10.0)], at(999.0))
    for file in (samples, run.folder / "rows.csv", run.folder / "experiments.json"):
        os.utime(file)
    with pytest.raises(HyperionError, match="started while the monitor ran") as caught:
        measured_rates(str(run.folder), 1000.0)
    assert "--tokens" in str(caught.value.next_step)


def test_the_power_is_that_of_the_time_of_the_experiment(run, monkeypatch):
    """The device takes 100 W before the experiment, 500 W in it, and 100 W after it."""
    device = Device("cpu", 0, "made up", "x86_64", 1, 1, None, "cpu")

    class Watching:
        devices, overhead = [device], 0.0

        def __init__(self, devices, interval_s):
            now_s = monitor.time.monotonic()
            powers = [100.0] * 11 + [500.0] * 9 + [100.0] * 10
            self.readings = [[Reading(now_s + n, Telemetry(power_w=power)) for n, power in enumerate(powers)]]

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def summaries(self):
            return []

    def command(words) -> int:
        now_s = monitor.time.time()
        samples = record(run, "training", [rate("training", 50.0)], at(now_s + 10.9))
        os.utime(samples, (now_s + 19.1, now_s + 19.1))
        return 0

    monkeypatch.setattr(monitor, "Monitor", Watching)
    monkeypatch.setattr(monitor, "system_devices", lambda: [device])
    monkeypatch.setattr(monitor, "run_watched", command)
    record(run, "before", [rate("before", 10.0)], at(monitor.time.time() - 1))
    done = CliRunner().invoke(app, ["monitor", "--run", str(run.folder), "--", "train"])
    assert done.exit_code == 0 and "training v bf16: 10 J per token" in done.output and "before" not in done.output, done.output


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_an_output_that_cannot_be_written_is_refused_before_the_command_runs(option, tmp_path):
    ran = tmp_path / "ran"
    result = CliRunner().invoke(app, ["monitor", option, str(tmp_path / "absent/file.png"), "--", "touch", str(ran)])
    assert isinstance(result.exception, FileNotFoundError) and not ran.exists()


def test_a_run_without_rates_takes_neither_the_summary_nor_the_readings(tmp_path):
    readings = tmp_path / "readings.csv"
    result = CliRunner().invoke(app, ["monitor", "--run", str(tmp_path / "none"), "--csv", str(readings), "--", "true"])
    assert isinstance(result.exception, HyperionError)
    assert "the monitor used" in result.output and readings.read_text().startswith("time_s,")


def test_the_exit_code_of_a_command_that_failed_is_kept_if_its_run_has_no_rates(tmp_path):
    result = CliRunner().invoke(app, ["monitor", "--run", str(tmp_path / "none"), "--", "sh", "-c", "exit 7"])
    assert result.exit_code == 7 and "no energy per token: no run" in result.output


def test_a_picture_of_another_format_is_refused_before_the_command_runs(tmp_path):
    ran = tmp_path / "ran"
    result = CliRunner().invoke(app, ["monitor", "--plot", str(tmp_path / "readings.pdf"), "--", "touch", str(ran)])
    assert "does not end in .png" in str(result.exception) and not ran.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_watch_and_the_readings_are_kept(number, code, tmp_path, monkeypatch):
    sleep = time.sleep

    def interrupted(seconds):
        sleep(0.2)
        os.kill(os.getpid(), number)
        sleep(seconds)

    monkeypatch.setattr(monitor.time, "sleep", interrupted)
    # Shells start programs in the background with SIGINT ignored, which the tests inherit.
    earlier_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    table, picture = tmp_path / "m.csv", tmp_path / "m.png"
    earlier = signal.getsignal(signal.SIGTERM)
    options = ["--interval", "0.05s", "--duration", "60s", "--csv", str(table), "--plot", str(picture)]
    try:
        done = CliRunner().invoke(app, ["monitor", *options])
    finally:
        signal.signal(signal.SIGINT, earlier_interrupt)
    assert done.exit_code == code and "the monitor used" in done.output, done.output
    assert len(table.read_text().splitlines()) > 2 and picture.read_bytes().startswith(b"\x89PNG")
    assert signal.getsignal(signal.SIGTERM) is earlier


@pytest.mark.parametrize(("command", "code"), [("true", 2), ("exit 7", 7)])
def test_a_file_that_can_no_longer_be_written_takes_neither_the_other_file_nor_the_exit_code(command, code, tmp_path):
    table, picture = tmp_path / "m.csv", tmp_path / "m.png"
    script = f"rm {table}; mkdir {table}; {command}"
    done = CliRunner().invoke(app, ["monitor", "--csv", str(table), "--plot", str(picture), "--", "sh", "-c", script])
    assert done.exit_code == code and f"{table} cannot be written: Is a directory" in done.output.replace("\n", ""), done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
