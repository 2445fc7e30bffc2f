"""test_nccl.py as a reader starts it, and what its ranks say when one of them hangs or dies."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hyperion
from hyperion.experiments.collective_check import app
from hyperion.measure import COLLECTIVES
from hyperion.processes import Job, RankError, run_ranks

ROOT = Path(hyperion.__file__).resolve().parent.parent
SCRIPT = ROOT / "phase2_development" / "test_nccl.py"


def torchrun(words: list[str], folder: Path, **environment) -> tuple[subprocess.CompletedProcess, float]:
    """Two ranks on the CPU started from `folder`, and the seconds they took."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *words]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | hidden | environment, capture_output=True, text=True, timeout=120
    )
    return done, time.monotonic() - started


def test_the_command_runs_as_printed_from_any_directory(tmp_path):
    done, _ = torchrun([str(SCRIPT), "--sizes", "8,20K", "--dtypes", "bf16"], tmp_path, PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    header, *lines, verdict = done.stdout.strip().splitlines()
    assert header.startswith("2 ranks, gloo, ")
    assert set(COLLECTIVES) <= set(lines[0].split())
    rates = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines if line[0].isdigit()}
    assert list(rates) == ["8", "20480"] and all(len(line) == 5 and min(line) > 0 for line in rates.values())
    assert any(line.startswith("all_gather: bytes = ") and "busbw = 0.5 x bytes / time" in line for line in lines)
    assert verdict.startswith("ok: 10 collectives, every value right on each of 2 ranks")


def test_a_rank_that_hangs_is_named_with_the_place_where_it_stands(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    started = time.monotonic()
    with pytest.raises(RankError) as ended:
        run_ranks(Job("tests.measure.collective_ranks:hangs", timeout_s=100, ranks=2), on_line=lambda line: None)
    assert time.monotonic() - started < 60
    assert ended.value.rank == 1
    told = ended.value.what
    assert re.search(r"rank 1 did not arrive: the last it entered was collective \d+ \(", told)
    assert "rank 0 arrived at collective" in told and "rank 0 did not arrive" not in told
    assert "rank 1 stands at:" in told and "time.sleep(600)" in told


def test_a_rank_that_dies_is_named_with_its_signal():
    done, seconds = torchrun(["-m", "tests.measure.collective_ranks"], ROOT)
    assert done.returncode != 0 and seconds < 60
    cause = done.stderr.rpartition("Root Cause")[2]
    assert re.search(r"rank\s*: 1\b", cause) and "SIGKILL" in cause, done.stderr[-3000:]
    assert "ok:" not in done.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--sizes", "8x"], "sizes are bytes"),
        (["--sizes", "0"], "sizes are bytes"),
        (["--dtypes", "bf17"], "unknown dtype bf17"),
        (["--backend", "gloo"], "--backend is for torchrun"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_starts(options, why, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2
    assert why in re.sub(r"[\s│]+", " ", refused.output)
