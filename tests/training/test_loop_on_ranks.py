"""Training on two ranks: the same run when resumed, in any layout, and one rank's fault stops all."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from hyperion.models import TransformerLM
from hyperion.training import EXIT_CODE, TrainingPlan, train
from tests.training.rank_checks import CHECKS, NEXT, SAVED_AT
from tests.training.small import STEPS, small_batches, small_engine

pytestmark = pytest.mark.process

TERMINATED_AT = 5  # the batch that the second rank was at
RANK = """
import sys
from pathlib import Path
from hyperion.processes.job import load_entry
load_entry("tests.training.rank_checks:main")(Path(sys.argv[1]))
"""


def start(folder):
    """Two ranks, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def end_while_it_trains(ranks):
    """SIGTERM to the second rank alone; what the ranks printed."""
    for line in iter(ranks[1].stdout.readline, ""):
        if line.startswith(f"batch 0 {TERMINATED_AT - 1}"):
            ranks[1].send_signal(signal.SIGTERM)
            break
    return ["".join(rank.communicate(timeout=900)) for rank in ranks]


@pytest.fixture(scope="module")
def losses():
    """Of one process, uninterrupted."""
    return train(small_engine(kind=TransformerLM), small_batches(), TrainingPlan(steps=STEPS)).losses


@pytest.fixture(scope="module")
def place(tmp_path_factory, losses):
    """The folder of all runs, with a single process's checkpoint in it."""
    folder = tmp_path_factory.mktemp("ranks")
    train(small_engine(kind=TransformerLM), small_batches(), TrainingPlan(steps=SAVED_AT), folder=folder / "single")
    (folder / "single.json").write_text(json.dumps(losses))
    return folder


@pytest.fixture(scope="module")
def launch(place):
    """What each check came to on each rank, their exit codes and what they printed."""
    ranks = start(place)
    try:
        printed = end_while_it_trains(ranks)
    finally:
        for rank in ranks:
            rank.kill()
    outcomes = [json.loads((place / f"checks-{rank}.json").read_text()) for rank in range(2)]
    return outcomes, [rank.returncode for rank in ranks], printed


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_ranks(launch, check):
    results = [outcome.get(check, "not reached") for outcome in launch[0]]
    assert results == ["passed", "passed"], "\n".join(results)


def resume_alone(folder, steps):
    return train(small_engine(seed=3, kind=TransformerLM), small_batches(), TrainingPlan(steps=steps), folder=folder)


def test_sigterm_to_one_rank_stops_both_and_loses_nothing(launch, place, losses):
    _, codes, printed = launch
    assert codes == [EXIT_CODE, EXIT_CODE], printed
    assert all("stopped by SIGTERM after step" in text for text in printed)
    resumed = resume_alone(place / "terminated", STEPS)
    assert resumed.resumed_at[0] in (TERMINATED_AT, TERMINATED_AT + 1)
    assert resumed.losses == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_one_process_goes_on_from_two_ranks(launch, place, losses, strategy, capsys):
    history = resume_alone(place / strategy, SAVED_AT + NEXT)
    assert history.resumed_at == [SAVED_AT]
    assert history.losses == pytest.approx(losses[: SAVED_AT + NEXT], abs=1e-5)
    assert "was saved on 2 rank(s) and is resumed on 1" in capsys.readouterr().err
    assert [(record.steps, record.items) for record in history.epochs] == [(7, 560), (7, 560)]
    assert [(r.rank, r.steps) for r in history.rank_epochs] == [(0, 7), (1, 7), (0, 5)]  # two steps were others'
    assert history.epochs[1].loss == pytest.approx(sum(losses[7:14]) / 7, abs=1e-5)
