"""Run the notebooks for one call of `make reproduce`.

Only notebooks that failed or changed are run. Each notebook starts after the notebooks that it needs. Finally, a summary of all
notebooks is printed.
"""

import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rich.console import Console

from hyperion.hardware.cpu import waiting_threads
from hyperion.paths import FRAMES, SILENT_HOSTS, project_root, results_folder
from hyperion.reproduce.display import Display, TableLine, show_failure, show_table
from hyperion.reproduce.execution import (
    BudgetSpent,
    Interruption,
    NotebookFailure,
    Outcome,
    Stopped,
    execute,
    format_duration,
    limits_of,
    stoppable,
)
from hyperion.reproduce.freshness import Freshness, absent_frameworks
from hyperion.reproduce.kernels import OPTIMIZE, scratch_folder
from hyperion.reproduce.lanes import Lanes, Place
from hyperion.reproduce.machine import MachineProfile, examine_machine
from hyperion.reproduce.notebooks import Notebook, read_book, select
from hyperion.reproduce.publishing import export_subjects, notebook_files, require_page_templates
from hyperion.reproduce.runs import (
    REPLAY,
    Entry,
    Ledger,
    Request,
    claimed_run,
    require_mirror,
    require_reference,
    setting_of,
    why_not_continued,
)
from hyperion.results import set_latest
from hyperion.results.execution import LOG, MEASURED, REMEASURE, UNEXPECTED_ROW, executed, unexpected

# None makes the import of this module fail, so that nbformat's schema checker does not build a grammar of internationalized
# addresses, which would take one second in every call and which no notebook needs.
sys.modules.setdefault("rfc3987_syntax", cast(ModuleType, None))

FINISHED, FAILED, UNFINISHED = 0, 1, 3
# Statuses of notebooks whose rows other notebooks can use.
_HAVE_ROWS = ("done", "up to date", "unexpected")
_NOTICED_SLOWDOWN = 1.25  # smaller slowdowns are not mentioned
_REMEASURED_NEXT = (
    "    The next call measures the experiments of this notebook again. Training runs in separate processes are not repeated "
    "unless one of their values was refused, because the same seed gives the same result. If a result is still unexpected then, "
    "the claim or the code is wrong."
)


def reproduce(request: Request, *, machine: MachineProfile | None = None, console: Console | None = None) -> int:
    """Execute all notebooks, or one chapter and the chapters that it needs, and store all results in a run folder.

    Args:
        request: profile, data source, chapter, run and time limits of this call.
        machine: this machine and its profile; default: a separate process examines the machine.
        console: console on which progress is printed; default: standard output.

    Returns:
        0 if all requested notebooks are done, 1 if a notebook failed or found something unexpected, 3 if the time budget ended
        before all notebooks were done, 130 after SIGINT, and 143 after SIGTERM. After each of these, a later call with the same
        request continues where this call ended.

    Raises:
        HyperionError: the chapter or the profile does not exist, a folder cannot be written, the disk is full, or the run was
            edited. No file is left half-written.
    """
    console = console or Console(file=sys.stdout)
    try:
        with stoppable():
            root = project_root()
            chosen = select(read_book(root), request.only)
            require_mirror(request)
            require_reference(request)
            if os.environ.get(OPTIMIZE) or sys.flags.optimize:
                notice = f"NOTICE: {OPTIMIZE} removes assert statements. Notebooks and their workers run without this variable."
                console.print(notice, markup=False, highlight=False, soft_wrap=True)
            if machine is None:
                # On a busy machine, the process that examines the machine can take half a minute.
                console.print("examining this machine", highlight=False)
                console.file.flush()
                experiments = [name for notebook in chosen for name in notebook.produces]
                machine = examine_machine(request.profile, request.data_source, request.seed, experiments)
            require_page_templates()
            setting = setting_of(request, machine)
            reason = why_not_continued(results_folder(), setting) if request.run is None else ""
            information = machine.information | {"command_line": request.command_line}
            claim = claimed_run(results_folder(), request.run, setting, information)
            with scratch_folder() as scratch, claim as (ledger, continued):
                return _Call(request, machine, root, ledger, Path(scratch), console).run(chosen, continued, reason)
    except Stopped as stop:
        console.print(f"stopped by {stop}; the same command continues where this call ended", markup=False)
        return stop.exit_code


@dataclass(frozen=True)
class _StartedNotebook:
    """A running notebook.

    Args:
        before: the stored entry about the previous execution of this notebook.
        inputs: hashes of everything on which the result depends.
        why_again: the reason why the notebook runs again; "" if it has not run before in this run.
        replays: whether the notebook reads the rows of a reference machine instead of measuring.
        started: start time of the notebook, from `time.monotonic`.
    """

    before: Entry
    inputs: dict[str, str]
    why_again: str
    replays: bool
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        return round(time.monotonic() - self.started, 3)


def _slowdown(on_accelerator: bool) -> float:
    """Return the factor by which other processes on the CPU slow down the notebooks. It is 1 on an idle machine.

    The scheduler gives each runnable thread the same share of the CPUs. On a CPU, a measurement uses one thread per CPU. With an
    accelerator, the host needs one thread.
    """
    cpus = os.cpu_count() or 1
    own = 1 if on_accelerator else cpus
    return max((waiting_threads() + own) / cpus, 1.0)


class _Call:
    """One call of `make reproduce`: runs the notebooks, stores their results, and prints the summary."""

    def __init__(self, request: Request, machine: MachineProfile, root: Path, ledger: Ledger, scratch: Path, console: Console):
        self.request, self.machine, self.root, self.ledger = request, machine, root, ledger
        self.run_store, self.scratch, self.console = ledger.run, scratch, console
        self.deadline = None if request.time_budget_s is None else time.monotonic() + request.time_budget_s
        self.limits = limits_of(machine.profile, request.cell_timeout_s, request.notebook_timeout_s, self.deadline)
        self.lanes, self.freshness = Lanes(machine.masks), Freshness(request, machine, ledger)
        self.started: dict[str, _StartedNotebook] = {}
        self.lines: dict[str, TableLine] = {}
        self.too_long_s: list[float] = []  # expected seconds of the notebooks that did not fit into the time budget
        self.announced: set[tuple[str, ...]] = set()  # announcements of data sources that this call has printed

    def run(self, chosen: list[Notebook], continued: bool, why_new: str) -> int:
        waiting = [notebook for notebook in chosen if not self.freshness.is_done(notebook)]
        idle = {notebook.stem: self.freshness.expected_s(notebook) for notebook in waiting}
        # Times of earlier executions already include the effect of other processes on this machine.
        unknown = [notebook.stem for notebook in waiting if self.freshness.known_s(notebook) is None]
        slowdown = _slowdown(bool(self.machine.information.get("environment", {}).get("gpus"))) if unknown else 1.0
        expected = idle | {stem: idle[stem] * slowdown for stem in unknown}
        verb = "continuing" if continued else "starting"
        where, device = _relative(self.run_store.folder), self.machine.setting["device"]
        self._print(f"{verb} {where}: profile {self.machine.profile}, {device}")
        if why_new and not continued:
            self._print(f"a new run, because the newest run differs: {why_new}")

        def total_s(seconds: dict[str, float]) -> float:
            return self.lanes.lasting_s([notebook for notebook in chosen if notebook.stem in seconds], seconds)

        predicted = format_duration(total_s(expected))
        if slowdown > _NOTICED_SLOWDOWN:
            predicted += f" ({format_duration(total_s(idle))} on an idle machine, but other processes use the CPU)"
        self._print(f"{len(expected)} of {len(chosen)} notebooks to run, predicted {predicted}")
        if self.machine.profile != REPLAY and (absent := absent_frameworks(expected)):
            command = f"hyperion frameworks install {' '.join(absent)}"
            self._print(f"frameworks that are not installed: {', '.join(absent)}; `{command}` lets them take part")
        places = len(self.lanes.places)
        if places > 1 and self.machine.profile == REPLAY:
            self._print(f"up to {places} notebooks run at the same time, because a replay measures nothing")
        elif places > 1:
            self._print(f"notebooks that use one device run at the same time, on {places} devices")
        code = FINISHED
        with Display(self.console, expected, total_s) as display, warnings.catch_warnings():
            # Warnings in this process come from nbformat and papermill. Warnings in cells are part of the output of the cells.
            warnings.simplefilter("ignore")
            try:
                self._run_all(list(chosen), display)
            except Stopped as stop:
                # The summary below is printed even if the call was stopped.
                code = stop.exit_code
            except BudgetSpent:
                code = UNFINISHED
        for notebook in chosen:
            self.lines.setdefault(notebook.stem, self._line("unfinished", notebook))
        return self._close(code)

    def _run_all(self, waiting: list[Notebook], display: Display) -> None:
        """Start each notebook as soon as the notebooks that it needs have ended and a part of the machine is free for it."""
        spent = False
        try:
            while waiting or self.lanes.stems:
                notebook = self.lanes.pick(waiting, self.freshness.expected_s)
                if notebook is None:
                    # After the budget is spent, running notebooks may still end, but no new one has time to start, so the loop
                    # ends.
                    spent |= self._end(*self.lanes.wait(), display)
                else:
                    waiting.remove(notebook)
                    spent |= self._start(notebook, display)
        except Stopped as stop:
            for notebook, outcome in self.lanes.stop(stop):
                if isinstance(outcome, Outcome):  # the notebook ended before the stop arrived
                    self._end(notebook, outcome, display)
                else:
                    self._unfinished(notebook, "interrupted")
            raise
        except BaseException:  # for example, results can no longer be stored because the disk is full
            self.lanes.stop(Stopped(signal.SIGTERM))
            raise
        if spent:
            raise BudgetSpent

    def _start(self, notebook: Notebook, display: Display) -> bool:
        """Start a notebook unless it is up to date or cannot run. Return True if the remaining time budget is too short."""
        line = self._line_without_running(notebook)
        if line is None and not self._has_time(notebook, display):
            line = self._line("unfinished", notebook)
        if line is not None:
            display.drop(notebook.stem)
            self.lines[notebook.stem] = line
            return line.status == "unfinished"
        reference, _ = self.freshness.reference(notebook)
        parameters = {
            "profile": f"{REPLAY}:{reference.machine}" if reference else self.machine.profile,
            "data_source": self.request.data_source,
            "output": self._output_for(notebook),
            "seed": self.request.seed,
        }
        entry = self.ledger.entries.get(notebook.stem, Entry("", {}, 0.0, 0))
        inputs = self.freshness.inputs(notebook, reference)
        reason = self.freshness.why_again(notebook, inputs)
        self.started[notebook.stem] = _StartedNotebook(entry, inputs, reason, reference is not None)
        display.start(notebook.stem, len(notebook.code) + 1, reason)  # plus 1, because papermill adds a cell with the parameters

        silent = self.scratch / "silent-hosts"  # shared by all notebooks of this call
        # With this folder, later notebooks do not wait again for a host that did not answer.
        silent.mkdir(exist_ok=True)
        frames = self.scratch / f"frames-{notebook.stem}"
        frames.mkdir(exist_ok=True)

        def work(place: Place, interruption: Interruption) -> Outcome:
            variables = {LOG: str(self._log(notebook)), REMEASURE: "1" if entry.remeasure else "0"}
            variables |= {SILENT_HOSTS: str(silent), FRAMES: str(frames)}
            # Only one notebook at a time uses a place, so the sockets and files of kernels cannot collide.
            folder = self.scratch / str(place.number)
            folder.mkdir(exist_ok=True)
            return execute(
                notebook,
                parameters,
                folder,
                variables | place.environment,
                interruption=interruption,
                on_cell=lambda done: display.cell(notebook.stem, done),
                on_line=display.say,
                announced=self.announced,
                limits=self.limits,
                lacks_rows=lambda: bool(unexpected(self._log(notebook), notebook.stem, UNEXPECTED_ROW)),
            )

        self.lanes.start(notebook, work)
        return False

    def _line_without_running(self, notebook: Notebook) -> TableLine | None:
        """Return the table line of a notebook that is blocked, skipped or up to date, or None if the notebook must run."""
        upstream = {stem: self.lines[stem].status for stem in (*notebook.needs, *notebook.optional) if stem in self.lines}
        if "unfinished" in upstream.values():  # the next call runs the needed notebooks first, then this one
            return self._line("unfinished", notebook)
        blocker = next((need for need in notebook.needs if upstream[need] not in _HAVE_ROWS), None)
        if blocker is not None:
            status = "skipped" if self.lines[blocker].status == "skipped" else "blocked"
            return self._line(status, notebook, f"{status} by {blocker}")
        reference, reason = self.freshness.reference(notebook)
        if reason:
            return self._line("skipped", notebook, reason)
        if self.freshness.is_up_to_date(notebook, self.freshness.inputs(notebook, reference)):
            return self._line("up to date", notebook)
        return None

    def _end(self, notebook: Notebook, outcome: object, display: Display) -> bool:
        """Store the results of a notebook. Return True if the notebook ended because the time budget is spent.

        Args:
            outcome: what `execute` returned or raised.
        """
        if isinstance(outcome, BudgetSpent):
            self._unfinished(notebook, "unfinished")
            display.finish(notebook.stem, f"{notebook.stem}: unfinished, the time budget is spent")
            return True
        if isinstance(outcome, Exception):  # an error of papermill, a socket or a file: the other notebooks continue
            outcome = Outcome(None, NotebookFailure(f"{type(outcome).__name__}: {outcome}"))
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Outcome)
        started, done = self.started.pop(notebook.stem), executed(self._log(notebook), notebook.stem)
        failure = outcome.failure or self.freshness.missing_rows(notebook, done)
        surprises = (*unexpected(self._log(notebook), notebook.stem), *outcome.not_evaluated)
        # If some rows were already stored, the notebook took less time, so its duration does not predict that of a full run.
        seconds, whole = started.seconds(), all(done.get(e) == MEASURED for e in notebook.produces)
        note = f"{len(surprises)} unexpected, see below" if surprises else ""
        entry = Entry(
            "failed" if failure else "unexpected" if surprises else "done",
            started.inputs,
            seconds,
            len(self.run_store.rows(notebook.stem)),
            failure.summary.partition("\n")[0] if failure else note,
            # After an unexpected result, every execution measures again until one has no unexpected result. A replay never does.
            remeasure=not started.replays and bool(surprises or (failure and started.before.remeasure)),
            unexpected=surprises,
            whole_s=seconds if whole and not failure else started.before.whole_s,
        )
        self._keep(notebook, entry, outcome.document)
        duration = format_duration(entry.seconds)
        line = f"{notebook.stem}: {entry.status} in {duration}, {entry.rows} rows"
        display.finish(notebook.stem, line, whole=not failure and (whole or started.replays))
        if failure:
            show_failure(display.say, notebook, failure, self.run_store.folder)
        if entry.remeasure:
            display.say(_REMEASURED_NEXT)
        again = f"ran again ({started.why_again})" if started.why_again else ""
        self.lines[notebook.stem] = self._line(entry.status, notebook, entry.note or again)
        return False

    def _unfinished(self, notebook: Notebook, status: str) -> None:
        started = self.started.pop(notebook.stem)
        entry = replace(started.before, status=status, inputs=started.inputs, seconds=started.seconds(), rows=0, note="")
        self._keep(notebook, entry)
        self.lines[notebook.stem] = self._line(status, notebook, "call again to continue")

    def _log(self, notebook: Notebook) -> Path:
        return self.scratch / f"{notebook.stem}.experiments"

    def _keep(self, notebook: Notebook, entry: Entry, document: Any = None) -> None:
        files = {} if document is None else notebook_files(notebook, document, self.run_store.folder, self.root)
        self.ledger.keep(notebook.stem, entry, files)

    def _close(self, code: int) -> int:
        # Pictures are drawn once per call, because drawing all of them takes longer than some notebooks.
        export_failure = ""
        if code in (FINISHED, UNFINISHED):
            self._print("drawing the figures and writing the report")
            export_failure = export_subjects(self.ledger)
        if export_failure:
            self._print(export_failure)
        show_table(self.console, self.lines)
        for stem, line in self.lines.items():
            for sentence in self.ledger.entries[stem].unexpected if line.status in ("unexpected", "failed") else ():
                self._print(f"UNEXPECTED in {stem}: {sentence}")
        statuses = {line.status for line in self.lines.values()}
        if code == FINISHED and (statuses & {"failed", "unexpected", "blocked"} or export_failure):
            code = FAILED
        if code == FINISHED:
            # Only a complete run becomes `latest`.
            set_latest(self.run_store.folder)
        folder = _relative(self.run_store.folder)
        # An interrupted call has no report, and possibly no executed notebook.
        outputs = {"report": "report.html", "executed notebooks": "notebooks"}
        there = {what: name for what, name in outputs.items() if (self.run_store.folder / name).exists()}
        self._print("   ".join([f"results: {folder}", *(f"{what}: {folder}/{name}" for what, name in there.items())]))
        if self.too_long_s and not self.started:
            least = format_duration(min(self.too_long_s))
            why = f"no chapter fits into this time budget: the shortest of the remaining ones takes about {least}"
            self._print(f"not finished; {why}")
        elif code != FINISHED:
            self._print("not finished; the same command continues where this call ended")
        return code

    def _has_time(self, notebook: Notebook, display: Display) -> bool:
        """Return True if the notebook is expected to end within the time budget."""
        expected = self.freshness.expected_s(notebook)
        if self.deadline is None or time.monotonic() + expected <= self.deadline:
            return True
        left = self.deadline - time.monotonic()
        if left > 0:
            duration, rest = format_duration(expected), format_duration(left)
            display.say(f"{notebook.stem}: not started, because it takes about {duration} and the budget has {rest} left")
            self.too_long_s.append(expected)
        return False

    def _line(self, status: str, notebook: Notebook, note: str = "") -> TableLine:
        entry = self.ledger.entries.get(notebook.stem)
        return TableLine(status, entry and entry.seconds, self.run_store.rows(notebook.stem), note)

    def _output_for(self, notebook: Notebook) -> str:
        """Return the path of the run's folder that is passed to the notebook.

        If the folder is in the checkout, the path is relative, so that copies of the notebook contain no local paths.
        """
        folder = self.run_store.folder.resolve()
        if not folder.is_relative_to(self.root.resolve()):
            return str(folder)
        return os.path.relpath(folder, notebook.path.parent.resolve())

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
