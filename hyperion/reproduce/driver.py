"""One call of `make reproduce`: run what failed or changed, each after what it builds on, and say what came of it."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from hyperion.paths import SILENT_HOSTS, project_root, results_folder
from hyperion.reproduce import summary
from hyperion.reproduce.execution import Fault, Outcome, execute
from hyperion.reproduce.keeping import export_subjects, kept_files, show_fault
from hyperion.reproduce.kernels import OPTIMIZE, scratch_folder
from hyperion.reproduce.lanes import Interruption, Lanes, Place, scratch_of
from hyperion.reproduce.ledger import Entry, Ledger
from hyperion.reproduce.machine import Machine, ask_machine
from hyperion.reproduce.notebooks import Notebook, read_book, select
from hyperion.reproduce.pages import require_page_templates
from hyperion.reproduce.progress import Display
from hyperion.reproduce.runs import claimed_run
from hyperion.reproduce.standing import REPLAY, Request, Standing, demand_mirror, setting_of
from hyperion.reproduce.stopping import BudgetSpent, Stopped, limits_of, stoppable, told
from hyperion.results import set_latest
from hyperion.results.execution import LOG, MEASURED, REMEASURE, UNEXPECTED_ROW, executed, unexpected

FINISHED, FAILED, UNFINISHED = 0, 1, 3
# A chapter of such a status left rows that others can build on.
_HAVE_ROWS = ("done", "up to date", "unexpected")
_MEASURES_ANEW = (
    "    The next call measures this notebook's experiments anew. A training in a process of its own is kept, as the same "
    "seed gives the same again, unless a value of it was refused. What stays unexpected is a wrong claim or wrong code."
)


def reproduce(request: Request, *, machine: Machine | None = None, console: Console | None = None) -> int:
    """Execute the book, or one chapter and what it needs, and keep all it makes in a run folder.

    Args:
        machine: this machine, asked when left out.
        console: where progress goes, standard output when left out.

    Returns:
        0 when all requested notebooks are done, 1 when one failed or found something unexpected, 3 when the time budget
        ended first, 130 or 143 when a signal did. In each case a later call goes on from there.

    Raises:
        HyperionError: the request cannot be met: unknown chapter or profile, a folder that cannot be written, a full
            disk, a run that was edited. Nothing is half-written then.
    """
    console = console or Console(file=sys.stdout)
    try:
        with stoppable():
            root = project_root()
            chosen = select(read_book(root), request.only)
            demand_mirror(request)
            if os.environ.get(OPTIMIZE) or sys.flags.optimize:
                what = f"NOTICE: {OPTIMIZE} removes every assert: notebooks and their workers run without it"
                console.print(what, markup=False, highlight=False, soft_wrap=True)
            require_page_templates()
            machine = machine or ask_machine(request.profile, request.data_source, request.seed)
            setting = setting_of(request, machine)
            claim = claimed_run(results_folder(), request.run, setting, machine.information)
            with scratch_folder() as scratch, claim as (ledger, continued):
                return _Call(request, machine, root, ledger, Path(scratch), console).run(chosen, continued)
    except Stopped as stop:
        console.print(f"stopped by {stop}; the same command goes on from here", markup=False)
        return stop.exit_code


@dataclass(frozen=True)
class _Begun:
    """A notebook that runs.

    Args:
        before: what the run remembered of it.
        digest: what its result depends on.
        replays: a reference machine's rows instead of measuring.
    """

    before: Entry
    digest: str
    replays: bool
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return round(time.monotonic() - self.started, 3)


class _Call:
    def __init__(self, request: Request, machine: Machine, root: Path, ledger: Ledger, scratch: Path, console: Console):
        self.request, self.machine, self.root, self.ledger = request, machine, root, ledger
        self.run_store, self.scratch, self.console = ledger.run, scratch, console
        self.deadline = None if request.time_budget_s is None else time.monotonic() + request.time_budget_s
        self.limits = limits_of(machine.profile, request.cell_timeout_s, request.notebook_timeout_s, self.deadline)
        self.lanes, self.standing = Lanes(machine.masks), Standing(request, machine, ledger)
        self.begun: dict[str, _Begun] = {}
        self.lines: dict[str, summary.Line] = {}
        self.export_fault = ""

    def run(self, chosen: list[Notebook], continued: bool) -> int:
        expected = {n.stem: self.standing.expected_s(n) for n in chosen if not self.standing.is_done(n)}
        verb = "continuing" if continued else "starting"
        where, device = _shown(self.run_store.folder), self.machine.setting["device"]
        self._print(f"{verb} {where}: profile {self.machine.profile}, {device}")

        def lasting_s(seconds: dict[str, float]) -> float:
            return self.lanes.lasting_s([notebook for notebook in chosen if notebook.stem in seconds], seconds)

        self._print(f"{len(expected)} of {len(chosen)} notebooks to run, predicted {told(lasting_s(expected))}")
        if len(self.lanes.places) > 1:
            self._print(f"notebooks that use one device run side by side, on {len(self.lanes.places)} devices")
        code = FINISHED
        with Display(self.console, expected, lasting_s) as display, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nbformat and papermill on themselves; the kernels' own are output
            try:
                self._all(list(chosen), display)
            except Stopped as stop:
                code = stop.exit_code
            except BudgetSpent:
                code = UNFINISHED
        for notebook in chosen:
            self.lines.setdefault(notebook.stem, self._line("unfinished", notebook))
        return self._close(code)

    def _all(self, waiting: list[Notebook], display: Display) -> None:
        """Each as soon as the chapters that it builds on have ended and there is a place for it."""
        spent = False
        try:
            while waiting or self.lanes.stems:
                notebook = self.lanes.pick(waiting, self.standing.expected_s)
                if notebook is None:
                    spent |= self._ended(*self.lanes.wait(), display)
                else:
                    waiting.remove(notebook)
                    spent |= self._begin(notebook, display)
        except Stopped as stop:
            for notebook, outcome in self.lanes.stop(stop):
                if isinstance(outcome, Outcome):  # it had ended by itself
                    self._ended(notebook, outcome, display)
                else:
                    self._unfinished(notebook, "interrupted")
            raise
        except BaseException:  # a disk that is full, say: nothing more can be kept
            self.lanes.stop(Stopped(signal.SIGTERM))
            raise
        if spent:
            raise BudgetSpent

    def _begin(self, notebook: Notebook, display: Display) -> bool:
        """Start a notebook, or say why it need not or cannot run; whether the time budget is too short for it."""
        line = self._without_running(notebook)
        if line is None and not self._has_time(notebook, display):
            line = self._line("unfinished", notebook)
        if line is not None:
            display.drop(notebook.stem)
            self.lines[notebook.stem] = line
            return line.status == "unfinished"
        reference, _ = self.standing.reference(notebook)
        parameters = {
            "profile": f"{REPLAY}:{reference.machine}" if reference else self.machine.profile,
            "data_source": self.request.data_source,
            "output": self._output_for(notebook),
            "seed": self.request.seed,
        }
        entry = self.ledger.entries.get(notebook.stem, Entry("", "", 0.0, 0))
        self.begun[notebook.stem] = _Begun(entry, self.standing.digest(notebook, reference), reference is not None)
        display.start(notebook.stem, len(notebook.code) + 1)  # papermill adds the cell with our parameters

        silent = self.scratch / "silent-hosts"  # of all notebooks of this call
        silent.mkdir(exist_ok=True)

        def work(place: Place, interruption: Interruption) -> Outcome:
            told = {LOG: str(self._log(notebook)), REMEASURE: "1" if entry.remeasure else "0"}
            environment = told | place.environment | {SILENT_HOSTS: str(silent)}
            return execute(
                notebook,
                parameters,
                scratch_of(place, self.scratch),
                environment,
                interruption=interruption,
                on_cell=lambda done: display.cell(notebook.stem, done),
                on_line=display.say,
                limits=self.limits,
                lacks_rows=lambda: bool(unexpected(self._log(notebook), notebook.stem, UNEXPECTED_ROW)),
            )

        self.lanes.start(notebook, work)
        return False

    def _without_running(self, notebook: Notebook) -> summary.Line | None:
        """The line of a notebook that is not to run: blocked, skipped or up to date; None for one that is."""
        upstream = {stem: self.lines[stem].status for stem in (*notebook.needs, *notebook.optional) if stem in self.lines}
        if "unfinished" in upstream.values():  # what it would build on comes with the next call
            return self._line("unfinished", notebook)
        blocker = next((need for need in notebook.needs if upstream[need] not in _HAVE_ROWS), None)
        if blocker is not None:
            status = "skipped" if self.lines[blocker].status == "skipped" else "blocked"
            return self._line(status, notebook, f"{status} by {blocker}")
        reference, reason = self.standing.reference(notebook)
        if reason:
            return self._line("skipped", notebook, reason)
        if self.standing.is_up_to_date(notebook, self.standing.digest(notebook, reference)):
            return self._line("up to date", notebook)
        return None

    def _ended(self, notebook: Notebook, outcome: object, display: Display) -> bool:
        """Keep what a notebook left; whether it ended because the time budget is spent."""
        if isinstance(outcome, BudgetSpent):
            self._unfinished(notebook, "unfinished")
            display.finish(notebook.stem, f"{notebook.stem}: unfinished, the time budget is spent")
            return True
        if isinstance(outcome, Exception):  # of papermill, a socket, a file: this notebook's, and no other's
            outcome = Outcome(None, Fault(f"{type(outcome).__name__}: {outcome}"))
        if isinstance(outcome, BaseException):
            raise outcome
        begun, done = self.begun.pop(notebook.stem), executed(self._log(notebook), notebook.stem)
        fault = outcome.fault or self.standing.missing_fault(notebook, done)
        told_of = (*unexpected(self._log(notebook), notebook.stem), *outcome.not_evaluated)
        seconds, whole = begun.seconds(), all(done.get(e) == MEASURED for e in notebook.produces)
        entry = Entry(
            "failed" if fault else "unexpected" if told_of else "done",
            begun.digest,
            seconds,
            len(self.run_store.rows(notebook.stem)),
            fault.summary.partition("\n")[0] if fault else f"{len(told_of)} unexpected, see below" if told_of else "",
            # Until a go has ended as expected, each measures anew; a replay measures nothing.
            remeasure=not begun.replays and bool(told_of or (fault and begun.before.remeasure)),
            unexpected=told_of,
            whole_s=seconds if whole and not fault else begun.before.whole_s,
        )
        self._keep(notebook, entry, outcome.document)
        display.finish(notebook.stem, f"{notebook.stem}: {entry.status} in {told(entry.seconds)}, {entry.rows} rows")
        if fault:
            show_fault(display.say, notebook, fault, self.run_store.folder)
        if entry.remeasure:
            display.say(_MEASURES_ANEW)
        self.lines[notebook.stem] = self._line(entry.status, notebook, entry.note)
        return False

    def _unfinished(self, notebook: Notebook, status: str) -> None:
        begun = self.begun.pop(notebook.stem)
        entry = replace(begun.before, status=status, hash=begun.digest, seconds=begun.seconds(), rows=0, note="")
        self._keep(notebook, entry)
        self.lines[notebook.stem] = self._line(status, notebook, "call again to go on")

    def _log(self, notebook: Notebook) -> Path:
        return self.scratch / f"{notebook.stem}.experiments"

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
        for stem, line in self.lines.items():
            for sentence in self.ledger.entries[stem].unexpected if line.status in ("unexpected", "failed") else ():
                self._print(f"UNEXPECTED in {stem}: {sentence}")
        statuses = {line.status for line in self.lines.values()}
        if code == FINISHED and (statuses & {"failed", "unexpected", "blocked"} or self.export_fault):
            code = FAILED
        if code == FINISHED:
            set_latest(self.run_store.folder)
        folder = _shown(self.run_store.folder)
        self._print(f"results: {folder}   report: {folder}/report.html   executed notebooks: {folder}/notebooks/")
        if code != FINISHED:
            self._print("not finished: the same command goes on from here")
        return code

    def _has_time(self, notebook: Notebook, display: Display) -> bool:
        """Whether it will probably end within the time budget."""
        expected = self.standing.expected_s(notebook)
        if self.deadline is None or time.monotonic() + expected <= self.deadline:
            return True
        left = self.deadline - time.monotonic()
        if left > 0:
            display.say(f"{notebook.stem}: expected to take {told(expected)}, {told(left)} of the budget left: not started")
        return False

    def _line(self, status: str, notebook: Notebook, note: str = "") -> summary.Line:
        entry = self.ledger.entries.get(notebook.stem)
        return summary.Line(status, entry and entry.seconds, self.run_store.rows(notebook.stem), note)

    def _output_for(self, notebook: Notebook) -> str:
        """The run's folder as the notebook sees it: relative inside the checkout, so that no copy names the machine."""
        folder = self.run_store.folder.resolve()
        return (
            os.path.relpath(folder, notebook.path.parent.resolve()) if folder.is_relative_to(self.root.resolve()) else str(folder)
        )

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
