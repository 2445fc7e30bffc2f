"""Which PyTorch operators compute correct results on this device, forward and backward, in each number format?

Each operator is called with the sample inputs of PyTorch's own tests, and its outputs and gradients are compared with float64 on
the CPU. `rounding` derives the tolerances, and `operator_checks` lists the operators. The gap report lists all operators that are
wrong or unsupported. The operators run in separate processes. If an operator crashes its process, the operator is reported, and
the remaining operators run in a new process.
"""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.experiments.coverage.layers import LAYERS, round_trip
from hyperion.experiments.coverage.operator_checks import KIND_OF, KNOWN_GAPS, LARGEST_MEDIAN_ERROR, KnownGap, check_operators
from hyperion.hardware.cpu import usable_cpus
from hyperion.processes import Job, run_job
from hyperion.processes.job import JobError
from hyperion.results import Row

METRIC = "error_over_tolerance"
PASSES = ("forward", "backward")
STATUSES = ("passed", "failed", "unsupported", "no gradient")
ALL = "all operators"
_CORES_EACH, _MOST_WORKERS = 2, 8


class OperatorSuiteOptions(Options):
    """Options for the `operator_suite` experiment.

    Args:
        formats: number formats.
        samples: number of sample inputs for each operator and format, or 0 for all of them.
        probes: number of float64 references with randomly changed inputs. There are that many for changes as large
            as the unit roundoff of the tested format, and for changes as large as that of float64. See `rounding`.
        compiled: operators that are also checked with torch.compile.
    """

    formats: tuple[str, ...]
    samples: int
    probes: int
    compiled: tuple[str, ...] = ()


def forecast(context: Context) -> list[Forecast]:
    """Predict that all operators and layers pass."""
    basis = "PyTorch has a kernel for every operator of the list in each format, and each kernel is as accurate as its formula"
    names = [*KIND_OF, *LAYERS]
    return [
        Forecast(ALL, "count", float(len(names)), basis, dtype, {"what": "passed", "pass": which})
        for dtype in OperatorSuiteOptions.of(context).formats
        for which in PASSES
    ]


def run(context: Context, report: Report) -> Result:
    """Check all operators and layers.

    The rows contain counts, ratios of errors to tolerances, gaps, and comparisons of layers before saving and after loading.
    """
    options = OperatorSuiteOptions.of(context)
    outcomes, unavailable = collect_outcomes(context, options, [*KIND_OF, *LAYERS], report)
    rows: list[Row] = []
    for name, found in outcomes.items():
        rows += _rows_of(context, name, found)
    for dtype in options.formats:
        for which in PASSES:
            rows += _counts(context, outcomes, unavailable, dtype, which)
    for name in LAYERS:
        tensors, differing = round_trip(name, torch.device(context.device.torch_device), context.seed)
        check = checked("tensors and outputs that differ in a bit after saving and loading the state dict", differing, 0)
        rows.append(context.row(name, "count", tensors, params={"what": "tensors of the state dict"}, **check))
    lines = [{"name": name} | one for name, found in outcomes.items() for one in found]
    return Result(rows, pd.DataFrame(lines))


EXPERIMENT = Experiment(forecast, run, options=OperatorSuiteOptions)


def collect_outcomes(
    context: Context,
    options: OperatorSuiteOptions,
    names: list[str],
    report: Report,
    check: Callable[..., dict] = check_operators,
    workers: int | None = None,
) -> tuple[dict[str, list[dict]], str]:
    """Run `check_operators` in worker processes until each operator has an outcome.

    Several processes run at the same time, because numerical errors do not depend on other processes. Each process checks its own
    part of the list. If a process crashes, the operator that it was checking gets the outcome "failed" with the reason. A new
    process then continues with the next operator.

    Args:
        workers: number of processes that run at the same time. None starts one for every two CPU cores, but at most eight.

    Returns:
        ({name: outcomes}, reason why PyTorch's database cannot be used, or an empty string).
    """
    context.workspace.mkdir(parents=True, exist_ok=True)
    cores = len(usable_cpus())
    workers = min(len(names), workers or max(1, min(cores // _CORES_EACH, _MOST_WORKERS)))
    finished = [0] * workers

    def check_part(part: int) -> tuple[dict[str, list[dict]], str]:
        own = names[part::workers]
        file = context.workspace / f"operators-{part}.jsonl"
        file.unlink(missing_ok=True)
        unavailable, total = "", len(own)

        def advance(done: int, of: int, note: str) -> None:
            finished[part] = total - of + done
            report(sum(finished), len(names), note)

        while own:
            params = {"names": own, "formats": list(options.formats), "samples": options.samples, "probes": options.probes}
            params |= {"compiled": list(options.compiled), "seed": context.seed, "file": str(file)}
            params |= {"threads": max(1, cores // workers)}
            try:
                unavailable = run_job(Job(check, params, timeout_s=options.timeout_s), on_progress=advance)["unavailable"]
                break
            except JobError as error:
                own = [name for name in own if name not in _read(file)]
                if not own:  # the process crashed after its last operator had an outcome
                    break
                lines = error.what.strip().splitlines()
                reason = f"the process ended: {lines[0]}" + (f": {lines[-1]}"[:200] if len(lines) > 1 else "")
                ended = {"status": "failed", "reason": reason, "mode": "eager", "entry": own[0]}
                outcomes = [ended | {"dtype": dtype, "pass": which} for dtype in options.formats for which in PASSES]
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps([own[0], outcomes]) + "\n")
                own = own[1:]
        return _read(file), unavailable

    with ThreadPoolExecutor(workers) as threads:
        parts = list(threads.map(check_part, range(workers)))
    report(len(names), len(names), "done")
    found = {name: outcomes for outcomes_of, _ in parts for name, outcomes in outcomes_of.items()}
    return {name: found[name] for name in names if name in found}, next((why for _, why in parts if why), "")


def status_of(outcomes: list[dict], dtype: str, which: str) -> str:
    """Return the status of an operator for a format and a pass, without torch.compile.

    An operator fails if one of its entries fails. It is unsupported if it has entries but none of them has a kernel.
    """
    wanted = (dtype, which, "eager")
    statuses = {one["status"] for one in outcomes if (one["dtype"], one["pass"], one["mode"]) == wanted}
    missing = {one["status"] for one in outcomes if (one["dtype"], one["pass"], one["mode"]) == (dtype, "forward", "eager")}
    # Without a forward pass there is no backward pass either.
    otherwise = "unsupported" if missing == {"unsupported"} else "no gradient"
    return next((status for status in ("failed", "passed", "unsupported") if status in statuses), otherwise)


def _read(file: Path) -> dict[str, list[dict]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(json.loads(line) for line in lines)


def _counts(context: Context, outcomes: dict[str, list[dict]], unavailable: str, dtype: str, which: str) -> list[Row]:
    """Return rows with the number of operators that have each status. Check that every operator in the list has a status.

    If PyTorch's database is unavailable, return one row with the reason.
    """
    if unavailable:
        params = {"what": "passed", "pass": which}
        return [context.absent_row(ALL, "count", unavailable, dtype=dtype, params=params)]
    statuses = [status_of(found, dtype, which) for found in outcomes.values() if found]
    missing = len(KIND_OF) + len(LAYERS) - len(statuses)
    check = checked("operators without an outcome", missing, 0)
    return [
        context.row(ALL, "count", statuses.count(status), dtype=dtype, params={"what": status, "pass": which}, **check)
        for status in STATUSES
    ]


def _rows_of(context: Context, name: str, outcomes: list[dict]) -> list[Row]:
    """Return the rows of one operator.

    There is a row for each entry of the operator, with the largest ratio of an error to its tolerance. There is also a row for
    each gap, with the reason.
    """
    kind = KIND_OF.get(name, "layers")
    groups: dict[tuple, list[dict]] = {}
    rows: list[Row] = []
    for one in outcomes:
        params = {"kind": kind, "mode": one["mode"]}
        if "ratio" in one:
            groups.setdefault((one["entry"], one["dtype"], one["mode"]), []).append(one)
        else:
            reason = f"{one['status']}: {one['reason']}"
            params |= {"pass": one["pass"]}
            rows.append(context.absent_row(one["entry"], METRIC, reason, dtype=one["dtype"], params=params))
    for (entry, dtype, mode), found in groups.items():
        # A known gap in one pass must not hide an error in the other pass.
        worst = max(found, key=lambda one: (one["ratio"] > 1 and _known_gap(name, one) is None, one["ratio"]))
        params = {"kind": kind, "mode": mode, "worst pass": worst["pass"], "sample inputs": worst["samples"]}
        if gap := _known_gap(name, worst):
            params |= {"cause": gap.cause, "median error": worst["error"]}
            if math.isfinite(worst["ratio"]):
                check = checked("float64, ceiling of the known gap", worst["ratio"], gap.ceilings[dtype])
                rows.append(context.row(entry, METRIC, worst["ratio"], dtype=dtype, params=params, **check))
            else:
                rows.append(context.absent_row(entry, METRIC, f"known: {gap.cause}", dtype=dtype, params=params))
        else:
            check = checked("float64", worst["ratio"], 1.0)
            rows.append(context.row(entry, METRIC, worst["ratio"], dtype=dtype, params=params, **check))
    return rows


def _known_gap(name: str, outcome: dict) -> KnownGap | None:
    """Return the known gap of an operator that explains the error of an outcome, or None if there is none."""
    gap = KNOWN_GAPS.get((name, outcome["pass"]))
    ceiling = gap.ceilings.get(outcome["dtype"], 0.0) if gap else 0.0
    return gap if 1 < outcome["ratio"] <= ceiling and outcome["error"] <= LARGEST_MEDIAN_ERROR else None
