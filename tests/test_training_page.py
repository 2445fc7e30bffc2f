"""The code of docs/training.md runs, resumes, and its statements about memory and stopping hold."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.standing_ranks import NO_GPU

PAGE = Path(__file__).resolve().parents[1] / "docs/training.md"

pytestmark = pytest.mark.process


def written(folder: Path) -> Path:
    """The first script of the page. The others are beside it."""
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    for name, code in zip(("regression.py", "distributed.py", "measured.py"), codes, strict=True):
        (folder / name).write_text(code)
    return folder / "regression.py"


@pytest.fixture
def script(tmp_path) -> Path:
    return written(tmp_path)


def run(script: Path, launcher: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess:
    command, environ = [sys.executable, *launcher, script], os.environ | environment
    return subprocess.run(command, cwd=script.parent, env=environ, capture_output=True, text=True, timeout=300)


def held_out_loss(done: subprocess.CompletedProcess | str) -> float:
    if not isinstance(done, str):
        assert done.returncode == 0, done.stderr
        done = done.stdout
    (loss,) = re.findall(r"held-out loss (.*)", done)
    return float(loss)


@pytest.fixture
def run_here(monkeypatch, capsys) -> Callable[[Path], str]:
    """Function that runs a script in this process and returns what it prints: a new process loads torch for seconds."""

    def run_here(script: Path) -> str:
        with monkeypatch.context() as patch:
            patch.chdir(script.parent)
            patch.syspath_prepend(script.parent)
            patch.setitem(sys.modules, "regression", None)  # restored afterwards
            del sys.modules["regression"]
            capsys.readouterr()
            runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run_here


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The script of the page in a folder of its own, and what it printed when it trained there."""
    script = written(tmp_path_factory.mktemp("uninterrupted"))
    return script, run(script)


def test_the_code_of_the_page_trains_and_a_second_call_finds_the_training_finished(uninterrupted):
    script, first = uninterrupted
    loss = held_out_loss(first)
    assert loss < 0.2  # the variance of sin(x) is 0.43
    # 16,897 parameters in float32, and AdamW's two moments of each.
    assert re.match(r"peak [\d.]+ MiB, in the phase .*: parameters 0\.0645 MiB, .*optimizer state 0\.129 MiB", first.stdout)
    assert sorted(path.name for path in (script.parent / "my-checkpoints").iterdir()) == ["step-00000080", "step-00000100"]
    assert held_out_loss(run(script)) == loss


def test_two_ranks_train_as_one_process_does(script, uninterrupted):
    whole = run(script, **NO_GPU) if torch.cuda.is_available() else uninterrupted[1]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ranks = run(script.with_name("distributed.py"), torchrun, **NO_GPU)
    assert held_out_loss(ranks) == pytest.approx(held_out_loss(whole), rel=1e-3)


def test_the_mfu_of_the_page_is_a_share_of_the_peak_and_its_row_is_a_table(script, run_here):
    printed = run_here(script.with_name("measured.py"))
    for share in re.findall(r"MFU (.*)", printed):  # none if the peak of this device is not known
        assert 0 < float(share) < 1
    assert "call_time_s" in printed and "regression" in printed


@pytest.mark.long
def test_sigterm_saves_the_state_and_the_same_script_continues_with_the_same_losses(script, uninterrupted):
    text = script.read_text()
    stopping = text.replace(
        "    def summed_loss(self, batch):\n",
        "    def summed_loss(self, batch):\n        if self.steps == 50:\n            os.kill(os.getpid(), signal.SIGTERM)\n",
    )
    assert stopping != text
    script.write_text("import os\nimport signal\n" + stopping)
    stopped = run(script)
    assert stopped.returncode == 75
    script.write_text(text)
    assert held_out_loss(run(script)) == held_out_loss(uninterrupted[1])


def test_micro_batches_split_a_dict(script, uninterrupted, run_here):
    text = script.read_text()
    script.write_text(text.replace("choose_precision(device), device)", "choose_precision(device), device, micro_batches=4)"))
    assert script.read_text() != text
    assert held_out_loss(run_here(script)) == pytest.approx(held_out_loss(uninterrupted[1]), rel=1e-4)
