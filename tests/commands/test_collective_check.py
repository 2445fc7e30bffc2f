"""test_nccl.py as a reader starts it, and what its ranks say when one of them hangs or dies."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hyperion
from hyperion.commands.collective_check import Check, app, bucket_lines, launch
from hyperion.hardware.telemetry import unreadable
from hyperion.measure import CollectiveMeasurement, Timing, Verification
from hyperion.measure.collectives.collectives import ALL_COLLECTIVES
from hyperion.processes import Job, RankError, run_ranks
from tests.measure import collective_ranks

pytestmark = pytest.mark.book

ROOT = Path(hyperion.__file__).resolve().parent.parent
SCRIPT = ROOT / "phase2_development" / "test_nccl.py"


def torchrun(words: list[str], folder: Path, **environment) -> tuple[subprocess.CompletedProcess, float]:
    """Two ranks on the CPU started from `folder`, and the seconds they took."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *words]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=os.environ | hidden | environment, capture_output=True, text=True, timeout=120)
    return done, time.monotonic() - started


@pytest.mark.process
@pytest.mark.long
def test_the_command_runs_as_printed_from_any_directory(tmp_path):
    done, _ = torchrun([str(SCRIPT), "--sizes", "8,20K", "--dtypes", "bf16", "--overlap", "64K"], tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    header, *lines, verdict = done.stdout.strip().splitlines()
    assert header.startswith("2 ranks, gloo, ")
    assert any(line.startswith("NUMA node") for line in lines)
    columns = next(line for line in lines if line.startswith("bf16, busbw GB/s"))
    assert set(ALL_COLLECTIVES) <= set(columns.split())
    rates = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines if line[0] in "82"}
    assert list(rates) == ["8", "20480"] and all(len(line) == 7 and min(line) > 0 for line in rates.values())
    assert any(line.startswith("all_gather: bytes = ") and "busbw = 0.5 x bytes / time" in line for line in lines)
    assert any(line.startswith("all_reduce of 65,536 bytes, bf16, 2 ranks: ") and "overlapped" in line for line in lines)
    assert verdict.startswith("ok: 14 collectives, every value right on each of 2 ranks")


@pytest.mark.process
def test_a_rank_that_hangs_is_named_with_the_place_where_it_stands(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    started = time.monotonic()
    with pytest.raises(RankError) as ended:
        job = Job(collective_ranks.hangs, {"name": "send_recv"}, timeout_s=100, ranks=2)
        run_ranks(job, on_line=lambda line: None)
    assert time.monotonic() - started < 60
    assert ended.value.rank == 1
    message = ended.value.what
    assert re.search(r"rank 1 is missing: the last collective that it entered was collective \d+ \(", message)
    assert "rank 0 reached collective" in message and "rank 0 is missing" not in message
    assert "stack of rank 1:" in message and "time.sleep(600)" in message


@pytest.mark.process
def test_a_rank_that_dies_is_named_with_its_signal():
    done, seconds = torchrun(["-m", "tests.measure.collective_ranks", "reduce"], ROOT)
    assert done.returncode != 0 and seconds < 60
    cause = done.stderr.rpartition("Root Cause")[2]
    assert re.search(r"rank\s*: 1\b", cause) and "SIGKILL" in cause, done.stderr[-3000:]
    assert "ok:" not in done.stdout


def made_up(name: str, latency_s: float, gb_per_s: float, sizes: list[int]) -> list[CollectiveMeasurement]:
    collective = ALL_COLLECTIVES[name]
    measured = []
    for size in sizes:
        seconds = latency_s + size * collective.bus_factor(4) / gb_per_s / 1e9
        timing = Timing(np.full(30, seconds), (seconds,), True, False, "interval", unreadable("made up"))
        measured.append(CollectiveMeasurement(collective, "bf16", size, 4, timing, Verification("exact", 0.0, 0.0)))
    return measured


def test_the_size_that_is_large_enough_is_told_for_every_sweep_of_three_sizes():
    sizes = [8, 1 << 12, 1 << 20, 1 << 28]
    first, second = bucket_lines(
        [
            *made_up("all_reduce", 20e-6, 300, sizes),
            *made_up("all_gather", 20e-6, 300, sizes),
            *made_up("reduce", 20e-6, 300, sizes[:2]),
        ]
    )
    # 9 x 20 us x 300 GB/s cross a link: 54 MB, of which an all-reduce of four ranks moves 1.5 x S, an all-gather 0.75 x S.
    assert first.startswith("bf16 all_reduce: 90% of its bandwidth from 34.3 MiB on") and "bucket_cap_mb=35" in first
    assert first.endswith("; measured, 25 MiB reach 67% of the highest bandwidth") and "measured" not in second
    assert second.startswith("bf16 all_gather: 90% of its bandwidth from 68.7 MiB on") and "36 M parameters" in second


@pytest.mark.process
def test_what_does_not_fit_into_memory_is_left_out_and_said(monkeypatch, capsys):
    """An all-reduce of an exbibyte is not tried, and the others are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    launch(Check([8], ["fp32"], time_limit_s=0.01, largest=1 << 60), ranks=2)
    message = capsys.readouterr().out
    assert "left out: all_reduce, fp32, 1,152,921,504,606,846,976 bytes need 2147483650.0 GiB on every rank" in message
    assert "ok: 7 collectives" in message and "1 left out, because" in message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--largest", "8T"], "is not a list"),
        (["--sizes", "8x"], "is not a list"),
        (["--sizes", "0"], "is not a list"),
        (["--dtypes", "bf17"], "unknown dtype bf17"),
        (["--backend", "gloo"], "--backend works only"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_starts(options, why, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2
    assert why in re.sub(r"[\s│]+", " ", refused.output)
