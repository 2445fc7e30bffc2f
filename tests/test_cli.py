import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from hyperion.results import Row, Run

CHECKOUT = Path(__file__).resolve().parents[1]


def hyperion(*arguments: str, folder: Path = CHECKOUT, **variables: str) -> subprocess.CompletedProcess:
    """The command as a user types it, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "120", **variables}
    command = [sys.executable, "-m", "hyperion", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def stored(folder: Path, rate: float, **row) -> Run:
    run = Run.create(folder, {"profile": "smoke"})
    columns = {"n": 30, "ci_low": rate * 0.999, "ci_high": rate * 1.001, "limit_source": "none stated"} | row
    rows = [Row(notebook="n", experiment="e", variant="v", metric="tokens_per_s", value=rate, **columns)]
    run.record("n", "e", rows, pd.DataFrame({"x": [1.0]}), input_hash="h")
    return run


def test_help_names_every_option_its_variable_and_the_exit_codes():
    text = hyperion("reproduce", "--help").stdout
    for option in ("profile", "only", "data-source", "run", "time-budget", "seed", "replay-of"):
        assert f"--{option}" in text and f"[env var: {option.upper().replace('-', '_')}]" in text
    for code in ("0 all done", "1 a notebook failed", "2 the request", "3 the time budget", "130 or 143"):
        assert code in " ".join(text.split())


def test_starting_the_command_loads_no_torch():
    probe = "import sys, hyperion.cli; sys.exit('torch' in sys.modules or 'papermill' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=CHECKOUT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["reproduce", "--nonsense"], "No such option"),
        (["reproduce", "--only", "nope"], "no chapter 'nope'"),
        (["reproduce", "--time-budget", "6x"], "'6x' is no duration"),
        (["verify", "nope"], "no run 'nope'"),
        (["compare", "nope", "nope"], "no run 'nope'"),
    ],
)
def test_bad_input_is_exit_code_2_with_its_reason(tmp_path, arguments, told):
    (tmp_path / "pyproject.toml").write_text("")
    notebook = tmp_path / "phase1_hardware" / "01_x.ipynb"
    notebook.parent.mkdir()
    metadata = '{"hyperion": {"needs": [], "produces": ["e"], "time_budget_s": {}}}'
    notebook.write_text(f'{{"cells": [], "metadata": {metadata}}}')
    done = hyperion(*arguments, folder=tmp_path)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_variables_are_options_and_empty_ones_are_none(tmp_path):
    for variable in ("TIME_BUDGET", "CELL_TIMEOUT", "NOTEBOOK_TIMEOUT"):
        done = hyperion("reproduce", **{"ONLY": "", "RUN": "", "TIME_BUDGET": "", "CELL_TIMEOUT": "", variable: "6x"})
        assert done.returncode == 2 and "'6x' is no duration" in done.stderr and f"{variable}=6m" in done.stderr


def test_verify_says_what_is_whole_and_names_what_was_edited(tmp_path):
    run = stored(tmp_path / "run", 100.0)
    done = hyperion("verify", str(run.folder))
    assert done.returncode == 0 and "1 rows" in done.stdout
    (run.folder / "rows.csv").write_text("edited")
    done = hyperion("verify", str(run.folder))
    assert done.returncode == 2 and str(run.folder / "rows.csv") in done.stderr


def test_compare_fails_on_a_confirmed_regression_only(tmp_path):
    for index in range(5):
        stored(tmp_path / "a" / str(index), 100.0 + index / 10)
        stored(tmp_path / "b" / str(index), 80.0 + index / 10)
    slower = hyperion("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert slower.returncode == 1 and "regression" in slower.stdout and "-20" in slower.stdout
    assert "power: a change of 3% for the worse" in slower.stdout and "power at 3" in slower.stdout
    assert hyperion("compare", str(tmp_path / "b"), str(tmp_path / "a")).returncode == 0
    single = hyperion("compare", str(tmp_path / "a/0"), str(tmp_path / "b/0"))
    assert single.returncode == 0 and "1 unconfirmed" in single.stdout and "power: a" not in single.stdout


def test_clean_lists_before_it_removes(tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "phase1_hardware").mkdir()
    (tmp_path / ".ruff_cache").mkdir()
    assert "would remove" in hyperion("clean", "--dry-run", folder=tmp_path).stdout
    assert (tmp_path / ".ruff_cache").is_dir()
    assert hyperion("clean", folder=tmp_path).returncode == 0 and not (tmp_path / ".ruff_cache").exists()
