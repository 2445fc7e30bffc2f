"""The driver on a small real book: real papermill, real kernels, real signals."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from hyperion.engines.environments import ENVIRONMENTS
from hyperion.errors import HyperionError
from hyperion.processes.child_process import has_ended
from hyperion.reproduce import Request, driver, reproduce
from hyperion.reproduce.machine import MachineProfile
from hyperion.reproduce.publishing import require_no_machine_paths
from hyperion.results import Run
from tests.reproduce.small_book import MACHINE, counting, make_book, recording, start_driver, write_notebook

NVIDIA_SWITCHES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty checkout that is the working folder, on an idle machine."""
    monkeypatch.setattr("hyperion.reproduce.driver.waiting_threads", lambda: 0.0)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "phase1_hardware").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("HYPERION_RESULTS", "HYPERION_DATA_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def start(root):
    """Starts calls as processes of their own; none outlives the test."""
    started = []

    def start() -> subprocess.Popen:
        started.append(start_driver(root))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def call(machine: MachineProfile = MACHINE, **request) -> tuple[int, str]:
    """One call in this process: its exit code and what it printed."""
    text = io.StringIO()
    return reproduce(Request(**request), machine=machine, console=Console(file=text, width=160)), text.getvalue()


def the_run(root) -> Run:
    (folder,) = [path.parent for path in root.glob("results/2*/run.json")]
    return Run.open(folder)


def statuses(run: Run) -> dict:
    return {stem: entry["status"] for stem, entry in json.loads(run.read("reproduce.json"))["notebooks"].items()}


def test_the_frameworks_that_a_chapter_lacks_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    assert driver.absent_frameworks(["11_megatron"]) == ["megatron-core"]
    assert driver.absent_frameworks(["10_frameworks", "11_megatron"]) == list(ENVIRONMENTS)
    assert driver.absent_frameworks(["02_core_framework"]) == []


@pytest.mark.parametrize(
    ("threads", "on_accelerator", "expected"), [(0.0, False, 1.0), (8.0, False, 5.0), (1.0, True, 1.0), (7.0, True, 4.0)]
)
def test_threads_that_wait_for_the_cpu_make_a_first_run_longer(threads, on_accelerator, expected, monkeypatch):
    monkeypatch.setattr(driver, "waiting_threads", lambda: threads)
    monkeypatch.setattr(driver.os, "cpu_count", lambda: 2)
    assert driver._slowdown(on_accelerator) == expected


@pytest.mark.book
@pytest.mark.process
def test_a_busy_machine_is_named_with_the_time_on_an_idle_one(root, monkeypatch):
    write_notebook(root / "phase1_hardware", "01_first", [recording("01_first")], time_budget_s={"smoke": 20})
    monkeypatch.setattr(driver, "_slowdown", lambda on_accelerator: 3.0)
    code, text = call()
    assert code == 0 and "predicted 1.0 min (20 s on an idle machine, but other processes use the CPU)" in text
    assert text.index("drawing the figures") < text.index("01_first", text.index("drawing the figures"))
    code, text = call(run="new")  # now the durations on this machine are known
    assert code == 0 and "on an idle machine" not in text


@pytest.mark.book
@pytest.mark.process
def test_a_failure_stops_what_depends_on_it_and_a_second_call_does_only_the_rest(root):
    make_book(root, second=["print('BANNER: synthetic')\nraise ValueError('planted')"])
    code, text = call()
    run = the_run(root)
    assert code == 1
    assert statuses(run) == {"01_first": "done", "02_second": "failed", "04_alone": "done"}
    assert "BANNER: synthetic" in text and "predicted 20 s" in text and "blocked by 02_second" in text
    assert "02_second.ipynb, cell In [3]: ValueError: planted" in text and "----> 2 raise ValueError" in text
    assert not (root / "results/latest").exists()
    assert {f"notebooks/02_second.{kind}" for kind in ("ipynb", "html")} <= set(run.verify())
    for name in run.verify():
        require_no_machine_paths(name, run.read(name))
        assert str(root).encode() not in run.read(name)

    write_notebook(root / "phase1_hardware", "02_second", [recording("02_second")], needs=["01_first"])
    code, text = call()
    assert code == 0 and "2 of 4 notebooks to run" in text and text.count("up to date") == 2
    assert the_run(root).folder == run.folder == (root / "results/latest").resolve()

    assert "ran again (was failed)" in summary_of(text, "02_second") and "ran again" not in summary_of(text, "03_third")

    code, text = call(only="1.3")
    assert code == 0 and text.count("up to date") == 3 and "04_alone" not in text

    write_notebook(root / "phase1_hardware", "04_alone", [recording("04_alone", "1 + 1")])
    code, text = call()
    assert code == 0 and re.search(r"04_alone: started, 3 cells, about \d s, changed: the notebook\n", text)
    assert "ran again (changed: the notebook)" in summary_of(text, "04_alone")

    code, text = call(dataclasses.replace(MACHINE, setting=MACHINE.setting | {"torch": "3"}))
    assert code == 0 and "a new run, because the newest run differs: torch is '2' there and '3' now" in text


@pytest.mark.book
@pytest.mark.process
def test_the_kernel_is_this_interpreter_in_the_notebooks_folder_with_the_whole_environment(root, monkeypatch):
    for name in NVIDIA_SWITCHES:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("PYTHONNOUSERSITE", raising=False)
    facts = (
        "import os, site, sys\nfrom pathlib import Path\n"
        f"facts = [sys.executable == {sys.executable!r}, Path.cwd().name == 'phase1_hardware',\n"
        f"         all(os.environ[name] == '7' for name in {NVIDIA_SWITCHES}), not site.ENABLE_USER_SITE,\n"
        "         not Path(output).is_absolute(), (profile, data_source, seed) == ('smoke', 'synthetic', 3)]"
    )
    write_notebook(root / "phase1_hardware", "01_first", [facts, recording("01_first", "sum(facts)")])
    assert call(data_source="synthetic", seed=3)[0] == 0
    (row,) = the_run(root).rows()
    assert row.value == 6


@pytest.mark.book
@pytest.mark.process
def test_running_without_the_declared_rows_is_a_failure_and_so_is_a_dead_kernel(root):
    phase = root / "phase1_hardware"
    write_notebook(phase, "01_first", [recording("01_first")], produces=["counting", "weighing"])
    write_notebook(phase, "02_dead", ["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"])
    code, text = call()
    assert code == 1 and "ran, but left no rows of: weighing" in text and "the kernel died" in text
    assert 'next:  run them in the notebook, in a chapter that open_chapter("01_first", …, output=output) opens' in text
    assert statuses(the_run(root)) == {"01_first": "failed", "02_dead": "failed"}


@pytest.mark.book
@pytest.mark.process
def test_rows_of_an_earlier_call_do_not_stand_for_an_experiment_that_did_not_run(root):
    write_notebook(root / "phase1_hardware", "01_first", [recording("01_first")])
    assert call()[0] == 0
    write_notebook(root / "phase1_hardware", "01_first", ["1"])
    code, text = call()
    assert code == 1 and "ran, but left no rows of: counting" in text and len(the_run(root).rows()) == 1
    kept = "from hyperion.results import Run\nrun = Run.open(output)\n"
    kept += "run.confirm('01_first', 'counting', run.rows('01_first', 'counting'))"
    write_notebook(root / "phase1_hardware", "01_first", [kept])
    assert call()[0] == 0


ASKED = "from hyperion.results import must_remeasure\nagain = must_remeasure()"


def summary_of(text: str, stem: str) -> str:
    """A notebook's line of the closing table."""
    return next(line for line in text.splitlines() if stem in line and "│" in line)


@pytest.mark.book
@pytest.mark.process
@pytest.mark.long
def test_a_claim_that_does_not_hold_lets_the_book_go_on_and_is_measured_anew_by_the_next_call(root):
    phase = root / "phase1_hardware"
    claim = "chapter.expect(again or counting.rows[0].value > 8, f'only {counting.rows[0].value} counted')"
    goes_on = "print('BANNER: reached')"
    write_notebook(phase, "01_first", [ASKED, counting("01_first"), claim, goes_on])
    write_notebook(phase, "02_second", [recording("02_second")], needs=["01_first"])
    write_notebook(phase, "03_clean", [counting("03_clean"), "chapter.expect(counting.rows[0].value > 6, 'too few')"])
    code, text = call()
    assert code == 1 and "UNEXPECTED: only 7.0 counted" in text and "BANNER: reached" in text
    assert "UNEXPECTED in 01_first: only 7.0 counted" in text and "unexpected" in summary_of(text, "01_first")
    assert "The next call measures the experiments of this notebook again" in text and "FAILED" not in text
    assert statuses(the_run(root)) == {"01_first": "unexpected", "02_second": "done", "03_clean": "done"}
    assert len(the_run(root).rows("01_first")) == 2 and not (root / "results/latest").exists()
    assert "only 7.0 counted" in (the_run(root).folder / "report.html").read_text()
    code, text = call()
    assert code == 0 and text.count("up to date") == 2 and "UNEXPECTED" not in text
    assert "measured again" in executed_text(root, "01_first")
    assert "only 7.0 counted" not in (the_run(root).folder / "report.html").read_text()


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_row_that_fails_its_check_keeps_the_others_and_is_measured_anew_by_the_next_call(root, isolated):
    phase = root / "phase1_hardware"
    here = "chapters.run_isolated = measure\ncounting = chapter.run('counting')"  # no process of its own: it is made up here
    first = counting("01_first", "0.0 if again else 0.5", isolated)
    cells = [ASKED, first if not isolated else first.replace('counting = chapter.run("counting")', here)]
    missing = "from hyperion.book import pick\nbad = pick(counting.rows, 'count', variant='bad')"
    last = "good = pick(counting.rows, 'count', variant='good')\nprint(f'BANNER: {good.value}')"
    write_notebook(phase, "01_first", [*cells, missing, "print(bad.value)", last])
    write_notebook(phase, "02_second", [recording("02_second")], needs=["01_first"])
    code, text = call()
    sentence = "counting, bad: count 7 items failed its check 'as counted': error 0.5 above tolerance 0.1"
    assert code == 1 and f"UNEXPECTED in 01_first: {sentence}" in text and "BANNER: 7.0" in text
    assert "cell [5] cannot be evaluated without the values that were refused: HyperionError: no measured row" in text
    assert "cell [6] cannot be evaluated without the values that were refused: NameError: name 'bad'" in text
    assert statuses(the_run(root)) == {"01_first": "unexpected", "02_second": "done"}
    rows = {row.variant: row for row in the_run(root).rows("01_first")}
    assert rows["good"].value == 7.0 and rows["bad"].value is None and rows["bad"].check_error == 0.5
    assert "7 items failed its check" in rows["bad"].value_reason
    the_run(root).verify()
    code, text = call()
    assert code == 0, text
    assert [row.value for row in the_run(root).rows("01_first")] == [7.0, 7.0]


@pytest.mark.book
@pytest.mark.process
def test_an_error_without_a_refused_row_is_a_failure_though_a_claim_did_not_hold(root):
    cells = [counting("01_first"), "chapter.expect(False, 'not so')", "raise ValueError('planted')"]
    write_notebook(root / "phase1_hardware", "01_first", cells)
    code, text = call()
    assert code == 1 and "ValueError: planted" in text and "UNEXPECTED in 01_first: not so" in text
    assert statuses(the_run(root)) == {"01_first": "failed"}


@pytest.mark.book
@pytest.mark.process
def test_an_experiment_that_fails_after_a_refused_row_is_a_failure(root):
    cells = [counting("01_first", "0.5"), "raise ValueError('the second experiment cannot be run')"]
    write_notebook(root / "phase1_hardware", "01_first", cells, produces=["counting", "weighing"])
    code, text = call()
    assert code == 1 and "ran, but left no rows of: weighing" in text
    assert statuses(the_run(root)) == {"01_first": "failed"}


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("value", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_checks_do_not_depend_on_PYTHONOPTIMIZE(root, monkeypatch, value):
    monkeypatch.setenv("PYTHONOPTIMIZE", value)
    phase = root / "phase1_hardware"
    write_notebook(phase, "01_first", [counting("01_first"), "chapter.expect(False, 'not so')"])
    write_notebook(phase, "02_second", [recording("02_second"), "assert False, 'an assertion of the reader'"])
    worker = f"""
import os, sys
from hyperion.processes.child_process import child_environment
from hyperion.processes.child_process import start
worker = start(sys.executable, "told_module", [], child_environment() | {{"PYTHONPATH": os.environ["PYTHONPATH"] + ":{root}"}})
printed = worker.stdout.read()
if "assertions are checked" not in printed: raise ValueError(printed)
"""
    (root / "told_module.py").write_text("try:\n    assert False\nexcept AssertionError:\n    print('assertions are checked')\n")
    write_notebook(phase, "03_worker", [worker, recording("03_worker")])
    code, text = call()
    assert code == 1 and "NOTICE: PYTHONOPTIMIZE" in text and "AssertionError: an assertion of the reader" in text
    assert statuses(the_run(root)) == {"01_first": "unexpected", "02_second": "failed", "03_worker": "done"}
    monkeypatch.delenv("PYTHONOPTIMIZE")
    assert "NOTICE" not in call(run="new", only="03_worker")[1]


def executed_text(root, stem: str) -> str:
    return (the_run(root).folder / "notebooks" / f"{stem}.ipynb").read_text()


ENDLESS = {
    "computes": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "ignores": "import time\nwhile True:\n    try:\n        time.sleep(1000)\n    except BaseException:\n        pass",
    "has a child that ignores SIGTERM": """
import subprocess, sys, time
deaf = "import signal, time\\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\\nprint('deaf', flush=True)\\ntime.sleep(1000)"
for own_session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=own_session)
    child.stdout.readline()
    print("BANNER child", child.pid, flush=True)
child.wait()
""",
}


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.long] * (how != "has a child")) for how in ENDLESS])
def test_an_endless_cell_ends_at_its_limit_with_all_its_processes_and_keeps_finished_rows(root, how, monkeypatch):
    monkeypatch.setattr("hyperion.reproduce.kernels.GRACE_S", 1.0)
    phase = root / "phase1_hardware"
    write_notebook(phase, "01_first", ["import os\nprint('BANNER child', os.getpid())", recording("01_first"), ENDLESS[how]])
    write_notebook(phase, "02_alone", [recording("02_alone")])
    started = time.monotonic()
    code, text = call(cell_timeout_s=6.0)  # on a busy machine, two children take seconds to start
    assert time.monotonic() - started < 60
    assert code == 1 and "01_first.ipynb: cell [5] exceeded its limit of 6 s" in text and "CELL_TIMEOUT=2h" in text
    assert statuses(the_run(root)) == {"01_first": "failed", "02_alone": "done"}
    assert "BANNER child" in executed_text(root, "01_first"), "the copy has what the cells printed before the limit"
    assert [row.notebook for row in the_run(root).rows()] == ["01_first", "02_alone"]
    children = [int(line.split()[-1]) for line in text.splitlines() if line.startswith("BANNER child")]
    assert len(children) == (3 if "child" in how else 1) and all(map(has_ended, children))
    the_run(root).verify()
    write_notebook(phase, "01_first", [recording("01_first"), "1"])
    assert call(cell_timeout_s=30.0)[0] == 0


@pytest.mark.book
@pytest.mark.process
@pytest.mark.long
def test_a_notebook_has_a_limit_too_and_one_that_keeps_to_both_is_done(root):
    cells = [recording("01_first"), *["import time\ntime.sleep(1.5)"] * 4]
    write_notebook(root / "phase1_hardware", "01_first", cells)
    code, text = call(notebook_timeout_s=4.0)
    assert code == 1 and "exceeded its limit of 4 s" in text and "the notebook, in cell [" in text
    assert call(cell_timeout_s=30.0, notebook_timeout_s=60.0)[0] == 0


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize("how", ["computes", pytest.param("sleeps", marks=pytest.mark.long)])
def test_the_time_budget_interrupts_a_cell(root, how):
    write_notebook(root / "phase1_hardware", "01_first", [recording("01_first"), ENDLESS[how]], time_budget_s={"smoke": 0.1})
    started = time.monotonic()
    code, text = call(time_budget_s=15.0)  # a kernel may take seconds to start
    assert code == 3 and "unfinished, the time budget is spent" in text and time.monotonic() - started < 60
    assert statuses(the_run(root)) == {"01_first": "unfinished"} and len(the_run(root).rows()) == 1
    write_notebook(root / "phase1_hardware", "01_first", [recording("01_first")])
    assert call()[0] == 0


@pytest.mark.book
@pytest.mark.process
def test_a_go_that_measures_nothing_leaves_the_expected_time_alone(root):
    write_notebook(root / "phase1_hardware", "01_first", ["import time\ntime.sleep(1)", recording("01_first")])
    assert call()[0] == 0
    whole = json.loads(the_run(root).read("reproduce.json"))["notebooks"]["01_first"]["whole_s"]
    assert whole > 1
    confirm = "from hyperion.results import Run\nRun.open(output).confirm('01_first', 'counting', Run.open(output).rows())"
    write_notebook(root / "phase1_hardware", "01_first", [confirm])
    assert call()[0] == 0
    entry = json.loads(the_run(root).read("reproduce.json"))["notebooks"]["01_first"]
    assert entry["whole_s"] == whole != entry["seconds"]


@pytest.mark.book
@pytest.mark.process
def test_other_data_and_other_synthetic_sizes_make_a_notebook_stale(root, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(root / "data"))
    folder = root / "data/raw/gpt2"
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text("{}")
    taken = "from hyperion.data.prepare.catalog import data_identity\ndata = data_identity(['gpt2'], data_source)\n"
    cell = taken + recording("01_first").replace('input_hash="h"', 'input_hash="h", data=data')
    write_notebook(root / "phase1_hardware", "01_first", [cell])
    assert call()[0] == 0 and "up to date" in call()[1]
    (folder / "vocab.json").write_text("[]")
    assert "01_first: done" in call()[1] and "up to date" in call()[1]
    machine = dataclasses.replace(MACHINE, settings={"sizes": {}, "synthetic": {"lines": 5}})
    assert "01_first: done" in call(machine)[1]


@pytest.mark.book
@pytest.mark.process
def test_changed_upstream_rows_make_a_notebook_stale(root):
    make_book(root)
    assert call(only="02_second")[0] == 0
    write_notebook(root / "phase1_hardware", "01_first", ["1", recording("01_first")])
    assert "02_second │ up to date" in call(only="02_second")[1].replace("  ", " ")  # other text, same rows
    write_notebook(root / "phase1_hardware", "01_first", [recording("01_first", "2")])
    assert "02_second: done" in call(only="02_second")[1]


@pytest.mark.book
@pytest.mark.process
def test_the_time_budget_stops_before_a_notebook(root):
    write_notebook(root / "phase1_hardware", "01_first", ["import time\ntime.sleep(1)", recording("01_first")])
    code, text = call(time_budget_s=4.0)
    assert code == 3 and "not started, because it takes about 5 s" in text and "unfinished" in text
    assert "no chapter fits into this time budget: the shortest of the remaining ones takes about 5 s" in text
    assert "the same command continues" not in text
    assert statuses(the_run(root)) == {} and the_run(root).rows() == []


def test_bad_requests_are_errors_before_anything_is_made(root, monkeypatch):
    make_book(root)
    with pytest.raises(HyperionError, match="no chapter"):
        call(only="nope")
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(root / "nowhere"))
    with pytest.raises(HyperionError, match="HYPERION_DATA_MIRROR") as caught:
        call()
    assert caught.value.where == str(root / "nowhere")
    assert not (root / "results").exists()


@pytest.mark.book
@pytest.mark.process
def test_replay_skips_what_no_reference_holds_and_says_so(root):
    make_book(root)
    machine = MachineProfile("replay", {"sizes": {}}, MACHINE.setting, {"profile": "replay"})
    code, text = call(machine, profile="replay")
    assert code == 0 and text.count("skipped") >= 4 and "no rows of this chapter in the reference runs (none)" in text
    before = sorted((root / "results").iterdir())
    with pytest.raises(HyperionError, match="no reference run of 'h900'"):
        call(machine, profile="replay", replay_of="h900")
    with pytest.raises(HyperionError, match="the profile smoke measures, so it replays no reference"):
        call(profile="smoke", replay_of="h900")
    assert sorted((root / "results").iterdir()) == before


@pytest.mark.book
@pytest.mark.process
def test_replay_runs_what_a_reference_holds(root):
    write_notebook(root / "phase1_hardware", "01_first", ["assert profile == 'replay:h100'", recording("01_first")])
    assert call(only="01_first")[0] == 1  # the assertion: this is no replay
    reference = Run.create(root / "results/reference/h100", {})
    for name in ("rows.csv", "experiments.json"):
        reference.write({name: the_run_with_rows(root).read(name)})
    machine = MachineProfile("replay", {"sizes": {}}, MACHINE.setting, {"profile": "replay"})
    assert call(machine, profile="replay")[0] == 0


def the_run_with_rows(root) -> Run:
    """A run that holds 01_first's rows, recorded here."""
    namespace = {"output": Run.create(root / "elsewhere" / os.urandom(4).hex(), {}).folder}
    exec(recording("01_first"), namespace)  # the very cell of the notebook
    return namespace["run"]


def upto(process, mark: str) -> None:
    for line in process.stdout:
        if mark in line:
            return
    raise AssertionError(f"ended without {mark!r}: {process.stderr.read()}")


WAITING = """print('BANNER waiting', flush=True)
import time
from pathlib import Path
while not Path('go').exists():
    time.sleep(0.05)"""


@pytest.mark.book
@pytest.mark.process
@pytest.mark.slow
def test_any_end_leaves_a_run_that_the_next_call_finishes_with_the_same_rows(root, start):
    cells = [recording("01_first", experiment="kept"), WAITING, recording("01_first")]
    write_notebook(root / "phase1_hardware", "01_first", cells, produces=["kept", "counting"])
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = start()
        upto(process, "BANNER waiting")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert number == signal.SIGKILL or ("interrupted" in out and "continues where this call ended" in out)
        assert "Traceback" not in err and "Task was destroyed" not in err
        said = re.findall(r"(?:report|executed notebooks): (\S+)", out)
        assert all((root / path).exists() for path in said) and "report.html" not in out
        assert [row.experiment for row in the_run(root).rows()] == ["kept"]
        the_run(root).verify()
    (root / "phase1_hardware/go").write_text("")
    assert call()[0] == 0
    assert [row.experiment for row in the_run(root).rows()] == ["kept", "counting"]


@pytest.mark.book
@pytest.mark.process
def test_two_calls_at_once_work_in_folders_of_their_own(root, start):
    write_notebook(root / "phase1_hardware", "01_first", [WAITING, recording("01_first")])
    processes = [start(), start()]
    for process in processes:
        upto(process, "BANNER waiting")
    (root / "phase1_hardware/go").write_text("")
    ends = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    runs = [Run.open(path.parent) for path in root.glob("results/2*/run.json")]
    assert len(runs) == 2
    for run in runs:
        run.verify()
        assert len(run.rows()) == 1


@pytest.mark.book
@pytest.mark.process
def test_a_kernel_is_a_fresh_process_works_in_the_notebooks_folder_and_ends_with_its_driver(root, start):
    telling = """
import os, sys
print("BANNER", "torch" in sys.modules, os.path.basename(os.getcwd()), os.getpid(), flush=True)
"""
    write_notebook(root / "phase1_hardware", "01_first", [telling, WAITING, recording("01_first")])
    process = start()
    printed = next(line for line in process.stdout if "BANNER" in line).split()
    loaded, folder, kernel = printed[printed.index("BANNER") + 1 :][:3]
    assert (loaded, folder) == ("False", "phase1_hardware")
    process.kill()
    process.wait(60)
    deadline = time.monotonic() + 30
    while not has_ended(int(kernel)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
