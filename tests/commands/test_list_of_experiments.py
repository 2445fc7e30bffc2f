"""`hyperion experiments` lists what the notebooks run, those of own subjects included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperion.paths import project_root
from hyperion.reproduce.notebooks import read_book
from tests.reproduce.small_book import write_notebook


def test_all_experiments_are_listed_with_chapter_and_question(hyperion):
    listed = json.loads(hyperion("experiments", "--json").stdout)
    produced = [(book.number, book.stem, name) for book in read_book(project_root()) for name in book.produces]
    assert [(one["chapter"], one["notebook"], one["experiment"]) for one in listed] == produced
    assert all(len(one["question"]) > 20 and one["question"][-1] in ".?" for one in listed)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("2.6", {"llama_lora", "lora_sharded"}),
        ("survive", {"server_soak"}),
        ("MPI", {"mpi_collectives"}),
        ("05_distributed", {"parallel_parity", "distributed_training", "resharding", "rank_failure"}),
    ],
)
def test_a_word_selects_by_chapter_question_and_notebook(hyperion, word, names):
    assert {one["experiment"] for one in json.loads(hyperion("experiments", word, "--json").stdout)} >= names
    table = hyperion("experiments", word).stdout
    assert all(name in table for name in names) and "memory_levels" not in table


def test_a_word_that_no_experiment_has_is_an_error_with_a_next_step(hyperion):
    done = hyperion("experiments", "nonsense")
    assert done.returncode == 2 and done.stdout == "" and "'nonsense'" in done.stderr and "hyperion experiments" in done.stderr


@pytest.mark.process
def test_own_subjects_are_listed_without_being_imported(tmp_path):
    subject = tmp_path / "mine"
    subject.mkdir()
    (subject / "__init__.py").write_text("")
    (subject / "own_work.py").write_text('"""Does my own experiment appear?"""\n\nraise ImportError("absent")\n')
    write_notebook(subject, "01_mine", ["1"], produces=["own_work"])
    done = subprocess.run(
        [sys.executable, "-m", "hyperion", "experiments", "own_work", "--json"],
        cwd=Path(project_root()),
        env=os.environ | {"HYPERION_SUBJECTS": str(subject)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)
    assert (one["notebook"], one["question"]) == ("01_mine", "Does my own experiment appear?")
