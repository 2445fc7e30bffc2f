"""Run plans one after the other. Each plan runs in separate processes and has a log file, and a result file if it finishes."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hyperion.engines import STACKS, Record, Work, other_settings
from hyperion.engines.launch import UNAVAILABLE, failure_of, launch
from hyperion.environ import variables_set
from hyperion.errors import HyperionError
from hyperion.frameworks.logs import RunFacts, logged_step, result_of_log
from hyperion.frameworks.plan import MODEL_PARALLEL, Plan
from hyperion.frameworks.progress import Progress, StepReporter, append_event
from hyperion.frameworks.result import (
    SCHEMA_VERSION,
    GpuInfo,
    MemoryMetrics,
    ModelInfo,
    Result,
    ResultError,
    TrainingConfig,
    derive,
    read_result,
    write_result,
)
from hyperion.frameworks.shapes import build, count_parameters, count_vector_elements, is_tiny
from hyperion.hardware import MachineFacts, detect
from hyperion.locks import FileLock
from hyperion.results.files import make_folder
from hyperion.units import GB, GIB

_POLL_S = 0.2  # interval at which the log of a framework that runs by its own command is read
_LONGEST_LINE_BYTES = 1 << 16
PREVIOUS = ".previous"  # appended to the name of a result that a run with other settings replaces
_WORK, _LOCK, _NEW_S = ".work-", "lock", 60.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a plan. `state` is "trained", "finished before", or a reason that starts with "failed" or "unavailable"."""

    plan: Plan
    state: str
    result: Result | None = None

    @property
    def failed(self) -> bool:
        """True if the combination was started and failed."""
        return self.state.startswith("failed")


def run_plans(
    plans: Iterable[Plan],
    folder: Path,
    facts: MachineFacts,
    again: bool = False,
    on_start: Callable[[Plan], object] = lambda plan: None,
    on_progress: Callable[[Plan, Progress], object] = lambda plan, progress: None,
) -> Iterator[Outcome]:
    """Yield the outcome of each plan. The others continue if one fails or is killed. Events are appended to events.jsonl.

    Args:
        plans: the plans.
        folder: folder of the result files.
        facts: facts about this machine.
        again: if True, a finished run is repeated.
        on_start: called before a plan starts.
        on_progress: called while an observed run trains.

    Raises:
        StoreError: a plan can run, and the folder cannot be created or is not writable.
    """
    selected = list(plans)
    writes = any(not plan.reason for plan in selected)  # if no plan can run, no file is written
    if writes:
        make_folder(folder)  # fails now if results cannot be stored
    with _Works(folder) as works:
        for plan in selected:
            if plan.reason:
                outcome = Outcome(plan, plan.reason)
            elif not again and (finished := _finished(plan, folder)):
                outcome = Outcome(plan, "finished before", finished)
            else:
                on_start(plan)
                append_event(folder, plan, "started")
                try:
                    outcome = _train(plan, works, facts, StepReporter(plan, folder, on_progress))
                except KeyboardInterrupt as stop:
                    append_event(folder, plan, "failed", reason=f"interrupted by {stop or 'SIGINT'}")
                    raise
            if writes:
                event, _, reason = outcome.state.partition(": ")
                append_event(folder, plan, event, reason=reason)
            yield outcome


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """Return the exit code of a command: 1 if a combination failed, 3 if none has a result, else 0."""
    known = list(outcomes)
    if any(outcome.failed for outcome in known):
        return 1
    return 0 if any(outcome.result for outcome in known) else UNAVAILABLE


def log_file(plan: Plan, folder: Path) -> Path:
    """Return the file with the output of a run."""
    return folder / "logs" / f"{Path(plan.file_name).stem}.log"


def _train(plan: Plan, works: "_Works", facts: MachineFacts, on_step: StepReporter) -> Outcome:
    folder = works.folder
    try:
        # The result of an earlier run with other settings must not look like the result of this run if this run fails.
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder / plan.file_name, folder / f"{plan.file_name}{PREVIOUS}")
        result = _run_command(plan, folder, on_step) if plan.command else _run_stack(plan, works, facts, on_step)
        result = replace(result, plan_sha256=plan.digest)
        write_result(result, folder)
        return Outcome(plan, "trained", result)
    except HyperionError as error:
        return Outcome(plan, f"failed: {failure_of(error)}")
    except Exception as error:  # such as a full disk
        return Outcome(plan, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _finished(plan: Plan, folder: Path) -> Result | None:
    """Return the result of an earlier run of this plan, or None if there is none. Results of other settings do not count."""
    with contextlib.suppress(ResultError):
        result = read_result(folder / plan.file_name)
        return result if result.plan_sha256 == plan.digest else None
    return None


class _Works:
    """Temporary folder with the initial state and the token file of the latest plan. Plans with equal work share both.

    A runner that is killed leaves its folder, which has the size of a model. The next runner removes it.

    Args:
        folder: folder of the result files, whose disk has room for the initial state.
    """

    def __init__(self, folder: Path):
        self.folder, self._key = folder, ""
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._lock: FileLock | None = None  # held while the folder is in use

    def __enter__(self) -> "_Works":
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def work_of(self, plan: Plan) -> Work:
        """Return the work of a plan, and write its files unless those of the previous plan can be used."""
        key = json.dumps([plan.model, plan.dataset, plan.work])
        if key != self._key or self._temporary is None:
            self.__exit__()
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self.folder)
            self._temporary = tempfile.TemporaryDirectory(dir=self.folder, prefix=_WORK)
            self._lock = FileLock(Path(self._temporary.name) / _LOCK)
            self._lock.acquire()
            _write_work(plan, Path(self._temporary.name))
            self._key = key
        return _work_of(plan, Path(self._temporary.name))


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of runners that have ended. A runner creates its lock right after its folder."""
    for path in folder.glob(f"{_WORK}*"):
        lock = FileLock(path / _LOCK)
        with contextlib.suppress(OSError):
            new = not lock.path.exists() and time.time() - path.stat().st_mtime < _NEW_S
            if not new and lock.acquire(wait=False):
                lock.release()
                shutil.rmtree(path)


def _run_stack(plan: Plan, works: _Works, facts: MachineFacts, on_step: StepReporter) -> Result:
    """Train with a framework whose run is observed."""
    work, stack = works.work_of(plan), STACKS[plan.stack]
    if plan.devices > 1:
        stack = replace(stack, ranks=plan.devices)  # the Trainer and megatron-core run on any number of ranks
    if plan.stack == MODEL_PARALLEL:
        division = plan.parallelism
        sizes = {"tensor": division.tensor_model_parallel_size, "pipeline": division.pipeline_model_parallel_size}
        stack = replace(stack, options=stack.options | sizes)
    with tempfile.TemporaryDirectory(dir=work.folder) as run, _logged(plan, works.folder) as log, variables_set(plan.environment):
        where = (Path(run), plan.devices, plan.timeout_s)
        record = launch(stack, work, *where, on_line=lambda line: _log(log, line), on_step=on_step)
    return result_of_record(plan, record, facts)


def result_of_record(plan: Plan, record: Record, facts: MachineFacts) -> Result:
    """Return the result of an observed run. Its values about the training are those that the observer read.

    Raises:
        HyperionError: the number of steps or ranks is wrong, the run read other rows, or its optimizer, clipping or dtypes are
            not those of the plan.
    """
    rates = sorted({rate for group in record.groups for rate in group.learning_rates})
    steps = plan.work["steps"]
    if len(record.losses) != steps or record.optimizer_steps != steps or len(rates) != 1 or record.ranks != plan.devices:
        seen = f"{record.optimizer_steps} optimizer steps, {len(record.losses)} losses, {record.ranks} ranks, rates {rates}"
        expected = f"{steps} steps on {plan.devices} ranks with one learning rate"
        raise HyperionError(f"the run has {seen} instead of {expected}", where=plan.stack, next_step="correct the adapter")
    batch, length = plan.work["global_batch_size"], plan.work["sequence_length"]
    rows = [list(range(step * batch, (step + 1) * batch)) for step in range(steps)]
    if record.rows != rows or record.counted_tokens != steps * batch * length:
        other = [step for step, read in enumerate(rows, 1) if record.rows[step - 1 : step] != [read]]
        seen = f"counted {record.counted_tokens} tokens instead of {steps * batch * length}"
        seen += f", and read other rows in step {other[0]}" if other else ""
        raise HyperionError(f"the run {seen}", where=plan.stack, next_step="correct the adapter")
    work = _work_of(plan, Path())
    elements = count_parameters(plan.model)[0]
    undecayed = count_vector_elements(plan.model) if work.weight_decay else elements
    if other := other_settings(work, record, elements, undecayed):
        what = f"the work is not that of the plan: {'; '.join(map(str, other))}"
        raise HyperionError(what, where=plan.stack, next_step="correct the adapter")
    device = detect(facts)
    training = TrainingConfig(
        max_steps=steps,
        **{name: plan.work[name] for name in ("global_batch_size", "micro_batch_size", "sequence_length")},
        num_gpus=plan.devices,
        parallel_strategy=plan.stack,
        gradient_accumulation_steps=plan.parallelism.gradient_accumulation_steps,
        initial_state_sha256=record.initial_sha256,
        row_order_sha256=hashlib.sha256(json.dumps(record.rows).encode()).hexdigest(),
        optimizer="AdamW",
        betas=work.betas,
        eps=work.eps,
        weight_decay=work.weight_decay,
        clip_norm=work.clip_norm,
        master_dtype=record.groups[0].dtype,
        # Other reductions, such as those of flags, are small: `other_settings` refuses gradients in another format.
        reduction_dtype=max(record.reduced, key=lambda name: record.reduced[name], default=None),
    )
    method = "peak resident memory of a rank's process" if plan.platform == "cpu" else "torch.cuda.max_memory_allocated of a rank"
    method = method if record.peak_memory_gib else f"not measured: {record.unreadable.get('peak_memory_gib', 'no reading')}"
    stack = {"amd": "rocm", "nvd": "cuda", "cpu": "cpu"}[plan.platform]
    return Result(
        schema_version=SCHEMA_VERSION,
        platform=plan.platform,  # type: ignore[arg-type]  # checked when the result is written
        framework=plan.framework,  # type: ignore[arg-type]
        model=plan.model,
        dataset=plan.dataset,
        precision=plan.precision,
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
        source="observed",
        gpu_info=GpuInfo(
            plan.devices,
            device.name,
            device.memory_bytes / 1e9,
            device.compute_units,
            facts.torch,
            stack,  # type: ignore[arg-type]
            {"rocm": facts.hip, "cuda": facts.cuda, "cpu": None}[stack],
        ),
        model_info=ModelInfo(*count_parameters(plan.model)),
        parallelism_config=plan.parallelism,
        training_config=training,
        performance_metrics=derive(tuple(record.step_times_s), plan.skipped_steps, training, device.compute_units),
        step_times=tuple(record.step_times_s),
        loss_values=tuple(record.losses),
        learning_rates=tuple(rates * steps),
        memory_metrics=MemoryMetrics(
            method[:100], peak_memory_allocated_gb=record.peak_memory_gib * (GIB / GB) if record.peak_memory_gib else None
        ),
        versions=record.versions,
        environment=plan.environment,
    )


def _write_work(plan: Plan, folder: Path) -> None:
    """Write the initial state and the token file. They depend only on the plan, so all frameworks get equal files."""
    import numpy as np
    import torch
    from transformers.utils.logging import disable_progress_bar

    from hyperion.data import load_tokenizer, load_wikitext2
    from hyperion.engines.work import distinct_rows, write_work_folder

    work, source = _work_of(plan, folder), "synthetic" if plan.dataset == "synthetic" else "auto"
    corpus = load_wikitext2(source, allow_synthetic=plan.dataset == "synthetic")
    rows, length = work.steps * work.batch_size, work.sequence_length
    if is_tiny(plan.model):
        stream = np.frombuffer("".join(corpus.splits["train"]).encode(), np.uint8)
    else:
        stream = load_tokenizer("auto", corpus).encode_split(list(corpus.splits["train"]))
    # A long run reads the text several times. Each pass starts one token later, so that the observer can distinguish its rows.
    epochs = min(length + 1, 1 + 2 * rows * (length + 1) // len(stream))
    stream = np.concatenate([stream[epoch:] for epoch in range(epochs)])
    disable_progress_bar()  # not useful, because a single file is written
    torch.manual_seed(plan.work["seed"])
    model = build(plan.model)  # on the CPU, so that all machines have the same state
    write_work_folder(folder, model, distinct_rows(stream, rows, length))


def _work_of(plan: Plan, folder: Path) -> Work:
    """Return the work of a plan whose files are in this folder."""
    options = plan.work
    return Work(
        str(folder),
        options["steps"],
        options["global_batch_size"],
        options["sequence_length"],
        dtype=plan.precision,
        learning_rate=options["learning_rate"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        clip_norm=options["clip_norm"],
        micro_batches=plan.parallelism.gradient_accumulation_steps,
        timed=True,
        fused=True,
    )


def _run_command(plan: Plan, folder: Path, on_step: StepReporter) -> Result:
    """Run a framework by its own entry point, and make the result from its log."""
    for name, content in plan.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content, "utf-8")
    with _logged(plan, folder) as log:
        environment = os.environ | plan.environment
        # A session of its own, so that the ranks that the framework starts can be ended with it.
        process = subprocess.Popen(
            plan.command, cwd=plan.folder or None, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = _wait(process, Path(log.name), plan, on_step)
        except subprocess.TimeoutExpired:
            raise HyperionError(f"no end after {plan.timeout_s:g} s", where=log.name, next_step="raise timeout_s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise HyperionError(f"{plan.command[0]} ended with exit code {code}", where=log.name, next_step="read the log")
    sizes, parallelism = plan.work, plan.parallelism
    facts = RunFacts(
        plan.framework,
        plan.platform,
        plan.model,
        plan.dataset,
        plan.precision,
        plan.devices,
        sizes["sequence_length"],
        sizes["micro_batch_size"],
        parallelism.tensor_model_parallel_size,
        parallelism.pipeline_model_parallel_size,
        parallelism.strategy_name,
        plan.skipped_steps,
    )
    result = replace(result_of_log(log_file(plan, folder), facts), environment=plan.environment)
    stated = result.training_config.max_steps, result.training_config.global_batch_size
    if stated != (sizes["steps"], sizes["global_batch_size"]):
        what = f"the log states {stated[0]} steps of {stated[1]} rows, not {sizes['steps']} of {sizes['global_batch_size']}"
        raise HyperionError(what, where=log.name, next_step="check which options the framework accepted")
    return result


def _wait(process: subprocess.Popen, file: Path, plan: Plan, on_step: StepReporter) -> int:
    """Wait for the end of a process, and return its exit code. Report the steps that it writes to its log meanwhile.

    Raises:
        subprocess.TimeoutExpired: the process did not end within the time limit of the plan.
    """
    end_s, last, rest = time.monotonic() + plan.timeout_s, 0, b""
    with file.open("rb") as log:
        while True:
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(_POLL_S, max(0.0, end_s - time.monotonic())))
            *lines, rest = (rest + log.read()).split(b"\n")
            rest = rest[-_LONGEST_LINE_BYTES:]
            for line in lines:
                step, loss = logged_step(line.decode("utf-8", "replace")) or (0, None)
                # Primus may write a line twice.
                if last < step <= plan.work["steps"]:
                    last = step
                    on_step(step, loss)
            if code is not None:
                return code
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(plan.command, plan.timeout_s)


@contextlib.contextmanager
def _logged(plan: Plan, folder: Path) -> Iterator:
    file = log_file(plan, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as log:
        yield log


def _log(log, line: str) -> None:
    log.write(f"{line.rstrip()}\n".encode("utf-8", "replace"))
    log.flush()
