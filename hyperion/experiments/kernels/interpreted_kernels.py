"""Do the kernels compute correct results? Without a GPU, Triton's interpreter runs them.

The interpreter must be enabled before Triton is imported. Therefore the kernels run in a separate process.
"""

import os

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.variants import run_variant
from hyperion.kernels.availability import triton_version, why_no_triton

METRIC = "relative_difference"
KERNELS = (
    "vector_add",
    "softmax",
    "layer_norm",
    "layer_norm backward",
    "matmul",
    "matmul with descriptors",
    "attention",
    "attention with descriptors",
)


class InterpretedKernelsOptions(Options):
    """Options for the `interpreted_kernels` experiment. It has only the time limit of the process."""


def forecast(context: Context) -> list[Forecast]:
    """Predict that the error of each kernel is that of one rounding to float32."""
    if context.device.kind != "cpu" or why_no_triton():
        return []
    basis = "a sum of float32 numbers that is rounded once has an error of about 2^-24"
    return [Forecast(name, METRIC, 2**-24, basis, "fp32") for name in KERNELS]


def run(context: Context, report: Report) -> Result:
    """Compare each kernel with float64 in the interpreter. If this is not possible, return one row with the reason."""
    reason = why_no_triton()
    if context.device.kind != "cpu":
        reason = "not run: this device runs the kernels, and the other experiments compare their outputs with float64"
    if reason:
        return Result([context.absent_row("all kernels", METRIC, reason, dtype="fp32")], pd.DataFrame())
    return run_variant(context, report, interpret)


EXPERIMENT = Experiment(forecast, run, options=InterpretedKernelsOptions)


def interpret(context: Context, report: Report) -> Result:
    """Run all comparisons, in a process that has not imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    from hyperion.kernels.interpreted import TOLERANCE, compare_all

    rows = []
    for done, one in enumerate(compare_all(context.seed)):
        report(done, done + 1, f"{one.kernel}: {one.case}")
        params = {"case": one.case, "tensor": one.tensor, "triton": triton_version()}
        rows.append(context.error_row(one.kernel, METRIC, one.error, "float64", TOLERANCE, dtype="fp32", params=params))
    return Result(rows, pd.DataFrame())
