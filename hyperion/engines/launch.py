"""Train with a framework in new processes, and return the record of the run."""

import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperion.engines.record import Record
from hyperion.engines.stacks import UNAVAILABLE, Stack
from hyperion.engines.work import Work
from hyperion.errors import HyperionError
from hyperion.processes import Job, report_progress, run_job, run_ranks

RECORD = "record.json"
_GO, _STOP = "go", "stop"  # files in the folder of a turn
_POLL_S = 0.02


def launch(
    stack: Stack,
    work: Work,
    folder: Path,
    ranks: int | None = None,
    timeout_s: float = 600.0,
    on_line: Callable[[str], object] = lambda line: None,
    options: dict[str, Any] | None = None,
    on_step: Callable[[int, float | None], object] = lambda step, loss: None,
    turn: Path | None = None,
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
        turn: folder in which the ranks wait for their turn, after they have imported the framework; see `wait_for_turn`. None if
            they train at once.

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
    values |= {"work": work.as_dict(), "options": settings, "turn": str(turn or "")}
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
        log: the whole error of a framework that failed, with its traceback.
    """

    stack: str
    record: Record | None = None
    reason: str = ""
    log: str = ""

    @property
    def failed(self) -> bool:
        """True if the framework was started and failed. An unavailable framework did not fail."""
        return self.record is None and not self.reason.startswith("unavailable")


def launch_all(stacks: Iterable[Stack], launch_one: Callable[[Stack], Record], at_once: int = 1) -> Iterator[Outcome]:
    """Yield the outcome of each framework. If one of them fails or is killed, the others still run.

    Args:
        stacks: the frameworks.
        launch_one: function that trains with one framework, such as a call of `launch`.
        at_once: number of frameworks that train at the same time. Above 1, their speed must not be measured.
    """

    def outcome(stack: Stack) -> Outcome:
        try:
            return Outcome(stack.name, launch_one(stack))
        except Unavailable as error:
            return Outcome(stack.name, reason=error.reason)
        except HyperionError as error:
            return Outcome(stack.name, reason=f"failed: {failure_of(error)}", log=str(error))

    if at_once == 1:
        yield from map(outcome, stacks)
        return
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(outcome, stacks)


def launch_in_turn(stacks: Sequence[Stack], launch_one: Callable[[Stack, Path, int], Record], folder: Path) -> Iterator[Outcome]:
    """Yield the outcome of each framework, as `launch_all` does. All of them start at once, but they train one after another.

    A process imports its framework and opens its device for about as long as it then trains. All processes do this at the same
    time, and none of them trains before the last one has finished, so these starts disturb no measurement. A process that waits
    occupies some hundred MB of its device.

    Args:
        stacks: the frameworks, each at most once.
        launch_one: function that trains with one framework. Its arguments are the framework, the argument `turn` of `launch`, and
            the number of frameworks that train before this one. The process waits for them, so its timeout must be longer.
        folder: folder for the files with which the processes wait for each other.
    """
    turns = {stack.name: folder / f"turn-{number}" for number, stack in enumerate(stacks)}
    for turn in turns.values():
        shutil.rmtree(turn, ignore_errors=True)
        turn.mkdir(parents=True)
    with ThreadPoolExecutor(max(1, len(stacks))) as pool:
        running = {stack.name: pool.submit(launch_one, stack, turns[stack.name], n) for n, stack in enumerate(stacks)}

        def train(stack: Stack) -> Record:
            (turns[stack.name] / _GO).touch()
            return running[stack.name].result()

        try:
            while not all(_is_ready(turns[name], future) for name, future in running.items()):
                time.sleep(_POLL_S)
            yield from launch_all(stacks, train)
        finally:
            for turn in turns.values():  # after an error, the processes that still wait must end
                (turn / _STOP).touch()


def _is_ready(turn: Path, future: Future[Record]) -> bool:
    """Return True if all ranks of a framework wait for their turn, or if it has ended."""
    ready = [path.name for path in turn.glob("ready-*")]
    return future.done() or (bool(ready) and len(ready) == int(ready[0].rpartition("-")[2]))


def wait_for_turn(folder: str | Path) -> None:
    """Wait on this rank until `launch_in_turn` lets it train. If `folder` is "", return immediately."""
    if not folder:
        return
    turn = Path(folder)
    (turn / f"ready-{os.environ.get('RANK', 0)}-of-{os.environ.get('WORLD_SIZE', 1)}").touch()
    while not (turn / _GO).exists():
        if (turn / _STOP).exists():
            raise HyperionError("the launcher ended before the turn of this framework", where=turn)
        time.sleep(_POLL_S)


def failure_of(error: HyperionError) -> str:
    """Return the first line of an error and the last line of the log that it contains, truncated to 300 characters."""
    lines = [line.strip() for line in error.what.splitlines() if line.strip()]
    return (lines[0] if len(lines) < 2 else f"{lines[0]}: {lines[-1]}")[:300]


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return the exit code of a command: 1 if a framework failed, 3 if none could run, else 0."""
    if any(outcome.failed for outcome in outcomes):
        return 1
    return 0 if any(outcome.record for outcome in outcomes) else UNAVAILABLE


def train_on_rank(adapter: str, name: str, packages: list[str], work: dict, folder: str, options: dict, turn: str = "") -> dict:
    """Perform the work on one rank with a framework's adapter, and return the record. `launch` calls this in new processes."""
    from hyperion.engines.observer import Observer  # imports torch

    what = Work.of(work)

    def report(done: int, loss: float | None) -> None:
        report_progress(done, what.steps, "" if loss is None else str(loss))

    importlib.import_module("transformers.models.llama.modeling_llama")  # every adapter loads this model
    train = importlib.import_module(adapter).train
    wait_for_turn(turn)
    observer = Observer(what, name, packages, Path(folder), report)
    try:
        return train(what, observer, **options)
    except Exception as error:
        if (record := observer.finish_after(error)) is None:
            raise
        return record


def train_alone(**values: Any) -> dict:
    """Call `train_on_rank` in a process group of one rank, without torchrun."""
    use_one_device()
    from hyperion.processes import process_group  # imports torch

    with process_group():
        return train_on_rank(**values)


def use_one_device() -> None:
    """Hide all accelerators but the first from this process. It must not have used one before.

    The HF Trainer would divide the batch over all visible devices.
    """
    import torch

    # HIP reads the first variable that is set. Without it, torch counts the devices that ROCR_VISIBLE_DEVICES leaves.
    rocm = ["HIP_VISIBLE_DEVICES"] if torch.version.hip else []
    known = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in os.environ]
    for name in known or rocm or ["CUDA_VISIBLE_DEVICES"]:
        os.environ[name] = os.environ.get(name, "0").split(",")[0]


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
