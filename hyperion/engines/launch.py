"""Train with a framework in new processes, and return the record of the run."""

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.engines.record import Record
from hyperion.engines.stacks import UNAVAILABLE, Stack
from hyperion.engines.work import Work
from hyperion.errors import HyperionError
from hyperion.processes import Job, report_progress, run_job, run_ranks

RECORD = "record.json"


def launch(
    stack: Stack,
    work: Work,
    folder: Path,
    ranks: int | None = None,
    timeout_s: float = 600.0,
    on_line: Callable[[str], object] = lambda line: None,
    options: dict[str, Any] | None = None,
    on_step: Callable[[int, float | None], object] = lambda step, loss: None,
) -> Record:
    """Perform the work with a framework in new processes, and return its record. The record is also written to `folder`.

    Args:
        stack: the framework.
        work: the training work.
        folder: folder for the final state, the record and the logs of the ranks.
        ranks: number of ranks. Defaults to that of the stack.
        timeout_s: time in seconds after which the ranks are terminated.
        on_line: called with each line that rank 0 prints.
        options: arguments of the adapter that override those of the stack.
        on_step: called with the number of finished steps and the loss of rank 0, as in `Observer`.

    Raises:
        HyperionError: the framework is unavailable (exit code 3), or its packages were not imported, or a rank failed or was
            killed; see `run_ranks`.
    """
    if reason := stack.why_absent():
        raise Unavailable(stack, reason)
    ranks, settings = ranks or stack.ranks, {**stack.options, **(options or {})}
    # The ranks that share the matrices or the layers of a replica read the same rows.
    replica = settings.get("tensor", 1) * settings.get("pipeline", 1)
    work.require_divisible(ranks // replica if ranks >= replica else ranks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    values = {"adapter": stack.adapter, "name": stack.name, "packages": list(stack.packages), "folder": str(folder)}
    values |= {"work": work.as_dict(), "options": settings}
    common = {"timeout_s": timeout_s, "python": stack.python()}

    def on_progress(done: int, total: int, loss: str) -> None:
        on_step(done, float(loss) if loss else None)

    # Frameworks for several ranks need torchrun's environment variables even on a single rank.
    if stack.ranks == 1:
        answer = run_job(Job(train_alone, values, **common), on_line, on_progress)
    else:
        job = Job(train_on_rank, values, ranks=ranks, **common)
        answer = run_ranks(job, on_line, on_progress, log_folder=folder / "logs")[0]
    record = Record.of(answer)
    missing = [name for name in stack.packages if name not in record.versions]
    if missing:
        raise HyperionError(
            f"the run did not import {', '.join(missing)}, so it did not train with {stack.name}",
            where=stack.adapter,
            next_step="correct the adapter",
        )
    (folder / RECORD).write_text(json.dumps(record.as_dict()), "utf-8")
    return record


@dataclass(frozen=True)
class Outcome:
    """Result of launching a framework.

    Args:
        stack: name of the framework.
        record: record of the run, or None.
        reason: why there is no record, as shown in a row. It starts with "unavailable" or "failed".
    """

    stack: str
    record: Record | None = None
    reason: str = ""

    @property
    def failed(self) -> bool:
        """True if the framework was started and failed. An unavailable framework did not fail."""
        return self.record is None and not self.reason.startswith("unavailable")


def launch_all(stacks: Iterable[Stack], launch_one: Callable[[Stack], Record]) -> Iterator[Outcome]:
    """Yield the outcome of each framework. If one of them fails or is killed, the others still run.

    Args:
        stacks: the frameworks.
        launch_one: function that trains with one framework, such as a call of `launch`.
    """
    for stack in stacks:
        try:
            yield Outcome(stack.name, launch_one(stack))
        except Unavailable as error:
            yield Outcome(stack.name, reason=error.reason)
        except HyperionError as error:
            yield Outcome(stack.name, reason=f"failed: {failure_of(error)}")


def failure_of(error: HyperionError) -> str:
    """Return the first line of an error and the last line of the log that it contains, truncated to 300 characters."""
    lines = [line.strip() for line in error.what.splitlines() if line.strip()]
    return (lines[0] if len(lines) < 2 else f"{lines[0]}: {lines[-1]}")[:300]


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of a command: 1 if a framework failed, 3 if none could run, else 0."""
    if any(outcome.failed for outcome in outcomes):
        return 1
    return 0 if any(outcome.record for outcome in outcomes) else UNAVAILABLE


def train_on_rank(adapter: str, name: str, packages: list[str], work: dict, folder: str, options: dict) -> dict:
    """Perform the work on one rank with a framework's adapter, and return the record. `launch` calls this in new processes."""
    from hyperion.engines.observer import Observer  # imports torch

    what = Work.of(work)

    def report(done: int, loss: float | None) -> None:
        report_progress(done, what.steps, "" if loss is None else str(loss))

    return importlib.import_module(adapter).train(what, Observer(what, name, packages, Path(folder), report), **options)


def train_alone(**values: Any) -> dict:
    """Call `train_on_rank` in a process group of one rank, without torchrun."""
    # This must happen before torch is imported, because the HF Trainer would divide the batch over all visible devices.
    known = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in os.environ]
    for name in known or ["CUDA_VISIBLE_DEVICES"]:
        os.environ[name] = os.environ.get(name, "0").split(",")[0]
    from hyperion.processes import process_group  # imports torch

    with process_group():
        return train_on_rank(**values)


class Unavailable(HyperionError):
    """Raised if a framework is not installed. A command then exits with code 3 and writes no result.

    Attributes:
        reason: why it is unavailable, with the next step, as shown in a row.
    """

    exit_code = UNAVAILABLE

    def __init__(self, stack: Stack, reason: str):
        what, _, next_step = reason.removeprefix("unavailable: ").partition("; next step: ")
        super().__init__(f"{stack.name} is unavailable: {what}", where=f"framework {stack.name!r}", next_step=next_step or None)
        self.reason = reason
