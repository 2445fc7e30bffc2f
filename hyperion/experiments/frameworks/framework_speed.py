"""How fast is each framework on equal work? Launches alternate, and the work of each launch is checked before its time counts.

A step time is measured from the end of one step to the end of the next, with a synchronized device, so it includes data loading,
callbacks and logging. The first half of the steps of a launch is warm-up. The value of a launch is the median of its other step
times. The confidence interval is computed over launches.

After its timed steps, the first launch of each framework traces a few steps. The time of a traced step is split by part, such as
matrix products or the optimizer, and each part is compared with that of the plain loop.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.engines import Record, Stack, Work, stack_named, unequal
from hyperion.engines.launch import Outcome, launch, launch_in_turn
from hyperion.engines.work import WEIGHTS
from hyperion.errors import HyperionError, not_none
from hyperion.experiments.frameworks.framework_parity import PLAIN, step_frame
from hyperion.experiments.frameworks.works import DATA, TWIN_FACTOR, WorkOptions, loss_difference, loss_tolerance, prepare_work
from hyperion.figures.material import signed_number
from hyperion.hardware import Device, gemm_path, peak
from hyperion.measure.steps.step_parts import IDLE, PARTS, Kernel, StepParts
from hyperion.models.llama import LlamaShape, llama_flops_per_token, random_llama_shape
from hyperion.results import Estimate, Row
from hyperion.results.statistics import launches_estimate, median_estimate, ratio_estimate
from hyperion.workloads.training_rows import flops_floor

RATIO, FASTER = "speed relative to the plain loop", "frameworks that are significantly faster"
# Twins of the plain loop: runs that differ from it only in rounding.
TWIN, OTHER_TWIN = "plain loop, two micro-batches", "plain loop, AdamW without fusion"
# Metrics of the traced steps.
TRACED = ("traced_step_time_s", "tracing_slowdown", "part_time_s", "part_difference_s", "kernel_time_s")
_TOP_KERNELS, _NAME_LENGTH = 12, 120
_REST = "all other kernels"
_MOST = 0.8  # share of a difference that its named parts explain
_CLOCK_TOLERANCE = 0.02
_NO_LEAST = "no limit: the least memory that a step needs is not derived"


class FrameworkSpeedOptions(WorkOptions):
    """Options for the `framework_speed` experiment.

    Args:
        stacks: names of the frameworks. The plain loop must be one of them.
        launches: number of launches of each framework.
        traced_steps: number of steps that the first launch of each framework traces.
        ranks: maximum number of ranks. All frameworks must train on the same number of devices.
    """

    stacks: tuple[str, ...]
    launches: int
    traced_steps: int = 2
    ranks: int = 1


def forecast(context: Context) -> list[Forecast]:
    """Predict that each framework on one rank is as fast as the plain loop, because it launches the same kernels."""
    options = FrameworkSpeedOptions.of(context)
    basis = "the same kernels as the plain loop; the code around them is assumed to take no time"
    forecasts = []
    for name in options.stacks:
        stack = stack_named(name)
        if name != PLAIN and not stack.why_absent() and options.ranks_of(context, stack) == 1:
            params = _params(context, options, stack) | {"what": RATIO}
            forecasts.append(Forecast(name, "rate_ratio", 1.0, basis, options.dtype, params, low=0.8, high=1.1))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Launch the frameworks in turn. Return time, rate, memory and energy of those whose work is equal in every launch."""
    options = FrameworkSpeedOptions.of(context)
    _require_equal_ranks(context, options)
    prepared, source = prepare_work(context, options)
    work = replace(prepared, timed=True, fused=True)  # the fastest AdamW of torch, also for the frameworks
    passed, outcomes = _excluded(context, options)
    works = dict.fromkeys(passed, work) | {TWIN: replace(work, micro_batches=2), OTHER_TWIN: replace(work, fused=False)}
    twins = [replace(stack_named(PLAIN), name=name) for name in (TWIN, OTHER_TWIN)]
    records: dict[str, list[Record]] = {name: [] for name in works}
    total = options.launches * len(passed) + len(twins)
    report(0, total, "start of the frameworks")
    for number in range(options.launches):
        # Each round starts with another framework, so that a drift of the machine does not favour any of them.
        order = passed[number % len(passed) :] + passed[: number % len(passed)]
        remaining = [stack_named(name) for name in order if name not in outcomes]

        def launch_one(stack: Stack, turn: Path, before: int, number: int = number) -> Record:
            traced = options.traced_steps if number == 0 and stack.name in passed else 0
            return _launch(context, options, replace(works[stack.name], traced=traced), stack, f"{number}", turn, before)

        launched = [*twins, *remaining] if number == 0 else remaining
        for outcome in launch_in_turn(launched, launch_one, context.workspace / "turns"):
            report(sum(map(len, records.values())) + 1, total, f"launch {number + 1}: {outcome.stack}")
            if outcome.record is None:
                outcomes[outcome.stack] = outcome
                print(f"{outcome.stack} failed: {outcome.log}")
            else:
                records[outcome.stack].append(outcome.record)
    (Path(work.folder) / WEIGHTS).unlink()  # several GB, which nothing reads any more
    twin_records = [record for twin in twins for record in records.pop(twin.name)]
    if not (plain := records.get(PLAIN)) or len(twin_records) < len(twins):
        failed = next((outcomes[name].reason for name in (PLAIN, TWIN, OTHER_TWIN) if name in outcomes), "")
        reason = failed or "failed: the plain loop was not launched"
        return Result([context.absent_row(PLAIN, "step_time_s", reason, dtype=options.dtype)], pd.DataFrame(), source)
    tolerance = loss_tolerance(twin_records, plain[0])
    shape = random_llama_shape(options.model, work.config()["vocab_size"])
    rows: list[Row] = []
    equal: dict[str, list[Record]] = {}  # the launches of the frameworks whose work is equal
    traces: dict[str, StepParts] = {}
    for name in options.stacks:
        runs = records.get(name, [])
        reason = outcomes[name].reason if name in outcomes else _refusal(work, runs, plain[0], tolerance)
        if reason:
            params = _params(context, options, stack_named(name))
            rows.append(context.absent_row(name, "step_time_s", reason[:2000], dtype=options.dtype, params=params))
            continue
        equal[name] = runs
        difference = max(loss_difference(record, plain[0]) for record in runs)
        check = checked(f"losses of the plain loop, {TWIN_FACTOR:g} x its two twins", difference, tolerance)
        rows += _speed_rows(context, options, shape, stack_named(name), runs, check, source)
        rows += _trace_rows(context, options, stack_named(name), runs[0], source)
        if runs[0].trace is not None:
            traces[name] = runs[0].trace
    rows += _comparison_rows(context, options, equal, source)
    rows += _part_difference_rows(context, options, traces, source)
    frames = {f"{name}, launch {number}": record for name, runs in records.items() for number, record in enumerate(runs, 1)}
    return Result(rows, step_frame(frames), source)


EXPERIMENT = Experiment(forecast, run, options=FrameworkSpeedOptions, reads=("framework_parity",), data=DATA)


def ranking(estimates: dict[str, Estimate]) -> dict[str, int]:
    """Return, for each framework, how many others are significantly faster: their whole interval lies above its own.

    Frameworks with the same count are tied. The estimates are rates, so higher is faster.
    """
    return {
        name: sum(other.ci_low > mine.ci_high for key, other in estimates.items() if key != name)
        for name, mine in estimates.items()
    }


def part_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the time of each part of a traced step in milliseconds, with one column for each framework.

    The last column contains the difference between the plain loop and the fastest other framework.

    Args:
        rows: rows of this experiment.
    """
    times, differences = (_by_framework(rows, metric) for metric in ("part_time_s", "part_difference_s"))
    columns = {name: {part: f"{1e3 * seconds:.2f}" for part, seconds in parts.items()} for name, parts in times.items()}
    if name := _fastest(rows):
        columns[f"{name} - {PLAIN}"] = {part: signed_number(1e3 * seconds, 2) for part, seconds in differences[name].items()}
    return pd.DataFrame(columns).rename_axis("part").reset_index()


def explained_difference(rows: Sequence[Row]) -> str:
    """Return a sentence that names the parts of a step that make most of the difference between two frameworks.

    The frameworks are the plain loop and the fastest other one. The sentence is "" if one of them has no trace.

    Args:
        rows: rows of this experiment.
    """
    if not (name := _fastest(rows)):
        return ""
    differences = _by_framework(rows, "part_difference_s")[name]
    whole = sum(differences.values())
    sign = 1 if whole > 0 else -1
    named, reached = [], 0.0
    # Parts with a difference in the direction of the whole difference come first.
    for part, difference in sorted(differences.items(), key=lambda item: -sign * item[1]):
        named.append(f"{part} ({1e3 * difference:+.3g} ms)")
        reached += sign * difference
        if reached >= _MOST * abs(whole):
            break
    compared = f"{1e3 * abs(whole):.3g} ms {'more' if whole > 0 else 'less'} than one of the {PLAIN}"
    return f"A traced step of {name} takes {compared}. Most of this difference is in: {', '.join(named)}."


def _fastest(rows: Sequence[Row]) -> str:
    """Return the name of the fastest framework that has traced steps, other than the plain loop, or "" if there is none."""
    traced = _by_framework(rows, "part_difference_s")
    timed = (row for row in rows if row.metric == "step_time_s" and row.value is not None)
    times = {row.variant: not_none(row.value) for row in timed if row.variant in traced}
    return min(times, key=times.__getitem__, default="")


def _by_framework(rows: Sequence[Row], metric: str) -> dict[str, dict[str, float]]:
    """Return the values of a metric by framework and part."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.metric == metric and row.value is not None:
            found.setdefault(row.variant, {})[row.params["part"]] = row.value
    return found


def _require_equal_ranks(context: Context, options: FrameworkSpeedOptions) -> None:
    ranks = {name: options.ranks_of(context, stack_named(name)) for name in options.stacks}
    if len(set(ranks.values())) > 1:
        raise HyperionError(
            f"the speeds of frameworks on different numbers of devices cannot be compared: {ranks}",
            where=f"{context.notebook}.{context.experiment}",
            next_step="set ranks to 1 in the profile, or choose stacks with the same number of ranks",
        )


def _excluded(context: Context, options: FrameworkSpeedOptions) -> tuple[list[str], dict[str, Outcome]]:
    """Return the frameworks to launch, and the outcome of those that are not installed or have no value in `framework_parity`."""
    metrics = ("loss_difference", "parameter_difference")
    gate = [row for row in context.upstream if row.experiment == "framework_parity" and row.metric in metrics]
    failed = {row.variant: row for row in gate if row.value is None}
    outcomes = {}
    for name in options.stacks:
        if reason := stack_named(name).why_absent():
            outcomes[name] = Outcome(name, reason=reason)
        elif name in failed:
            outcomes[name] = Outcome(name, reason=f"not timed: {failed[name].value_reason}")
    return [name for name in options.stacks if name not in outcomes], outcomes


def _launch(
    context: Context, options: FrameworkSpeedOptions, work: Work, stack: Stack, label: str, turn: Path, before: int
) -> Record:
    """Launch a framework. It waits for its turn while `before` other frameworks train, each at most `timeout_s` seconds."""
    folder = context.workspace / f"{stack.name.replace(' ', '-')}-{label}"
    return launch(stack, work, folder, options.ranks_of(context, stack), options.timeout_s * (1 + before), turn=turn)


def _refusal(work: Work, runs: Sequence[Record], reference: Record, tolerance: float) -> str:
    """Return why these runs are neither timed nor ranked, or ""."""
    for number, record in enumerate(runs, 1):
        if differences := unequal(work, record, reference):
            return f"refused, the work of launch {number} is not equal: " + "; ".join(map(str, differences))
        difference = loss_difference(record, reference)
        if not difference <= tolerance:  # also if one of them is NaN
            seen = f"its losses differ from those of the plain loop by {difference:.3g} nats"
            return f"refused, the work of launch {number} is not equal: {seen}, more than the {tolerance:.3g} of rounding"
    return ""


def _median_s(record: Record) -> float:
    return float(np.median(record.step_times_s[len(record.step_times_s) // 2 :]))


def _speed_rows(
    context: Context,
    options: FrameworkSpeedOptions,
    shape: LlamaShape,
    stack: Stack,
    runs: Sequence[Record],
    check: dict,
    source: str,
) -> list[Row]:
    device, work_tokens = context.device, options.batch_size * options.sequence_length
    step = _over_launches(runs)
    devices = 1 if device.kind == "cpu" else runs[0].ranks
    flops = llama_flops_per_token(shape, options.sequence_length)
    # Causal attention needs only half of the attention products.
    without_attention = llama_flops_per_token(shape, 0).forward_backward
    least = (without_attention + flops.forward_backward) / 2
    floor, basis = flops_floor(device, options.dtype, least * work_tokens / devices)
    shared: dict[str, Any] = {"dtype": options.dtype, "params": _params(context, options, stack), "data_source": source}
    limits = {"step_time_s": floor, "tokens_per_s": None if floor is None else work_tokens / floor}
    values = {"step_time_s": step, "tokens_per_s": step.map(lambda seconds: work_tokens / seconds)}
    rows = [
        context.row(stack.name, metric, values[metric], limit=limits[metric], limit_source=basis, **shared, **check)
        for metric in values
    ]
    flops_per_s = step.map(lambda seconds: flops.forward_backward * work_tokens / seconds)
    rows.append(_mfu_row(context, options, stack, flops_per_s, devices, shared))
    metric = "peak_rss_gib" if device.kind == "cpu" else "peak_memory_gib"
    peaks = [record.peak_memory_gib for record in runs if record.peak_memory_gib is not None]
    if len(peaks) == len(runs):
        rows.append(context.row(stack.name, metric, median_estimate(peaks), limit_source=_NO_LEAST, **shared))
    else:
        rows.append(context.absent_row(stack.name, metric, f"unreadable: {runs[0].unreadable['peak_memory_gib']}", **shared))
    energies = [record.energy_j / (record.energy_steps * work_tokens) for record in runs if record.energy_j]
    if len(energies) == len(runs):
        rows.append(context.row(stack.name, "energy_j_per_token", median_estimate(energies), **shared))
    else:
        reason = f"unreadable: {runs[0].unreadable.get('energy_j', 'too few steps')}"
        rows.append(context.absent_row(stack.name, "energy_j_per_token", reason, **shared))
    return rows


def _mfu_row(
    context: Context, options: FrameworkSpeedOptions, stack: Stack, flops_per_s: Estimate, devices: int, shared: dict
) -> Row:
    published = peak(context.device, gemm_path(options.dtype, context.device))
    if published.published_tflops is None:
        reason = f"no peak to divide by: {published.reason or 'no published value'}"
        return context.absent_row(stack.name, "mfu", reason, **shared)
    whole = devices * published.published_tflops * 1e12
    limit = published.limit_tflops / published.published_tflops if published.limit_tflops else None
    basis = f"the peak at the maximum clock; {published.limit_source}"
    return context.row(stack.name, "mfu", flops_per_s.map(lambda rate: rate / whole), limit=limit, limit_source=basis, **shared)


def _comparison_rows(
    context: Context, options: FrameworkSpeedOptions, records: dict[str, list[Record]], source: str
) -> list[Row]:
    """Return two rows for each framework: how many others are faster, and its speed relative to the plain loop.

    The relative speed is computed from pairs of launches. The plain loop has only the first row. If it is refused, no framework
    has the second.
    """
    tokens = options.batch_size * options.sequence_length
    # The intervals of the rows `tokens_per_s`.
    rates = {name: _over_launches(runs).map(lambda seconds: tokens / seconds) for name, runs in records.items()}
    times = {name: [_median_s(record) for record in runs] for name, runs in records.items()}
    rows = []
    for name, faster in ranking(rates).items():
        params = _params(context, options, stack_named(name))
        shared: dict[str, Any] = {"dtype": options.dtype, "data_source": source}
        place = params | {"what": FASTER, "ties": sum(other == faster for other in ranking(rates).values()) - 1}
        rows.append(context.row(name, "count", faster, params=place, **shared))
        if name != PLAIN and PLAIN in times:
            ratio = ratio_estimate(times[name], times[PLAIN])
            why = "no limit: how far the plain loop stays below its own limit is not bounded"
            rows.append(context.row(name, "rate_ratio", ratio, params=params | {"what": RATIO}, limit_source=why, **shared))
    return rows


def _trace_rows(context: Context, options: FrameworkSpeedOptions, stack: Stack, record: Record, source: str) -> list[Row]:
    """Return the rows of the traced steps of a launch: their time, the cost of the profiler, the parts and the top kernels."""
    params, trace = _params(context, options, stack), record.trace
    shared: dict[str, Any] = {"dtype": options.dtype, "data_source": source}
    if trace is None:
        reason = record.unreadable.get("trace", "not traced: the option traced_steps is 0")
        return [context.absent_row(stack.name, "traced_step_time_s", reason, params=params, **shared)]
    params |= {"traced_steps": trace.steps}
    error = abs(sum(trace.parts_s.values()) / trace.step_time_s - 1)
    check = checked("parts and idle time = step by the host's clock", error, trace.tolerance_s / trace.step_time_s)
    slowdown = trace.step_time_s / _median_s(record)
    rows = [
        context.row(stack.name, "traced_step_time_s", trace.step_time_s, params=params, **shared, **check),
        context.row(
            stack.name, "tracing_slowdown", slowdown, params=params, **shared, **_busy_check(context.device, record, trace)
        ),
    ]
    for part in PARTS:
        rows.append(
            context.row(stack.name, "part_time_s", trace.parts_s[part], params=params | {"part": part}, **shared, **check)
        )
    for kernel in _top_kernels(trace.kernels):
        what = {"kernel": kernel.name, "operator": kernel.operator, "part": kernel.part, "calls": kernel.calls}
        rows.append(context.row(stack.name, "kernel_time_s", kernel.time_s, params=params | what, **shared))
    return rows


def _busy_check(device: Device, record: Record, trace: StepParts) -> dict[str, Any]:
    """Check on an accelerator that the traced kernels fit into a timed step, so that they are those of the timed steps.

    The profiler slows the host, but not the kernels. The tolerance is 2 % for other clock rates of the device, and the range
    of the timed steps, relative to their median. On a CPU, the profiler slows the operators, so there is no check.
    """
    if device.kind == "cpu":
        return {}
    timed_s = record.step_times_s[len(record.step_times_s) // 2 :]
    error = max(0.0, (trace.step_time_s - trace.parts_s[IDLE]) / _median_s(record) - 1)
    tolerance = _CLOCK_TOLERANCE + (max(timed_s) - min(timed_s)) / _median_s(record)
    return checked("kernels of a traced step fit into a timed step", error, tolerance)


def _top_kernels(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with the longest times, with shortened names, and one entry for all others."""
    merged: dict[tuple[str, str, str], Kernel] = {}
    for kernel in kernels:
        key = (kernel.name[:_NAME_LENGTH], kernel.operator[:_NAME_LENGTH], kernel.part)
        before = merged.get(key, Kernel(*key, 0.0, 0.0))
        merged[key] = Kernel(*key, before.calls + kernel.calls, before.time_s + kernel.time_s)
    ordered = sorted(merged.values(), key=lambda kernel: -kernel.time_s)
    top, rest = ordered[:_TOP_KERNELS], ordered[_TOP_KERNELS:]
    others = Kernel(_REST, "", "", sum(kernel.calls for kernel in rest), sum(kernel.time_s for kernel in rest))
    return [*top, others] if rest else top


def _part_difference_rows(
    context: Context, options: FrameworkSpeedOptions, traces: dict[str, StepParts], source: str
) -> list[Row]:
    """Return a row for each part of each framework but the plain loop. There are none if the plain loop has no trace."""
    if (plain := traces.get(PLAIN)) is None:
        return []
    rows = []
    for name, trace in traces.items():
        params = _params(context, options, stack_named(name)) | {"traced_steps": trace.steps}
        for part in PARTS if name != PLAIN else ():
            difference = trace.parts_s[part] - plain.parts_s[part]
            what: dict[str, Any] = {"dtype": options.dtype, "params": params | {"part": part}, "data_source": source}
            rows.append(context.row(name, "part_difference_s", difference, **what))
    return rows


def _over_launches(runs: Sequence[Record]) -> Estimate:
    within = [median_estimate(record.step_times_s[len(record.step_times_s) // 2 :]) for record in runs]
    return launches_estimate([each.value for each in within], [(each.ci_low, each.ci_high) for each in within])


def _params(context: Context, options: FrameworkSpeedOptions, stack: Stack) -> dict[str, Any]:
    return options.params() | {"ranks": options.ranks_of(context, stack), "launches": options.launches}
