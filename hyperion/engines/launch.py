"""Train with a framework in processes of its own, and return the record of what it did."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperion.engines.record import Record
from hyperion.engines.stacks import Stack, stack_named
from hyperion.engines.work import Work
from hyperion.errors import HyperionError
from hyperion.processes import Job, run_job, run_ranks

RECORD = "record.json"


def launch(
    stack: Stack,
    work: Work,
    folder: Path,
    ranks: int | None = None,
    timeout_s: float = 600.0,
    on_line: Callable[[str], object] = lambda line: None,
    options: dict[str, Any] | None = None,
) -> Record:
    """Train the work with a framework in new processes, and return its record. The record is also written to `folder`.

    Args:
        stack: the framework.
        work: the work.
        folder: folder for the final state, the record and the logs of the ranks.
        ranks: number of ranks, by default those of the stack.
        timeout_s: seconds after which the ranks are ended.
        on_line: called with each line that rank 0 prints.
        options: arguments of the adapter that replace those of the stack.

    Raises:
        HyperionError: the framework is unavailable; the exit code is 3. Or a rank failed or was killed; see `run_ranks`.
    """
    if reason := stack.why_absent():
        raise Unavailable(reason.removeprefix("unavailable: ").partition("; next step: ")[0], stack, reason)
    ranks = ranks or stack.ranks
    work.require_divisible(ranks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    values = {"stack": stack.name, "work": work.as_dict(), "folder": str(folder), "options": {**stack.options, **(options or {})}}
    common = {"timeout_s": timeout_s, "python": stack.python()}
    if ranks == 1:
        answer = run_job(Job(train_alone, values, **common), on_line=on_line)
    else:
        answer = run_ranks(Job(train_on_rank, values, ranks=ranks, **common), on_line=on_line, log_folder=folder / "logs")[0]
    record = Record.of(answer)
    missing = [name for name in stack.packages if name not in record.versions]
    if missing:
        raise HyperionError(
            f"the run did not import {', '.join(missing)}, so it did not train with {stack.name}",
            where=f"hyperion/engines/{stack.adapter}.py",
            next_step="correct the adapter",
        )
    (folder / RECORD).write_text(json.dumps(record.as_dict()), "utf-8")
    return record


def train_on_rank(stack: str, work: dict, folder: str, options: dict) -> dict:
    """Train on one rank with the adapter of a framework, and return the record. `launch` calls this function in new processes."""
    from hyperion.engines.observer import Observer  # imports torch

    chosen, what = stack_named(stack), Work.of(work)
    observer = Observer(what, stack, chosen.packages, Path(folder))
    return importlib.import_module(f"hyperion.engines.{chosen.adapter}").train(what, observer, **options)


def train_alone(**values: Any) -> dict:
    """Call `train_on_rank` in a process group of one rank, which DeepSpeed and Megatron need. No torchrun is started."""
    from hyperion.processes import process_group  # imports torch

    with process_group():
        return train_on_rank(**values)


class Unavailable(HyperionError):
    """Raised if a framework is not installed. A command ends with exit code 3 and writes no result.

    Attributes:
        reason: the reason with the next step, as a row states it.
    """

    exit_code = 3

    def __init__(self, what: str, stack: Stack, reason: str):
        next_step = reason.partition("; next step: ")[2] or None
        super().__init__(f"{stack.name} is unavailable: {what}", where=f"framework {stack.name!r}", next_step=next_step)
        self.reason = reason
