"""Does the number format matter to a memory that moves bytes? Every stream in every format over arrays of the same bytes.

The copy is held against a plain loop of `copy_`, and power read beside tells what moving a gigabyte costs.
"""

import math

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.experiments.hardware.streams import measure_stream, stream_bytes, stream_forecast, stream_params, stream_row
from hyperion.hardware import read
from hyperion.measure import (
    FORMATS,
    OPERATIONS,
    REDUCTIONS,
    BandwidthMeasurement,
    energy_of,
    measure_bandwidth,
    verify_elementwise,
)
from hyperion.measure.clock.timing import compare_with_plain_loop
from hyperion.results import Row, ratio_estimate

OPERATION_NAMES = (*OPERATIONS, *REDUCTIONS)
RATIO = "copy over a plain loop of copy_"


def forecast(context: Context) -> list[Forecast]:
    """The datasheet's bandwidth for every format and operation, whatever the format."""
    return [
        stream_forecast(context, operation, dtype, _elements(context, dtype))
        for operation in OPERATION_NAMES
        for dtype in context.sizes["dtypes"]
    ]


def run(context: Context, report) -> Result:
    """Time every operation in every format with flushed caches, verify each; then the plain loop and the energy."""
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    energy: list[Row] = []
    cells = [(operation, dtype) for dtype in context.sizes["dtypes"] for operation in OPERATION_NAMES]
    for done, (operation, dtype) in enumerate(cells):
        report(done, len(cells) + 1, f"{operation} {dtype}")
        measured, row, samples = measure_stream(context, operation, dtype, _elements(context, dtype))
        rows.append(row)
        frames += samples
        if dtype == context.sizes["energy_dtype"]:
            energy.append(_energy_row(context, operation, row, measured))
    report(len(cells), len(cells) + 1, "beside a plain loop")
    cross_rows, cross_frames = _cross_check(context)
    report(len(cells) + 1, len(cells) + 1, "done")
    return Result(rows + cross_rows + energy, pd.concat(frames + cross_frames, ignore_index=True))


EXPERIMENT = Experiment(forecast, run)


def _elements(context: Context, dtype: str) -> int:
    """Of one array: the same bytes in every format."""
    return context.sizes["array_mib"] * 2**20 // FORMATS[dtype].bytes


def _energy_row(context: Context, operation: str, rate: Row, measured: BandwidthMeasurement | None) -> Row:
    """Joules for a gigabyte: the same stream for long enough that power can be read beside, or why there are none."""
    identity = {"variant": operation, "metric": "energy_j_per_gb", "dtype": rate.dtype, "params": rate.params}
    if measured is None:
        return context.row(value=None, value_reason=rate.value_reason, **identity)
    state = read(context.device)
    if state.power_w is None:
        reason = f"no power: {state.unreadable.get('power_w', 'it was not read')}"
        return context.row(value=None, value_reason=reason, **identity)
    samples = math.ceil(context.sizes["energy_s"] / measured.timing.estimate.value)
    longer = measure_bandwidth(
        operation,
        measured.elements,
        rate.dtype,
        context.device,
        seed=context.seed,
        time_limit_s=context.sizes["energy_s"],
        minimum_samples=max(measured.timing.estimate.n, samples),
    )
    energy = energy_of(longer.timing)
    joules = energy.j_per_gb(longer.bytes)
    if joules is None:
        return context.row(value=None, value_reason=energy.reason, **identity)
    columns = timed_columns(joules, longer.timing, longer.verification)
    return context.row(value=joules.value, limit_source="no limit: no datasheet value", **identity, **columns)


def _cross_check(context: Context) -> tuple[list[Row], list[pd.DataFrame]]:
    """Our copy beside `destination.copy_(source)` in the loop anybody would write, interleaved."""
    dtype, calls = context.sizes["cross_check_dtype"], context.sizes["cross_check_calls"]
    elements, number_format = _elements(context, dtype), FORMATS[dtype]
    params = stream_params(elements) | {"cache": "hot", "plain_loop_calls": calls}
    try:
        generator = torch.Generator(context.device.torch_device).manual_seed(context.seed + 1)
        options = {"device": context.device.torch_device, "dtype": number_format.storage}
        source = torch.randn(elements, generator=generator, **options)
        ours, theirs = (torch.full((elements,), float("nan"), **options) for _ in range(2))
        copy, plain = compare_with_plain_loop(
            lambda: OPERATIONS["copy"].run(ours, source), context.device, calls, plain=lambda: theirs.copy_(source)
        )
    except torch.OutOfMemoryError as error:
        reason = out_of_memory_reason(error)
        return [context.row(RATIO, "speedup", None, dtype=dtype, params=params, value_reason=reason)], []
    ratio = ratio_estimate(copy.samples_s, plain.samples_s)
    rows = [
        context.row(
            RATIO,
            "speedup",
            ratio.value,
            dtype=dtype,
            params=params,
            limit_source="no limit: the device's events and the host's clock on the same copy",
            **timed_columns(ratio, copy),
        )
    ]
    frames = []
    traffic = stream_bytes("copy", dtype, elements)
    for name, timing, output in (("copy", copy, ours), ("plain copy_", plain, theirs)):
        verification = verify_elementwise(output, lambda copied: copied, (source,), tolerance=0.0)
        rows.append(stream_row(context, name, dtype, params, traffic, timing, verification))
        frames.append(sample_frame(timing, name, dtype, params))
    return rows, frames
