"""Verify a run: files are unchanged, rows are valid, counts agree, and the values of rows agree with the stored samples."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from hyperion.results.files import DRIVER_LOCK, LOCK, MANIFEST, WRITER_LOCK, StoreError
from hyperion.results.rows import Row, canonical_params
from hyperion.results.series import with_drift, with_neighbours
from hyperion.results.statistics import Estimate, bootstrap_median, median_estimate
from hyperion.results.store import Run
from hyperion.untrusted import parse_json

if TYPE_CHECKING:
    import pandas as pd

_NEXT = "restore the run from where it was copied, or measure the experiment again"
_SAME = 1e-9  # relative tolerance for a different order of floating-point operations; samples are stored exactly
STEP_PHASES = ("forward", "backward", "optimizer")
# Metrics that are an amount of work divided by the median time. If a row does not state the amount of work, it is computed from
# the value of the row.
_RATES = (
    "gemm_tflops",
    "bandwidth_gb_s",
    "algbw_gb_s",
    "busbw_gb_s",
    "samples_per_s",
    "images_per_s",
    "tokens_per_s",
    "loader_samples_per_s",
    "tokenizer_tokens_per_s",
    "mfu",
)
_TIMES = ("step_time_s", "call_time_s", "inference_time_s", "collective_time_s", "launch_time_s")


def verify_run(run: Run) -> list[str]:
    """Verify the files, rows, counts and samples of a run.

    Returns:
        One line for each verified statement, followed by lines that state what cannot be verified.

    Raises:
        HyperionError: a file, a row or a count is wrong. The message describes the first error.
    """
    names, rows, experiments = run.verify(), run.rows(), run.experiments()
    statements = [
        f"unchanged since written: {len(names)} files have the size and sha256 of {MANIFEST} "
        "(an edit of a file together with its hash is not detected)",
        f"rules: {len(rows)} rows follow the rules of their metrics: unit, interval around the value, error within "
        "tolerance, value within its limit, unique key",
        f"counts: {len(experiments)} experiments have the number of rows in experiments.json, and all {len(run.environments())} "
        "environments match their digests",
    ]
    sampled, proven, others = 0, Counter(), Counter()
    # Load one file of samples at a time, because all samples of a run may not fit into memory.
    for name in experiments:
        # Notebook names contain no slash, so the first slash separates notebook and experiment.
        samples = run.samples(*name.split("/", 1))
        sampled += len(samples)
        groups = _sample_groups(samples, name)
        for row in run.rows(*name.split("/", 1)):
            proof = _recomputed(row, groups, f"{name} in {run.folder}")
            proven[proof] += bool(proof)
            others[row.metric] += not proof
    statements.append(f"samples: {len(experiments)} files are readable and contain {sampled} samples")
    statements += [f"recomputed from samples: {count} rows, {proof}" for proof, count in sorted(proven.items()) if count]
    left = ", ".join(f"{count} {metric}" for metric, count in sorted(others.items()) if count)
    statements.append(f"not recomputed: {left or 'no row'}")
    if strangers := _strangers(run, names):
        statements.append(f"not covered: {len(strangers)} files that are not in {MANIFEST}: {', '.join(strangers[:5])}")
    return statements


def _sample_groups(samples: "pd.DataFrame", experiment: str) -> dict[tuple, np.ndarray]:
    """Return a dict that maps (variant, dtype, params as JSON, phase) to the sampled times in seconds."""
    if not {"variant", "dtype", "params", "time_s"} <= set(samples.columns):
        return {}
    timed = samples.loc[samples["params"].notna() & samples["time_s"].notna()]
    named = timed.loc[:, ["variant", "dtype", "params"]].fillna("").astype(str)
    named["phase"] = timed["phase"].fillna("").astype(str) if "phase" in timed else ""
    groups = {}
    for names, group in timed.groupby([named[column] for column in named], sort=False):
        variant, dtype, params, phase = cast(tuple[str, str, str, str], names)
        parsed = parse_json(params, StoreError, _NEXT, where=f"params of the samples of {experiment}")
        groups[variant, dtype, canonical_params(parsed), phase] = _numbers(cast("pd.Series", group["time_s"]), experiment)
    return groups


def _numbers(column: "pd.Series", experiment: str) -> np.ndarray:
    import pandas as pd

    numbers = np.asarray(pd.to_numeric(column, errors="coerce"), dtype=np.float64)
    if not np.isfinite(numbers).all() or (numbers <= 0).any():
        raise StoreError("the samples contain times that are not positive numbers of seconds", where=experiment, next_step=_NEXT)
    return numbers


def _recomputed(row: Row, groups: dict[tuple, np.ndarray], where: str) -> str:
    """Recompute a row from its samples.

    Returns:
        The fields of the row that the samples confirm, or "" if the row cannot be computed from the samples.

    Raises:
        StoreError: the samples do not agree with the row.
    """
    # Only monotone functions of the median time can be recomputed, because they map the ends of the interval to ends.
    function = _function_of(row)
    if function is None or row.value is None or None in (row.n, row.ci_low, row.ci_high):
        return ""
    phase = row.metric.removesuffix("_time_s")
    phases = ("", phase if phase in STEP_PHASES else "step")
    # More than one match is ambiguous, because the samples do not say which series the row used.
    matching = [
        groups[key] for key in ((row.variant, row.dtype, canonical_params(row.params), p) for p in phases) if key in groups
    ]
    if len(matching) != 1:
        return ""
    estimate, work = median_estimate(matching[0]), _work(row)
    exact = row.metric not in _RATES or work is not None
    # If the amount of work is unknown, the factor is computed from the value of the row, and only the interval and n are checked.
    factor = (work or 1.0) if exact else row.value / function(estimate.value)
    named = f"{row.metric} of {row.variant} {row.dtype} {row.params}".strip()
    if row.n != estimate.n:
        raise StoreError(f"{named} has n = {row.n}, but there are {estimate.n} samples", where=where, next_step=_NEXT)
    # Rows of a series with drift store a wider interval, and a row does not say whether its series had drift. Earlier versions
    # did not widen the interval of samples that are like their neighbours, or did not extend the interval of a short series.
    # These are computed one after the other, because nearly all rows agree with the first, and resampling takes milliseconds.
    forms = (
        form.map(lambda time_s, function=function: factor * function(time_s))
        for interval in _intervals(estimate, matching[0])
        for form in (interval, with_drift(interval, matching[0]))
    )
    first = next(forms)
    if not any(_agree(row, form) for form in itertools.chain([first], forms)):
        fault = f"{named} is {row.value:.9g} [{row.ci_low:.9g}, {row.ci_high:.9g}], but its samples give {first}"
        raise StoreError(fault, where=where, next_step=_NEXT)
    return "value, interval and n" if exact else "interval and n relative to the value (the row does not state the work)"


def _intervals(estimate: Estimate, samples: np.ndarray) -> Iterator[Estimate]:
    yield with_neighbours(estimate, samples)
    yield estimate
    yield bootstrap_median(samples)


def _function_of(row: Row) -> Callable[[float], float] | None:
    """Return a monotone function of the median time that equals the metric up to a constant factor.

    Return None if the metric is not a function of the median time.
    """
    if row.metric in _TIMES or row.metric.removesuffix("_time_s") in STEP_PHASES:
        return lambda time_s: time_s
    return (lambda time_s: 1 / time_s) if row.metric in _RATES else None


def _work(row: Row) -> float | None:
    """Return the amount of work of one call (operations, bytes or items) in the unit of the rate.

    Return None if the params of the row do not state it.
    """
    params = {name: value for name, value in row.params.items() if type(value) in (int, float) and value > 0}
    if row.metric == "gemm_tflops" and {"m", "n", "k"} <= params.keys() and "kind" not in row.params:
        # A matrix product of (M, K) by (K, N) takes M·N·K multiply-adds, and a multiply-add counts as 2 FLOPs.
        return 2 * params["m"] * params["n"] * params["k"] * params.get("products", 1) / 1e12
    if row.metric in ("algbw_gb_s", "bandwidth_gb_s"):
        # Only the param "bytes" states the traffic of a call. Other sizes do not, because a call may read memory repeatedly.
        return params["bytes"] / 1e9 if "bytes" in params else None
    if row.metric in ("samples_per_s", "images_per_s", "tokens_per_s", "loader_samples_per_s"):
        return params.get("batch")
    return None


def _agree(row: Row, form: Estimate) -> bool:
    stated = np.array([row.value, row.ci_low, row.ci_high], dtype=np.float64)
    # The absolute tolerance is 0, because values range from nanoseconds to thousands of TFLOPS.
    return bool(np.allclose(stated, (form.value, form.ci_low, form.ci_high), _SAME, 0.0))


def _strangers(run: Run, names: list[str]) -> list[str]:
    # Lock files are not in the manifest, because they belong to running processes and are not results.
    known = {*names, MANIFEST, LOCK, WRITER_LOCK, DRIVER_LOCK}
    files = (path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if not path.is_dir())
    return sorted(set(files) - known)
