import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from hyperion.data.store.folders import staged
from hyperion.reproduce import Request
from hyperion.results import Row, Run

CHECKOUT = Path(__file__).resolve().parents[1]


def in_a_process(*arguments: str, folder: Path = CHECKOUT, **variables: str) -> subprocess.CompletedProcess:
    """The command as a user types it, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "120", **variables}
    environment.pop("HYPERION_DATA", None)  # the data folder of whoever runs the tests
    command = [sys.executable, "-m", "hyperion", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def stored(folder: Path, rate: float, information: dict | None = None, **row) -> Run:
    run = Run.create(folder, {"profile": "smoke"} | (information or {}))
    columns = {"n": 30, "ci_low": rate * 0.999, "ci_high": rate * 1.001, "limit_source": "none stated"} | row
    rows = [Row(notebook="n", experiment="e", variant="v", metric="tokens_per_s", value=rate, **columns)]
    run.record("n", "e", rows, pd.DataFrame({"x": [1.0]}), input_hash="h")
    return run


def test_help_names_every_option_its_variable_and_the_exit_codes(hyperion):
    text = hyperion("reproduce", "--help").stdout
    for option in ("profile", "only", "data-source", "run", "time-budget", "seed", "replay-of"):
        assert f"--{option}" in text and f"[env var: {option.upper().replace('-', '_')}]" in text
    for code in ("0 all notebooks are done", "1 a notebook failed", "2 the request", "3 the time budget", "130 or 143"):
        assert code in " ".join(text.split())


@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(profile="smoke", data_source="synthetic", only="1.1,2.4", run="my run", seed=7),
        Request(profile="replay", replay_of="h200", time_budget_s=90.5, cell_timeout_s=3600.0, notebook_timeout_s=7200.0),
    ],
)
def test_the_command_line_of_a_run_makes_the_same_request(request_, hyperion, monkeypatch):
    made = []
    monkeypatch.setattr("hyperion.reproduce.reproduce", lambda request, console: made.append(request) or 0)
    program, *arguments = shlex.split(request_.command_line)
    assert program == "hyperion" and hyperion(*arguments).returncode == 0
    assert made == [request_]


@pytest.mark.process
def test_starting_the_command_loads_no_torch():
    probe = "import sys, hyperion.cli; sys.exit('torch' in sys.modules or 'papermill' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=CHECKOUT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "--nonsense"], "No such option"),
        (["reproduce", "--only", "nope"], "no chapter 'nope'"),
        (["reproduce", "--time-budget", "6x"], "'6x' is not a duration"),
        (["monitor", "--duration", "9" * 30 + "h"], "is not a duration above 0 and at most 3650 days"),
        (["verify", "nope"], "no run 'nope'"),
        (["compare", "nope", "nope"], "no run 'nope'"),
    ],
)
def test_bad_input_is_exit_code_2_with_its_reason(hyperion, tmp_path, arguments, message):
    (tmp_path / "pyproject.toml").write_text("")
    notebook = tmp_path / "phase1_hardware" / "01_x.ipynb"
    notebook.parent.mkdir()
    metadata = '{"hyperion": {"needs": [], "produces": ["e"], "time_budget_s": {}}}'
    cell = '{"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ""}'
    notebook.write_text(f'{{"cells": [{cell}], "metadata": {metadata}}}')
    done = hyperion(*arguments, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.process
def test_a_process_of_the_command_prints_its_answer_and_ends_with_its_code(tmp_path):
    run = stored(tmp_path / "run", 100.0)
    done = in_a_process("verify", str(run.folder))
    assert (done.returncode, done.stderr) == (0, "") and "1 rows" in done.stdout
    done = in_a_process("verify", "nope", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "no run 'nope'" in done.stderr and "Traceback" not in done.stderr


def test_variables_are_options_and_empty_ones_are_none(hyperion, tmp_path):
    for variable in ("TIME_BUDGET", "CELL_TIMEOUT", "NOTEBOOK_TIMEOUT"):
        done = hyperion("reproduce", **{"ONLY": "", "RUN": "", "TIME_BUDGET": "", "CELL_TIMEOUT": "", variable: "6x"})
        assert done.returncode == 2 and "'6x' is not a duration" in done.stderr and f"{variable}=6m" in done.stderr


def test_verify_says_what_is_whole_and_names_what_was_edited(hyperion, tmp_path):
    run = stored(tmp_path / "run", 100.0)
    done = hyperion("verify", str(run.folder))
    assert done.returncode == 0 and "1 rows" in done.stdout
    (run.folder / "rows.csv").write_text("edited")
    done = hyperion("verify", str(run.folder))
    assert done.returncode == 2 and str(run.folder / "rows.csv") in done.stderr


def test_compare_fails_on_a_confirmed_regression_and_ordinary_runs_are_indicative(hyperion, tmp_path):
    for side, rate in (("a", 100.0), ("b", 80.0)):
        for index in range(5):
            call = {"relaunch": {"call": "one", "side": side, "launch": index}}
            stored(tmp_path / side / str(index), rate + index / 10, call)
    slower = hyperion("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert slower.returncode == 1 and "regression" in slower.stdout and "-20" in slower.stdout
    assert "power: a worsening of 3% would be confirmed" in slower.stdout and "power at 3" in slower.stdout
    assert slower.stdout.splitlines()[-1] == "exit code 1: 1 confirmed regression, nothing missing"
    assert hyperion("compare", str(tmp_path / "b"), str(tmp_path / "a")).returncode == 0

    one, other = (stored(tmp_path / name, rate) for name, rate in (("ordinary", 100.5), ("other", 81.5)))
    single = hyperion("compare", str(one.folder), str(other.folder))
    assert single.returncode == 0 and "1 indicative" in single.stdout and "power: a" not in single.stdout
    assert "indicative: worse" in single.stdout and "did not alternate" in single.stdout
    assert single.stdout.splitlines()[-1] == (
        "exit code 0: no confirmed regression, nothing missing, 1 indicative (never a failure)"
    )


def test_values_of_different_devices_are_shown_and_not_judged(hyperion, tmp_path):
    gpus = [{"name": "NVIDIA H200"}]
    a = stored(tmp_path / "a", 4000.0, {"environment": {"gpus": gpus}})
    b = stored(tmp_path / "b", 40.0, {"environment": {"cpu": {"name": "Some CPU", "cores": 2}}})
    done = hyperion("compare", str(a.folder), str(b.folder))
    assert done.returncode == 0 and "worse" not in done.stdout and "%" not in done.stdout
    assert "1 values: 1 of different devices (1 x NVIDIA H200; Some CPU (2 cores)), 0 missing" in done.stdout
    assert "not judged" in done.stdout and "indicative" not in done.stdout
    assert "B / A" in done.stdout and "0.01" in done.stdout


def test_compare_states_what_differs_on_top_and_fails_on_missing_values_unless_they_are_allowed(hyperion, tmp_path):
    a = stored(tmp_path / "a", 100.0)
    b = stored(tmp_path / "b", 100.5, {"profile": "full"})
    crashed = [Row(notebook="n", experiment="gemm", variant=f"m{i}", metric="count", value=1.0 + i) for i in range(30)]
    a.record("n", "gemm", crashed, pd.DataFrame({"x": [2.0]}), input_hash="h")
    done = hyperion("compare", str(a.folder), str(b.folder))
    assert done.returncode == 1 and "1 same, 30 missing" in done.stdout
    assert done.stdout.index("profile: A smoke; B full") < done.stdout.index("missing values (30)")
    assert "gemm m1 count, not in B: no row" in done.stdout and "and 10 more, with --all" in done.stdout
    assert "30 missing (would be accepted with --allow-missing)" in done.stdout.splitlines()[-1]
    everything = hyperion("compare", "--all", "--allow-missing", str(a.folder), str(b.folder))
    assert everything.returncode == 0 and everything.stdout.count("not in B: no row") == 30
    assert "exit code 0: no confirmed regression, 30 missing (accepted by --allow-missing)" in everything.stdout
    twice = hyperion("compare", str(a.folder), str(a.folder))
    assert twice.returncode == 2 and "the same launch is given twice" in twice.stderr


def test_clean_lists_before_it_removes(hyperion, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "hyperion"\n')
    (tmp_path / "phase1_hardware").mkdir()
    (tmp_path / ".ruff_cache").mkdir()
    assert "would remove" in hyperion("clean", "--dry-run", folder=tmp_path).stdout
    assert (tmp_path / ".ruff_cache").is_dir()
    assert hyperion("clean", folder=tmp_path).returncode == 0 and not (tmp_path / ".ruff_cache").exists()


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_clean_lists_what_is_not_hyperions_and_removes_nothing(hyperion, tmp_path, dry_run):
    data = tmp_path / "data"
    with staged(data / "raw/set") as work:
        (work / "file").write_text("x")
    (data / "thesis.tex").write_text("years of work")
    done = hyperion("clean", "--data", *dry_run, folder=tmp_path, HYPERION_DATA=str(data), HYPERION_HOME=str(tmp_path))
    assert done.returncode == 2 and str(data / "thesis.tex") in done.stderr and "next:" in done.stderr
    assert (data / "thesis.tex").is_file() and (data / "raw/set/file").is_file() and "remove" not in done.stdout


def installed(folder: Path) -> str:
    """The library without a checkout around it, as in site-packages."""
    site = folder / "site-packages"
    site.mkdir()
    shutil.copytree(CHECKOUT / "hyperion", site / "hyperion", ignore=shutil.ignore_patterns("__pycache__"))
    return str(site)


@pytest.mark.process
def test_installed_clean_touches_no_other_package_and_reproduce_says_where_to_go(tmp_path):
    site, work = installed(tmp_path), tmp_path / "work"
    for folder in (work / "build", Path(site) / "build", Path(site) / "other.egg-info"):
        folder.mkdir(parents=True)
    done = in_a_process("clean", "--dry-run", "--runs", "--data", folder=work, PYTHONPATH=site)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    refused = in_a_process("reproduce", folder=work, PYTHONPATH=site)
    assert refused.returncode == 2 and "no notebooks" in refused.stderr and str(work) in refused.stderr
    assert "next:  run the command inside a checkout of Hyperion" in refused.stderr and "HYPERION_HOME" in refused.stderr
    assert not list(work.glob("results")) and not (Path(site) / "results").exists()
    done = in_a_process("verify", "nope", folder=work, PYTHONPATH=site)
    assert str(work / "results/nope") in done.stderr and site not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["reproduce", "--seed", "-1"], {}, "Invalid value for '--seed'"),
        (["reproduce", "--seed", str(2**32)], {}, "Invalid value for '--seed'"),
        (["reproduce"], {"SEED": "-1"}, "Invalid value for '--seed'"),
        (["reproduce"], {"SEED": "abc"}, "Invalid value for '--seed'"),
        (["clean"], {"HYPERION_HOME": "/nowhere"}, "HYPERION_HOME names no folder"),
        (["verify", "\x1b[31mred\u202e"], {}, "\\x1b[31mred\\u202e"),
        (["\x1b[31mred"], {}, "\\x1b[31mred"),
    ],
)
def test_hostile_values_are_refused_in_printable_text(hyperion, arguments, variables, message):
    done = hyperion(*arguments, **variables)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr + done.stdout and ("next:" in done.stderr or "Try 'hyperion" in done.stderr)


@pytest.mark.process
def test_a_working_folder_that_was_removed_is_named(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = 'rmdir "$PWD" && exec "$0" -m hyperion clean --dry-run'
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=gone, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "working folder was removed" in done.stderr and "next:  cd" in done.stderr
