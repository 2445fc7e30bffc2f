"""Which resources do the kernels need on AMD and NVIDIA GPUs? The GPUs need not be present.

Triton can compile for a GPU that is not present. The experiment compiles every kernel with the tiles of each architecture, and
reads registers, spills, shared memory, occupancy and matrix instructions from the result. These numbers do not measure speed.
They show whether a kernel fits the architecture. The list of builds is in `hyperion.kernels.shipped`.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.kernels.availability import triton_version, why_no_triton
from hyperion.results import Row

METRICS = ("registers", "register_spills", "shared_memory_bytes", "resident_warps", "matrix_instructions")


class CompiledKernelsOptions(Options):
    """Options for the `compiled_kernels` experiment.

    Args:
        architectures: architectures to compile for: gfx90a, gfx942 or sm_90.
    """

    architectures: tuple[str, ...]


def forecast(context: Context) -> list[Forecast]:
    """Predict that no kernel spills, which is a condition for shipping it."""
    basis = "a configuration that spills is not shipped"
    return [Forecast(name, "register_spills", 0.0, basis, "bf16") for name in CompiledKernelsOptions.of(context).architectures]


def run(context: Context, report: Report) -> Result:
    """Compile each kernel for each architecture. Without Triton, return one row with the reason for each architecture."""
    options = CompiledKernelsOptions.of(context)
    if reason := why_no_triton():
        absent = [context.absent_row(name, "register_spills", reason, dtype="bf16") for name in options.architectures]
        return Result(absent, pd.DataFrame())
    from hyperion.kernels.builds import ARCHITECTURES, compile_build
    from hyperion.kernels.shipped import shipped_builds

    cells = [(ARCHITECTURES[name], build) for name in options.architectures for build in shipped_builds(ARCHITECTURES[name])]
    rows: list[Row] = []
    for done, (architecture, build) in enumerate(cells):
        report(done, len(cells), f"{architecture.name} {build.name}")
        rows += _rows(context, architecture, build, compile_build(build, architecture))
    report(len(cells), len(cells), "done")
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=CompiledKernelsOptions)


def _rows(context: Context, architecture, build, found) -> list[Row]:
    limit = architecture.shared_bytes
    checks = {
        "register_spills": checked("largest allowed number", found.spills, 0),
        "shared_memory_bytes": checked(f"share of {limit} bytes", found.shared_bytes / limit, 1.0),
        # A kernel that multiplies matrices must use matrix units.
        "matrix_instructions": checked("missing matrix instructions", int(build.matrix and not found.matrix_instructions), 0),
    }
    values = (found.registers, found.spills, found.shared_bytes, found.occupancy, found.matrix_instructions)
    params = {"kernel": build.name, "warps": build.warps, "triton": triton_version()}
    params |= {"instruction": found.matrix_name} if found.matrix_name else {}
    return [
        context.row(architecture.name, metric, value, dtype="bf16", params=params, **checks.get(metric, {}))
        for metric, value in zip(METRICS, values, strict=True)
    ]
