"""The README's commands for the whole book are run as printed. test_readme_variants has those that start other runs."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from hyperion.results import Run
from tests.readme import commands, folders, needs_the_book, reproduces, run
from tests.reproduce.test_trees import faults_of_run

pytestmark = pytest.mark.book

CHAPTERS_WITH_DATA = (
    "01_dataset_preparation",
    "02_core_framework",
    "03_mixed_precision",
    "05_distributed_training",
    "06_llama_lora",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return folders(tmp_path_factory.mktemp("readme"))


@pytest.fixture(scope="module")
def reproduced(place):
    """`make reproduce` as printed, without a GPU in the smoke profile."""
    done = run("make reproduce", place)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done


def test_make_reproduce_runs_the_whole_book(reproduced, place):
    latest = Run.open(Path(place["HYPERION_RESULTS"]) / "latest")
    assert latest.verify() and faults_of_run(latest.folder) == []
    sources = {row.data_source for row in latest.rows()} - {""}
    assert sources == {"mirror" if os.environ.get("HYPERION_DATA_MIRROR") else "synthetic"}
    for made in ("report.html", "benchmarks/hardware/gemm.png", "notebooks/02_core_framework.html"):
        assert (latest.folder / made).stat().st_size > 1000
    for page in (latest.folder / "notebooks").glob("*.ipynb"):
        frames = Counter(re.findall(r'  DATA  [^\\"]+', page.read_text(encoding="utf-8")))
        assert frames or page.stem not in CHAPTERS_WITH_DATA, page.stem
        assert set(frames.values()) <= {1}, f"{page.stem}: a notebook and its jobs name a source once"
    if sources == {"synthetic"}:
        assert "SYNTHETIC" in reproduced.stdout
    else:
        perplexity = {
            row.variant: row.value
            for row in latest.rows("02_core_framework")
            if row.metric == "perplexity_token" and row.params["split"] == "valid"
        }
        assert perplexity["lm_d64_h4_l2"] <= 0.6 * perplexity["unigram"]


def test_a_second_call_has_nothing_to_do(reproduced, place):
    done = run("make reproduce ONLY=01_hardware_exploration", place)
    assert done.returncode == 0 and "up to date" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("command", [c for c in commands() if needs_the_book(c) and not c.startswith("make reproduce")])
def test_what_is_done_with_a_run(command, reproduced, place):
    done = run(command, place)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("command", [c for c in reproduces() if "PROFILE=" not in c])
def test_variants_of_make_reproduce(command, reproduced, place):
    done = run(command, place)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
