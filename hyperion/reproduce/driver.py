"""One call of `make reproduce`: run what failed or changed, in order, and say what came of it."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from hyperion.errors import HyperionError
from hyperion.paths import project_root, results_folder
from hyperion.processes.starting import fork_server_running
from hyperion.reproduce import summary
from hyperion.reproduce.execution import Fault, execute
from hyperion.reproduce.hashes import data_changed, notebook_hash, rows_digest
from hyperion.reproduce.keeping import export_subjects, kept_files, show_fault
from hyperion.reproduce.kernels import library_environment, scratch_folder
from hyperion.reproduce.ledger import Entry, Ledger
from hyperion.reproduce.machine import Machine, ask_machine
from hyperion.reproduce.notebooks import Notebook, read_book, select
from hyperion.reproduce.pages import require_page_templates
from hyperion.reproduce.progress import Display
from hyperion.reproduce.references import Reference, reference_for
from hyperion.reproduce.runs import claimed_run, earlier_seconds
from hyperion.reproduce.stopping import BudgetSpent, Stopped, stoppable, told
from hyperion.results import set_latest
from hyperion.results.execution import LOG, MEASURED, REMEASURE, executed

FINISHED, FAILED, UNFINISHED = 0, 1, 3
REPLAY = "replay"
_MEASURES_ANEW = (
    "    The next call measures this notebook's experiments anew; trainings in a process of their own are kept, as the same "
    "seed gives the same again. Should it fail again, the claim or the code is wrong."
)


@dataclass(frozen=True)
class Request:
    """What the caller asked for.

    Args:
        profile: auto, smoke, full, study or replay.
        data_source: auto, mirror, cache, download or synthetic.
        only: one chapter, run with all it needs; None runs the book.
        run: None continues the newest run of this setting, `new` starts one, another name continues or starts that run.
        time_budget_s: stop cleanly rather than take longer; None has no end.
        seed: seeds everything that is drawn.
        replay_of: the reference machine to replay; None takes the first that holds the notebook.
    """

    profile: str = "auto"
    data_source: str = "auto"
    only: str | None = None
    run: str | None = None
    time_budget_s: float | None = None
    seed: int = 0
    replay_of: str | None = None


def reproduce(request: Request, *, machine: Machine | None = None, console: Console | None = None) -> int:
    """Execute the book, or one chapter and what it needs, and keep all it makes in a run folder.

    Args:
        machine: this machine, asked when left out.
        console: where progress goes, standard output when left out.

    Returns:
        0 when all requested notebooks are done, 1 when one failed, 3 when the time budget ended first, 130 or 143
        when a signal did. In each case a later call goes on from there.

    Raises:
        HyperionError: the request cannot be met: unknown chapter or profile, a folder that cannot be written, a full
            disk, a run that was edited. Nothing is half-written then.
    """
    console = console or Console(file=sys.stdout)
    try:
        with stoppable():
            root = project_root()
            chosen = select(read_book(root), request.only)
            _demand_mirror(request)
            require_page_templates()
            machine = machine or ask_machine(request.profile, request.data_source, request.seed)
            setting = _setting(request, machine)
            claim = claimed_run(results_folder(), request.run, setting, machine.information)
            with scratch_folder() as scratch, claim as (ledger, continued):
                return _Call(request, machine, root, ledger, Path(scratch), console).run(chosen, continued)
    except Stopped as stop:
        console.print(f"stopped by {stop}; the same command goes on from here", markup=False)
        return stop.exit_code


class _Call:
    def __init__(self, request: Request, machine: Machine, root: Path, ledger: Ledger, scratch: Path, console: Console):
        self.request, self.machine, self.root, self.ledger = request, machine, root, ledger
        self.run_store, self.scratch, self.console = ledger.run, scratch, console
        self.deadline = None if request.time_budget_s is None else time.monotonic() + request.time_budget_s
        self.lines: dict[str, summary.Line] = {}
        self.export_fault = ""

    def run(self, chosen: list[Notebook], continued: bool) -> int:
        expected = {notebook.stem: self._expected_s(notebook) for notebook in chosen if not self._is_done(notebook)}
        verb = "continuing" if continued else "starting"
        self._print(
            f"{verb} {_shown(self.run_store.folder)}: profile {self.machine.profile}, {self.machine.setting['device']}"
        )
        self._print(f"{len(expected)} of {len(chosen)} notebooks to run, predicted {told(sum(expected.values()))}")
        code = FINISHED
        workers = fork_server_running(library_environment()) if expected else nullcontext()
        with workers, Display(self.console, expected) as display:
            try:
                for notebook in chosen:
                    self.lines[notebook.stem] = self._one(notebook, display)
            except Stopped as stop:
                code = stop.exit_code
            except BudgetSpent:
                code = UNFINISHED
        for notebook in chosen:
            self.lines.setdefault(notebook.stem, self._line("unfinished", notebook))
        return self._close(code)

    def _one(self, notebook: Notebook, display: Display) -> summary.Line:
        blocker = next((need for need in notebook.needs if self.lines[need].status not in ("done", "up to date")), None)
        if blocker is not None:
            display.drop(notebook.stem)
            status = "skipped" if self.lines[blocker].status == "skipped" else "blocked"
            return self._line(status, notebook, f"{status} by {blocker}")
        reference, reason = self._reference(notebook)
        if reason:
            display.drop(notebook.stem)
            return self._line("skipped", notebook, reason)
        digest = self._digest(notebook, reference)
        if self._is_up_to_date(notebook, digest):
            display.drop(notebook.stem)
            return self._line("up to date", notebook)
        self._demand_time(notebook, display)
        return self._execute(notebook, digest, reference, display)

    def _execute(self, notebook: Notebook, digest: str, reference: Reference | None, display: Display) -> summary.Line:
        parameters = {
            "profile": f"{REPLAY}:{reference.machine}" if reference else self.machine.profile,
            "data_source": self.request.data_source,
            "output": self._output_for(notebook),
            "seed": self.request.seed,
        }
        before = self.ledger.entries.get(notebook.stem, Entry("", "", 0.0, 0))
        log = self.scratch / f"{notebook.stem}.experiments"
        environment = {LOG: str(log), REMEASURE: "1" if before.remeasure else "0"}
        display.start(notebook.stem, len(notebook.code) + 1)  # papermill adds the cell with our parameters
        started = time.monotonic()

        def on_cell(done: int) -> None:
            display.cell(done)
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise BudgetSpent

        try:
            outcome = execute(notebook, parameters, self.scratch, environment, on_cell=on_cell, on_line=display.say)
        except (Stopped, BudgetSpent) as end:
            status = "interrupted" if isinstance(end, Stopped) else "unfinished"
            seconds = time.monotonic() - started
            self._keep(notebook, replace(before, status=status, hash=digest, seconds=seconds, rows=0, note=""))
            self.lines[notebook.stem] = self._line(status, notebook, "call again to go on")
            raise
        done = executed(log, notebook.stem)
        fault = outcome.fault or self._missing_fault(notebook, done)
        seconds, whole = round(time.monotonic() - started, 3), all(done.get(e) == MEASURED for e in notebook.produces)
        entry = Entry(
            "failed" if fault else "done",
            digest,
            seconds,
            len(self.run_store.rows(notebook.stem)),
            fault.summary.partition("\n")[0] if fault else "",
            # Until a go has passed the check, each measures anew; a replay measures nothing.
            remeasure=reference is None and fault is not None and (fault.is_failed_check or before.remeasure),
            whole_s=seconds if whole and not fault else before.whole_s,
        )
        self._keep(notebook, entry, outcome.document)
        display.finish(f"{notebook.stem}: {entry.status} in {told(entry.seconds)}, {entry.rows} rows")
        if fault:
            show_fault(display.say, notebook, fault, self.run_store.folder)
            if entry.remeasure:
                display.say(_MEASURES_ANEW)
        return self._line(entry.status, notebook, entry.note)

    def _keep(self, notebook: Notebook, entry: Entry, document=None) -> None:
        files = {} if document is None else kept_files(notebook, document, self.run_store.folder, self.root)
        self.ledger.keep(notebook.stem, entry, files)

    def _export(self, say: Callable[[str], object]) -> None:
        fault = export_subjects(self.ledger)
        if fault and fault != self.export_fault:
            say(fault)
        self.export_fault = fault

    def _close(self, code: int) -> int:
        # Once a call: drawing everything anew after each notebook took longer than some notebooks.
        if code in (FINISHED, UNFINISHED):
            self._export(self._print)
        summary.show_table(self.console, self.lines)
        statuses = {line.status for line in self.lines.values()}
        if code == FINISHED and (statuses & {"failed", "blocked"} or self.export_fault):
            code = FAILED
        if code == FINISHED:
            set_latest(self.run_store.folder)
        folder = _shown(self.run_store.folder)
        self._print(f"results: {folder}   report: {folder}/report.html   executed notebooks: {folder}/notebooks/")
        if code != FINISHED:
            self._print("not finished: the same command goes on from here")
        return code

    def _is_done(self, notebook: Notebook) -> bool:
        """Whether it will probably be up to date when its turn comes (an upstream chapter may yet change its rows)."""
        reference, _ = self._reference(notebook)
        return self._is_up_to_date(notebook, self._digest(notebook, reference))

    def _is_up_to_date(self, notebook: Notebook, digest: str) -> bool:
        if not self.ledger.is_done(notebook.stem, digest) or self._missing(notebook):
            return False
        return not data_changed(self.run_store, notebook, self.request.data_source)

    def _digest(self, notebook: Notebook, reference: Reference | None) -> str:
        parameters = {
            "setting": self.ledger.setting,
            "sizes": self.machine.sections.get(notebook.stem),
            "reference": reference and [reference.machine, reference.digest],
        }
        upstream = {stem: rows_digest(self.run_store, stem) for stem in (*notebook.needs, *notebook.optional)}
        return notebook_hash(notebook, parameters, upstream)

    def _reference(self, notebook: Notebook) -> tuple[Reference | None, str]:
        if self.machine.profile != REPLAY:
            return None, ""
        return reference_for(notebook, self.request.replay_of)

    def _missing(self, notebook: Notebook) -> list[str]:
        return [name for name in notebook.produces if not self.run_store.rows(notebook.stem, name)]

    def _missing_fault(self, notebook: Notebook, done: dict[str, str]) -> Fault | None:
        """Every experiment must have been measured, or found to stand, by this very go; older rows prove nothing."""
        without = self._missing(notebook)
        missing = [name for name in notebook.produces if name in without or name not in done]
        return Fault(f"ran, but left no rows of: {', '.join(missing)}") if missing else None

    def _expected_s(self, notebook: Notebook) -> float:
        entry = self.ledger.entries.get(notebook.stem)
        if entry is not None and entry.whole_s is not None:
            return entry.whole_s
        earlier = earlier_seconds(results_folder(), self.ledger.setting, notebook.stem)
        return notebook.budget_s(self.machine.profile) if earlier is None else earlier

    def _demand_time(self, notebook: Notebook, display: Display) -> None:
        expected = self._expected_s(notebook)
        if self.deadline is not None and time.monotonic() + expected > self.deadline:
            left = max(self.deadline - time.monotonic(), 0)
            display.say(
                f"{notebook.stem}: expected to take {told(expected)}, {told(left)} of the budget left: stopping here"
            )
            raise BudgetSpent

    def _line(self, status: str, notebook: Notebook, note: str = "") -> summary.Line:
        entry = self.ledger.entries.get(notebook.stem)
        return summary.Line(status, entry and entry.seconds, self.run_store.rows(notebook.stem), note)

    def _output_for(self, notebook: Notebook) -> str:
        """The run's folder as the notebook sees it: relative inside the checkout, so that no copy names the machine."""
        folder = self.run_store.folder.resolve()
        return (
            os.path.relpath(folder, notebook.path.parent.resolve())
            if folder.is_relative_to(self.root.resolve())
            else str(folder)
        )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()


def _setting(request: Request, machine: Machine) -> dict:
    # `auto` with a mirror at hand and `auto` without one are two different requests.
    mirror = request.data_source in ("auto", "mirror") and bool(os.environ.get("HYPERION_DATA_MIRROR"))
    asked = {"profile": machine.profile, "data_source": request.data_source, "mirror": mirror, "seed": request.seed}
    return asked | {"replay_of": request.replay_of} | machine.setting


def _demand_mirror(request: Request) -> None:
    """A mirror that somebody asked for and that is not there stops the call before anything has run."""
    named = os.environ.get("HYPERION_DATA_MIRROR")
    if request.data_source not in ("auto", "mirror") or request.profile == REPLAY or not named:
        return
    if not Path(named).expanduser().is_dir():
        remedy = "correct HYPERION_DATA_MIRROR, or unset it to use the cache, a download or synthetic data"
        raise HyperionError("HYPERION_DATA_MIRROR names no folder", where=named, next_step=remedy)


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
