"""The README's commands are run, its Python is run, its links resolve, and its figures are those of the rows."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from hyperion.book import headline_markdown
from hyperion.checkpoints import verify
from hyperion.results import Run

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LONGEST_S = 1500


def commands() -> list[str]:
    """Lines of the README's shell blocks, comments cut off, in their order."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def quick(command: str) -> bool:
    return command not in ("make test", "make lab") and not command.startswith(("make reproduce", "torchrun", "python "))


def shortened(command: str) -> str:
    """A command of the distributed chapters as a machine of two cores has time for it: its options, on two ranks, a few steps."""
    command = command.replace("--nproc_per_node=4", "--nproc_per_node=2").replace("--scaling_gpus 1,2,4", "--help")
    command = re.sub(r"--epochs \d+", "--steps 2 --data_source synthetic", command)
    return command.replace("--repeat 50", "--repeat 50 --help")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of our own for results and data, and this interpreter as the environment that is there."""
    folder = tmp_path_factory.mktemp("readme")
    return os.environ | {
        "HYPERION_RESULTS": str(folder / "results"),
        "HYPERION_DATA": str(folder / "data"),
        "PYTHON": sys.executable,
    }


def run(command: str, environment: dict) -> subprocess.CompletedProcess:
    # `.venv` is the README's environment; here the commands use the one that runs the tests.
    words = shlex.split(command)
    here = {".venv/bin/hyperion": ["-m", "hyperion"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    if words[0] in here:
        words = [sys.executable, *here[words[0]], *words[1:]]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S)


@pytest.fixture(scope="module")
def reproduced(place):
    """`make reproduce` as printed, without a GPU in the smoke profile."""
    done = run("make reproduce", place)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done


def test_make_reproduce_runs_the_whole_book(reproduced, place):
    latest = Run.open(Path(place["HYPERION_RESULTS"]) / "latest")
    assert latest.verify()
    sources = {row.data_source for row in latest.rows()} - {""}
    assert sources == {"mirror" if os.environ.get("HYPERION_DATA_MIRROR") else "synthetic"}
    for made in ("report.html", "benchmarks/hardware/gemm.png", "notebooks/02_core_framework.html"):
        assert (latest.folder / made).stat().st_size > 1000
    if sources == {"synthetic"}:
        assert "SYNTHETIC" in reproduced.stdout
    else:
        perplexity = {row.variant: row.value for row in latest.rows() if row.metric == "perplexity_token" and
                      row.params["split"] == "valid"}  # fmt: skip
        assert perplexity["lm_d64_h4_l2"] <= 0.6 * perplexity["unigram"]


def test_a_second_call_has_nothing_to_do(reproduced, place):
    done = run("make reproduce ONLY=01_hardware_exploration", place)
    assert done.returncode == 0 and "up to date" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make reproduce") and c != "make reproduce"])
def test_variants_of_make_reproduce(command, reproduced, place):
    done = run(command, place)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    if "replay" in command:
        assert "BANNER: replay" in done.stdout and "done" in done.stdout


@pytest.mark.parametrize("command", [c for c in commands() if quick(c)])
def test_other_commands(command, reproduced, place):
    done = run(command, place)
    # A machine without a network cannot fetch: then the command says so for each set, and its exit code with it.
    if command == "make fetch" and not os.environ.get("HYPERION_DATA_MIRROR"):
        assert "wikitext-2" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(("torchrun", "python "))])
def test_the_distributed_commands_run_on_two_ranks(command, place):
    done = run(shortened(command), place)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if "--lora" in command:
        adapters_are_saved(done.stdout, Path(place["HYPERION_RESULTS"]))


def adapters_are_saved(said: str, results: Path) -> None:
    """What two steps of a Llama with adapters leave: weights that nobody takes for real ones, adapters, a row of each rank."""
    assert said.count("RANDOM WEIGHTS: random_llama_d64_l2") == 1
    (folder,) = results.glob("2*-run_distributed-llama")
    saved = folder / "adapters" / "random_llama_d64_l2_lora_fsdp" / "step-00000002"
    assert verify(saved)["step"] == 2 and (saved / "adapter_model.safetensors").is_file()
    losses = [row for row in Run.open(folder).rows() if row.metric == "training_loss"]
    assert sorted(str(row.rank) for row in losses) == ["0", "1", "None"]


def test_make_lab_serves_on_loopback_with_a_token(place):
    server = subprocess.Popen(
        ["make", "lab"], cwd=ROOT, env=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(120, os.killpg, (server.pid, signal.SIGKILL))
    timer.start()
    try:
        said = ""
        for line in server.stdout:
            said += line
            found = re.search(r"http://(127\.0\.0\.1|localhost):(\d+)\S*token=(\w+)", line)
            if found:
                break
        assert found, said
        assert "ssh -" in said + server.stdout.readline() + server.stdout.readline()
        _wait_for_answer(f"http://127.0.0.1:{found[2]}/api/status?token={found[3]}")
    finally:
        timer.cancel()
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def test_python_blocks_run(place):
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, env=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_links_and_pictures_are_there():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert len(links) > 4
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_headline_figures_are_those_of_the_rows():
    quoted = re.findall(r"<!-- headlines: (\S+) -->\n(.*?)\n<!-- end of headlines -->", README, re.DOTALL)
    assert len(quoted) == README.count("<!-- headlines") >= 1
    for folder, table in quoted:
        assert table.strip() == headline_markdown(Run.open(ROOT / folder)).strip()


def _wait_for_answer(url: str) -> None:
    for _ in range(60):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            threading.Event().wait(1)
    pytest.fail(f"no answer from {url.split('?')[0]}")
