"""Execute one notebook with papermill and say what came of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hyperion.reproduce.kernels import KERNEL, kernel_manager_class
from hyperion.reproduce.lanes import Interruption
from hyperion.reproduce.notebooks import Notebook
from hyperion.reproduce.stopping import Alarm, LimitExceeded, Limits

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Fault:
    """Why a notebook failed.

    Args:
        summary: what went wrong; the first line says it in short.
        cell: number of the cell as the executed copy shows it, In [n]; None when no cell is to blame.
        traceback: text of the kernel's traceback, "" when there is none or the summary says it all.
    """

    summary: str
    cell: int | None = None
    traceback: str = ""


@dataclass(frozen=True)
class Outcome:
    """An executed notebook and its fault, if it had one.

    Args:
        document: an nbformat node, None when the kernel never started.
        not_evaluated: what cells could not say because an unexpected row lacks its value, a sentence each.
    """

    document: object | None
    fault: Fault | None
    not_evaluated: tuple[str, ...] = ()


def execute(
    notebook: Notebook,
    parameters: dict,
    scratch: Path,
    environment: dict[str, str],
    *,
    on_cell: Callable[[int], object],
    on_line: Callable[[str], object],
    interruption: Interruption,
    limits: Limits,
    lacks_rows: Callable[[], bool],
) -> Outcome:
    """Run a notebook from a fresh kernel, in its own folder as JupyterLab does.

    Args:
        parameters: values for the cell tagged `parameters`.
        scratch: node-local folder for the kernel's files.
        environment: variables that the kernel gets besides this process's own.
        on_cell: called before each cell with the number of code cells done.
        on_line: called with each line of output that a reader of the driver's output must see.
        interruption: ends it from another thread.
        limits: end it, in the middle of a cell if need be.
        lacks_rows: whether an unexpected row has lost its value so far. From then on a cell that raises is one that cannot be
            evaluated, and the notebook goes on.

    Raises:
        BudgetSpent: the deadline of `limits` is past.
    """
    import papermill
    from jupyter_core.utils import ensure_event_loop
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    copy = scratch / notebook.path.name
    done = 0
    loop = ensure_event_loop()
    loop.set_exception_handler(_pass_over_abandoned)
    interruption.reaches(loop)
    alarm, not_evaluated = Alarm(limits, loop), []

    def cell_starts(cell, cell_index: int) -> None:
        on_cell(done)
        if cell.cell_type == "code" and cell.source.strip():
            alarm.set(done + 1)

    def cell_executed(cell, cell_index: int, execute_reply) -> None:
        nonlocal done
        alarm.cancel()
        done += 1
        reply = execute_reply["content"]
        if reply["status"] == "error" and lacks_rows():
            error = f"{reply['ename']}: {reply['evalue']}".partition("\n")[0]
            not_evaluated.append(f"cell [{done}] cannot be evaluated without the values that were refused: {error}")
            on_line(f"UNEXPECTED: {not_evaluated[-1]}")
            _pass_as_text(cell)

    try:
        papermill.execute_notebook(
            notebook.path,
            copy,
            parameters=parameters,
            kernel_name=KERNEL,
            progress_bar=False,
            autosave_cell_every=0,
            stdout_file=LineFilter(on_line),
            stderr_file=LineFilter(on_line),
            kernel_manager_class=kernel_manager_class(scratch, environment, notebook.path.parent),
            on_cell_start=cell_starts,
            on_cell_executed=cell_executed,
            on_notebook_error=lambda notebook: alarm.cancel(),
        )
        fault = None
    except PapermillExecutionError as error:
        trace = _COLOURS.sub("", "\n".join(error.traceback))
        summary = f"{error.ename}: {error.evalue}".strip()
        # An error in its own words (hyperion.errors) comes as its traceback, too.
        fault = Fault(summary, error.exec_count, "" if trace.strip() == summary else trace)
    except LimitExceeded as limit:
        fault = Fault(str(limit))
    except (DeadKernelError, CellTimeoutError) as error:
        fault = Fault(f"the kernel died: {error}. Out of memory? `dmesg` and the batch system's log tell.", done + 1)
    except RuntimeError as error:  # nbclient: the kernel did not come up
        fault = Fault(f"the kernel did not start: {error}")
    return Outcome(_read(copy), fault, tuple(not_evaluated))


class LineFilter:
    """Takes a cell's output as it comes and passes on the lines that must not drown in the executed copy.

    These are lines that start with BANNER, WARNING or UNEXPECTED, and blocks fenced by lines of `=`, as the data room
    announces its source.
    """

    def __init__(self, on_line: Callable[[str], object]):
        self._on_line, self._rest, self._fenced = on_line, "", False

    def write(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            fence = len(line) >= 40 and not line.strip("=")
            if fence or self._fenced or line.startswith(("BANNER", "WARNING", "UNEXPECTED")):
                self._on_line(line)
            self._fenced = self._fenced != fence

    def flush(self) -> None:
        """Nothing is held back but an unfinished line."""


def _pass_as_text(cell) -> None:
    """Let papermill go on after a cell that raised: its traceback stays in the executed copy, as what the cell printed."""
    import nbformat

    # nbclient looks for this tag once the cell has ended, papermill for outputs of the kind `error` at the very end.
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), "raises-exception"]
    for number, output in enumerate(cell.outputs):
        if output.output_type == "error":
            text = "\n".join(output.traceback) + "\n"
            cell.outputs[number] = nbformat.v4.new_output("stream", name="stderr", text=_COLOURS.sub("", text))


def _pass_over_abandoned(loop, context: dict) -> None:
    """A stop abandons the task that waits for the cell; that the kernel died under it is then no news."""
    if "never retrieved" not in context.get("message", ""):
        loop.default_exception_handler(context)


def _read(copy: Path) -> object | None:
    import nbformat

    return nbformat.read(copy, as_version=4) if copy.is_file() else None
