"""The README's other commands are run, its Python is run, its links resolve, and its figures are those of the rows."""

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from hyperion.book.headline_page import launches_page, runs_in, updated
from hyperion.checkpoints import verify
from hyperion.paths import reference_folder
from hyperion.results import Run
from tests.readme import PAGES, README, ROOT, commands, commands_in_sentences, folders, needs_the_book, run

DISTRIBUTED = [command for command in commands() if command.startswith((".venv/bin/torchrun", ".venv/bin/python"))]


def shortened(command: str) -> str:
    """A command of the distributed chapters as a machine of two cores has time for it: its options, on two ranks, a few steps."""
    command = command.replace("--nproc_per_node=4", "--nproc_per_node=2").replace("--scaling_gpus 1,2,4", "--help")
    command = re.sub(r"--epochs \d+", "--steps 2 --data_source synthetic", command)
    return command.replace("--repeat 50", "--repeat 50 --help")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("readme"))


def quick(command: str) -> bool:
    return not needs_the_book(command) and not command.startswith(("make test", "make lab")) and command not in DISTRIBUTED


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("command", [c for c in commands() if quick(c)])
def test_commands_that_need_no_run(command, place):
    done = run(command, place)
    # A machine without a network cannot fetch: then the command says so for each set, and its exit code with it.
    if command == "make fetch" and not os.environ.get("HYPERION_DATA_MIRROR"):
        assert "wikitext-2" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("command", commands_in_sentences())
def test_commands_in_sentences(command, place):
    passports = set(ROOT.glob("results/passports/*"))
    try:
        done = run(command + (" --time-limit 10s" if command.endswith("passport") else ""), place)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    finally:
        for made in set(ROOT.glob("results/passports/*")) - passports:
            made.unlink()


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("command", DISTRIBUTED)
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


@pytest.mark.book
@pytest.mark.process
def test_make_lab_serves_on_loopback_with_a_token(place):
    server = subprocess.Popen(
        ["make", "lab"], cwd=ROOT, env=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
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


@pytest.mark.book
@pytest.mark.process
def test_python_blocks_run(place):
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, env=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "docs/architecture.md", "docs/references.md"])
def test_links_and_pictures_are_there(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()) if not link.startswith("http")]
    assert links or page == "docs/running.md"
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_every_reference_run_is_listed():
    listed = re.findall(r"^\| \[`([\w-]+)`\]", (ROOT / "docs" / "references.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in reference_folder().iterdir() if path.is_dir())


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/headlines.md", "docs/claims.md"])
def test_what_is_made_from_rows_is_what_the_rows_say(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    made, markers = updated(re.sub(r"\d", "9", PAGES[page]), Path(page))
    assert len(markers) == {"README.md": 2, "docs/headlines.md": 1, "docs/claims.md": 3}[page] == PAGES[page].count("<!-- end of")
    for kind in (marker.partition(":")[0] for marker in markers):
        part = re.compile(rf"<!-- {kind}: .*?<!-- end of {kind} -->", re.DOTALL)
        assert part.findall(made) == part.findall(PAGES[page])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200-launches", "h200-training-launches"])
def test_the_page_of_launches_is_what_the_rows_say(name):
    """The rules of headlines may change after launches were published. Then their page must be made again."""
    folder = reference_folder() / name
    runs = [Run.open(path.parent) for path in sorted(folder.glob("*/run.json"))]
    assert launches_page(name, runs) == (folder / "README.md").read_text()


def test_every_row_without_a_limit_and_without_a_reason_needs_none():
    """The README says that such rows have no value, or that their metric has no limit."""
    rows = [row for run in runs_in(reference_folder()) for row in run.rows()]
    others = [row for row in rows if row.limit is None and not row.limit_source]
    assert others and all(row.value is None or not row.definition.needs_limit for row in others)


def _wait_for_answer(url: str) -> None:
    for _ in range(60):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            threading.Event().wait(1)
    pytest.fail(f"no answer from {url.split('?')[0]}")
