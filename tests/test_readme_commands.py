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

from hyperion.book import headline_markdown
from hyperion.book.outline import headlines
from hyperion.checkpoints import verify
from hyperion.figures.material import Material, percent
from hyperion.paths import reference_folder
from hyperion.results import Run
from tests.readme import PAGES, README, ROOT, commands, folders, needs_the_book, run

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


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_and_pictures_are_there(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()) if not link.startswith("http")]
    assert links or page == "docs/running.md"
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.slow
def test_headline_tables_are_those_of_the_runs():
    page = PAGES["docs/headlines.md"]
    quoted = re.findall(r"<!-- headlines: (\S+) -->\n(.*?)\n<!-- end of headlines -->", page, re.DOTALL)
    assert len(quoted) == page.count("<!-- headlines") >= 1
    for folder, table in quoted:
        assert table.strip() == headline_markdown(Run.open(ROOT / folder)).strip()


@pytest.mark.slow
def test_headlines_of_the_readme_are_those_of_the_runs():
    lines = re.findall(
        r"^\| (.+?) \| (.+?) \| (.*?) ?\| (.*?) ?\| \[(\S+)\]\(results/reference/\5/README.md\) \|$", README, re.MULTILINE
    )
    assert 5 <= len(lines) == README.count("/README.md) |") <= 10
    for label, value, share, limit, name in lines:
        material = Material(Run.open(ROOT / "results" / "reference" / name))
        (headline,) = [headline for headline in headlines(material) if headline.label == label]
        bound = headline.limit.removeprefix("limit ") if headline.fraction is not None else ""
        assert (value, share, limit) == (headline.value, percent(headline.fraction), bound)
    labels = [line[0] for line in lines]
    weak = [place for place, label in enumerate(labels) if "weak scaling" in label]
    assert weak and all(labels[place + 1] == labels[place].replace("weak", "strong") for place in weak)


def test_the_readme_counts_what_the_rows_of_the_references_state():
    rows = [row for path in reference_folder().glob("*/run.json") for row in Run.open(path.parent).rows()]
    limited = [row for row in rows if row.limit is not None]
    others = [row for row in rows if row.limit is None and not row.limit_source]
    assert all(row.value is None or not row.definition.needs_limit for row in others)
    unlimited = len(rows) - len(limited) - len(others)
    intervals, checks = sum(row.ci_low is not None for row in rows), sum(bool(row.check) for row in rows)
    said = (
        f"Of the {len(rows):,} rows of the reference runs, {intervals:,} have an interval and {checks:,} have a check. "
        f"{len(limited):,} state a limit, and {unlimited:,} state why there is none. The other {len(others):,} have no value, or "
        "their metric has no limit"
    )
    assert said in README


def _wait_for_answer(url: str) -> None:
    for _ in range(60):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            threading.Event().wait(1)
    pytest.fail(f"no answer from {url.split('?')[0]}")
