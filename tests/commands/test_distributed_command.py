"""run_distributed.py as a reader starts it: from another directory, stopped, gone on with, refused, and reported once.

A Llama with adapters is trained by the README's command, in test_readme_commands.py.
"""

import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import torch

import hyperion
from hyperion.chapter.context import Context
from hyperion.checkpoints import verify
from hyperion.commands.distributed_command import TRAINING, main, train_all
from hyperion.processes import process_group
from hyperion.results import Run
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, set_up

pytestmark = pytest.mark.book

ROOT = Path(hyperion.__file__).resolve().parents[1]
SCRIPT = ROOT / "phase2_development" / "run_distributed.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
STEPS = 100
SMALL = {"precision": "fp32", "batch_size": 4, "learning_rate": 1e-3, "weight_decay": 0.0, "steps": 2}
LANGUAGE = Recipe(task="language", model="lm_d64_h4_l2", strategy="ddp", sequence_length=16, evaluation_batches=1, **SMALL)
IMAGES = Recipe(task="images", model="resnet18", strategy="ddp", width=2, **SMALL)
TOO_FEW = Recipe(task="images", model="resnet18", strategy="ddp", width=4, records=2, **SMALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Another directory, and an environment without GPUs, mirror or PYTHONPATH, with data of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    hidden = ("PYTHONPATH", "HYPERION_DATA_MIRROR", "HYPERION_RESULTS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    settings = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return folder, environment | settings | {"HYPERION_DATA": str(folder / "data")}


def call(place, words: list[str]) -> subprocess.CompletedProcess:
    folder, environment = place
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def stopped(place):
    """What was said, the exit code and the run folder of a command that SIGTERM reached while it trained."""
    folder, environment = place
    words = ["--model", "language_fsdp", "--steps", str(STEPS), "--batch_size", "4", "--data_source", "synthetic"]
    command = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words, "--base_dir", "."],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = []
    for line in command.stdout:
        said.append(line)
        if f"step 1/{STEPS}" in line:
            command.send_signal(signal.SIGTERM)
    return "".join(said), command.wait(120), next((folder / "results").glob("*-run_distributed-language_fsdp"))


@pytest.mark.process
def test_sigterm_saves_and_says_how_to_go_on(stopped):
    said, code, run = stopped
    assert code == 75, said
    assert said.count("stopped by SIGTERM after step") == 1
    assert said.count(f"run_distributed.py --resume {run}") == 2  # at the beginning and at the end
    assert "SYNTHETIC" in said and "on 2 ranks in fp32" in said
    (saved,) = (run / "checkpoints" / "lm_d128_h4_l2_fsdp").glob("step-*")
    assert verify(saved)["step"] < STEPS
    assert not (run.parent / "latest").exists()


@pytest.mark.process
@pytest.mark.long
def test_torchrun_goes_on_with_it_and_every_rank_has_its_row(stopped, place, capsys):
    _, _, folder = stopped
    done = call(place, [*TORCHRUN, "--resume", str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    first = int(re.search(rf"step (\d+)/{STEPS}  loss", done.stdout)[1])
    assert 1 < first <= STEPS and done.stdout.count("epoch 1") == 1
    run = Run.open(folder)
    losses = {row.rank: row for row in run.rows(*TRAINING) if row.metric == "training_loss" and "epoch" in row.params}
    assert set(losses) == {None, 0, 1}
    mean = next(r for r in run.rows(*TRAINING) if r.params.get("what") == "mean of the ranks' losses")
    assert mean.value == pytest.approx((losses[0].value + losses[1].value) / 2) and mean.check_error < 1e-5
    assert {row.data_source for row in run.rows()} == {"synthetic"}
    samples = run.samples(*TRAINING)
    assert list(samples[samples["kind"] == "step"]["step"]) == list(range(1, STEPS + 1))
    benchmarks = folder / "benchmarks" / "distributed"
    assert len(pd.read_csv(benchmarks / "distributed_training.csv")) == len(run.rows())
    assert (benchmarks / "distributed_training.png").read_bytes().startswith(b"\x89PNG")
    assert (folder.parent / "latest").resolve() == folder.resolve()
    table = [line.split()[:4] for line in done.stdout.splitlines() if line.startswith("lm_d128_h4_l2_fsdp  fp32")]
    assert [line[3] for line in table] == ["all", "0", "1"]
    assert main("", print, ["--run", str(folder), "--steps", "9"]) == 2
    assert f"--steps 9 is given now, but the run was started with {STEPS}" in capsys.readouterr().err


@pytest.mark.process
def test_of_two_ranks_one_tells_why_nothing_begins(place):
    done = call(place, [*TORCHRUN, "--batch_size", "5", "--base_dir", "."])
    assert done.returncode != 0
    assert done.stderr.count("run_distributed: 2 ranks do not divide a batch of 5") == 1
    assert re.search(r"Root Cause.*?rank +: 0 .*?exitcode +: 2 ", done.stderr, re.DOTALL)
    assert 'File "' not in done.stderr.partition("torch/distributed/elastic")[0]  # no traceback of ours


def test_a_refusal_is_told_in_its_own_words(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main("", print, ["--lora"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("run_distributed: --lora does not work with --model language_ddp") and "  next:  " in output.err
    assert not output.out


def test_one_training_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    torch.set_num_threads(1)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    sizes = {"lines": {"train": 400, "valid": 20, "test": 20}, "images": {"train": 40, "test": 20}}
    run = Run.create(tmp_path / "run", {})
    context = Context(
        notebook=TRAINING[0],
        experiment=TRAINING[1],
        data_source="synthetic",
        synthetic=sizes,
        sizes={"trainings": [asdict(TOO_FEW), asdict(LANGUAGE), asdict(IMAGES)]},
        workspace=run.folder / "checkpoints",
    )
    with process_group(backend="gloo"):
        failures = train_all(context)
        images = set_up(context, IMAGES)
    assert list(failures) == ["resnet18_w4_ddp"] and "2 records do not fill a batch of 4" in failures["resnet18_w4_ddp"]
    assert "resnet18_w4_ddp FAILED: 2 records" in capsys.readouterr().out
    assert {row.variant for row in run.rows()} == {"lm_d64_h4_l2_ddp", "resnet18_w2_ddp"}
    # What is looked at after each epoch was taken from the training images; the test split is read once, at the end.
    arrays = datasets.images(context)[1].arrays
    scored = [torch.cat([labels for _, labels in batches()]).tolist() for batches in (images.validation, images.test)]
    assert scored == [arrays["train_labels"][36:].tolist(), arrays["test_labels"].tolist()] and images.batches.records == 36
    (tested,) = (row for row in run.rows() if row.metric == "accuracy")
    assert (tested.n, tested.params["split"], tested.params["step"]) == (20, "test", 2)


@pytest.mark.process
def test_the_shell_script_starts_a_rank_for_each_device(tmp_path):
    interpreter = tmp_path / "python"  # says what it was started with, and ends with a code of its own
    interpreter.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 3 && exit\nprintf "%s\\n" "$@"\nexit 41\n')
    interpreter.chmod(0o755)
    script = str(SCRIPT.parent / "run_language_fsdp.sh")
    for given, ranks in (([], 3), (["2", "--steps", "4"], 2)):
        environment = {name: value for name, value in os.environ.items() if name != "NPROC"} | {"PYTHON": str(interpreter)}
        done = subprocess.run([script, *given], cwd=tmp_path, env=environment, capture_output=True, text=True)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT)]
        assert done.stdout.split() == [*torchrun, "--model", "language_fsdp", *given[1:]]
        assert done.returncode == 41
    environment |= {"NPROC": "none"}
    refused = subprocess.run([script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "'none' is no number of ranks" in refused.stderr
