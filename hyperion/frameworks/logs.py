"""Make a result from the log of Megatron-LM, Megatron-DeepSpeed or Primus, which log a line for each optimizer step.

Only lines in a known format are used: those that the frameworks print themselves, Primus up to 26.5. A log is refused if the
result would contain guessed values: if its format is unknown, a step is missing, or a line averages over several steps.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hyperion.frameworks.parallelism import Parallelism
from hyperion.frameworks.result import (
    SCHEMA_VERSION,
    GpuInfo,
    MemoryMetrics,
    Result,
    ResultError,
    TrainingConfig,
    derive,
    label_fault,
)
from hyperion.frameworks.shapes import MODELS
from hyperion.units import GB, GIB, MIB
from hyperion.untrusted import read_bounded

PRIMUS, MEGATRON_DEEPSPEED, MEGATRON = "Primus", "Megatron-DeepSpeed", "Megatron-LM"
# Log format of each framework. A log in another format was not written by this framework.
LOG_OF = {"prim": PRIMUS, "mgds": MEGATRON_DEEPSPEED, "mega": MEGATRON}
LARGEST_LOG_BYTES = 1024 * MIB
_ITERATION = re.compile(r"\biteration\s+(\d{1,12})\s*/\s*(\d{1,12})\s*\|(.*)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
_FIELDS = {
    "time_ms": re.compile(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}(?:/{_NUMBER})?\s*\|"),
    "loss": re.compile(rf"\blm loss:\s*{_NUMBER}\s*\|"),
    "rate": re.compile(rf"\blearning rate:\s*{_NUMBER}\s*\|"),
    "batch": re.compile(r"\bglobal batch size:\s*([0-9]{1,9})\s*\|"),
}
# Read by HIP, or by rocm-smi.
_MEMORY = re.compile(rf"\b(?:hip|rocm) mem usage/free/total/usage_ratio:\s*{_NUMBER}Gi?B/")
# What Primus adds to the lines of Megatron-LM. The first lines, before it averages, may have nothing of it.
# "tokens per GPU" is the name up to Primus 26.4.
_OF_PRIMUS = re.compile(
    r"\[rank-\d+/\d+\]|elapsed time per iteration \(ms\): *[\d.]+/|(?:hip|rocm) mem usage/"
    r"|tokens per GPU \(tokens/s/GPU\):|tokens/s/GPU inst/harmonic mean:"
)


@dataclass(frozen=True)
class LoggedRun:
    """Values that a log contains. Each series has one value for each optimizer step.

    Args:
        form: PRIMUS, MEGATRON_DEEPSPEED or MEGATRON.
        global_batch_size: rows of a step.
        times_s, losses, rates: time, loss and learning rate of each step.
        peak_memory_gb: largest device memory in use, or None if the log does not contain it.
    """

    form: str
    global_batch_size: int
    times_s: tuple[float, ...]
    losses: tuple[float, ...]
    rates: tuple[float, ...]
    peak_memory_gb: float | None


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that its log does not contain. The data-parallel size is `num_gpus` / (`tensor` · `pipeline`)."""

    framework: str
    platform: str
    model: str
    dataset: str
    precision: str
    num_gpus: int
    sequence_length: int
    micro_batch_size: int
    tensor: int = 1
    pipeline: int = 1
    strategy: str = "unknown"
    skipped_steps: int = 1


def parse_log(text: str, where: object) -> LoggedRun:
    """Return the series of a log.

    Raises:
        ResultError: no line has the known form, a field is missing, or the steps are not 1, 2, 3, … up to the last.
    """
    steps: dict[int, tuple[float, float, float, int]] = {}
    memory_gb, lines, total = [], [], 0
    for number, line in enumerate(_COLOURS.sub("", text).splitlines(), 1):
        if not (found := _ITERATION.search(line)):
            continue
        step, total, fields = int(found[1]), int(found[2]), found[3]
        values = {name: pattern.search(fields) for name, pattern in _FIELDS.items()}
        if missing := [name for name, match in values.items() if match is None]:
            raise _log_error(f"line {number} (iteration {step}) lacks {', '.join(missing)}; was the step skipped?", where)
        time_ms, loss, rate, batch = (match[1] for match in values.values() if match)
        entry = float(time_ms) / 1e3, float(loss), float(rate), int(batch)
        # Primus may write the same line to two sinks.
        if steps.setdefault(step, entry) != entry:
            raise _log_error(f"line {number} states iteration {step} again with other values", where, "give the log of one run")
        lines.append(line)
        if used := _MEMORY.search(fields):
            # Primus divides by 2^30 and prints GB, or GiB in some versions.
            memory_gb.append(float(used[1]) * (GIB / GB))
    if not steps:
        raise _log_error("no line has the form `iteration N/ M | … elapsed time per iteration (ms): … | lm loss: … |`", where)
    if sorted(steps) != list(range(1, len(steps) + 1)):
        wrong = next(step for step, wanted in zip(sorted(steps), range(1, len(steps) + 1), strict=True) if step != wanted)
        raise _log_error(f"the steps are not consecutive from 1: found {wrong}", where, "train again with --log-interval 1")
    if len(steps) != total:
        raise _log_error(f"the log ends at iteration {len(steps)} of {total}", where, "give the log of a finished run")
    times, losses, rates, batches = zip(*(steps[step] for step in sorted(steps)), strict=True)
    if min(times) <= 0 or len(set(batches)) != 1:
        raise _log_error("a step took no time, or the global batch size changes", where, "use a constant global batch size")
    form = PRIMUS if any(_OF_PRIMUS.search(line) for line in lines) else MEGATRON
    form = MEGATRON_DEEPSPEED if all("consumed tokens:" in line for line in lines) else form
    return LoggedRun(form, batches[0], times, losses, rates, max(memory_gb, default=None))


def logged_step(line: str) -> tuple[int, float | None] | None:
    """Return (number of the step, its loss or None) if a line of a log is that of a step, else None."""
    if not (found := _ITERATION.search(_COLOURS.sub("", line))):
        return None
    loss = _FIELDS["loss"].search(found[3])
    return int(found[1]), float(loss[1]) if loss else None


def result_of_log(path: Path, facts: RunFacts) -> Result:
    """Return the result of a log file.

    Raises:
        ResultError: the log has no known form, is of another framework, or contradicts the facts.
    """
    next_step = "give the log that the framework printed"
    try:
        text = read_bounded(path, ResultError, next_step, LARGEST_LOG_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ResultError(f"the log cannot be read: {error.strerror}", where=path, next_step=next_step) from error
    run = parse_log(text, path)
    if fault := label_fault(facts.model, facts.dataset, facts.precision):
        raise _log_error(fault, path, "correct the options that describe the run")
    if LOG_OF.get(facts.framework) != run.form:
        raise _log_error(
            f"this is a log of {run.form}, not of {LOG_OF.get(facts.framework, facts.framework)}",
            path,
            f"name its framework: {', '.join(f'{code} for {form}' for code, form in LOG_OF.items())}",
        )
    divisor = facts.tensor * facts.pipeline
    dp = max(1, facts.num_gpus // divisor)
    ga = max(1, run.global_batch_size // (facts.micro_batch_size * dp))
    parallelism = Parallelism(facts.strategy, facts.tensor, facts.pipeline, dp, ga)
    batch = (facts.num_gpus, run.global_batch_size, facts.micro_batch_size)
    if faults := parallelism.faults(*batch, MODELS[facts.model].shape):
        raise _log_error("; ".join(faults), path, "correct the options that describe the run")
    if facts.skipped_steps >= len(run.times_s):
        what = f"no step would be timed: {facts.skipped_steps} of {len(run.times_s)} steps are skipped"
        raise _log_error(what, path, "set benchmark.skip_first_steps in config.yaml to a smaller number")
    training = TrainingConfig(
        max_steps=len(run.times_s),
        global_batch_size=run.global_batch_size,
        micro_batch_size=facts.micro_batch_size,
        sequence_length=facts.sequence_length,
        num_gpus=facts.num_gpus,
        parallel_strategy=facts.strategy,
        gradient_accumulation_steps=ga,
    )
    method = "device memory in use, from the log" if run.peak_memory_gb else "not measured: the log states no memory"
    return Result(
        schema_version=SCHEMA_VERSION,
        platform=facts.platform,  # type: ignore[arg-type]  # checked when the result is written
        framework=facts.framework,  # type: ignore[arg-type]
        model=facts.model,
        dataset=facts.dataset,
        precision=facts.precision,
        timestamp=datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds"),
        source="log",
        gpu_info=GpuInfo(facts.num_gpus),
        model_info=None,
        parallelism_config=parallelism,
        training_config=training,
        performance_metrics=derive(run.times_s, facts.skipped_steps, training, None),
        step_times=run.times_s,
        loss_values=run.losses,
        learning_rates=run.rates,
        memory_metrics=MemoryMetrics(method, peak_memory_in_use_gb=run.peak_memory_gb),
        source_log_file=path.name,
    )


def _log_error(what: str, where: object, next_step: str = f"give a log of {', '.join(LOG_OF.values())}") -> ResultError:
    return ResultError(what, where=where, next_step=next_step)
