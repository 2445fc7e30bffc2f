"""How long does a training step of a well-known model take, where does the time go, and how far is that from the limits?

The same step in several ways: number formats, layouts of images, eager and compiled. They are timed one after the other, so
that none of their rows says "faster"; what a compiled step owes beside its time, its compilation and its loss, are rows too.
"""

import gc

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.product_rows import maf_row
from hyperion.chapter.rows import gemm_limit, timed_columns
from hyperion.chapter.variants import merged, run_variant
from hyperion.experiments.steps.reference_steps import (
    GIB,
    LEAST_MEMORY,
    TrainingStep,
    least_memory_gib,
    step_params,
    step_rows,
    timed,
)
from hyperion.experiments.steps.step_variants import EAGER, Cell, StepVariant, cells_of
from hyperion.measure import PeakMemory, PeakMemoryRegion, StepTiming, allocator_refusal
from hyperion.measure.steps.compilation import measure_first_calls, missing_compiler, probe_vector_instructions
from hyperion.models import parameter_count
from hyperion.results import Row
from hyperion.workloads.step_forecasts import forecast_reference_step
from hyperion.workloads.twins import agreements, train_twins, twin_format

# Workspaces of the BLAS libraries stay for the life of a process; a model that stayed would be larger.
_LEFT_GIB = 0.25


def forecast(context: Context) -> list[Forecast]:
    """Samples per second and seconds a step of every variant, from ceilings and from what its step dispatches."""
    return [
        foretold
        for cell in _measured(context)
        for foretold in forecast_reference_step(context, cell.model.name, context.sizes["batch_size"], cell.variant)
    ]


def run(context: Context, report) -> Result:
    """Time every variant of every model, in processes that tell its memory from that of the others."""
    absent = [_absent(context, cell) for cell in cells_of(context.sizes, context.device) if cell.absent]
    count = len(_measured(context))
    # Resident pages stay with a process of a CPU. On an accelerator tensors are counted one by one, and each variant's row
    # says what the one before left: one process does, and seconds of start-up are paid once.
    groups = [[number] for number in range(count)] if context.device.kind == "cpu" else [list(range(count))]
    results = [run_variant(context, report, measure, {"numbers": numbers}) for numbers in groups]
    return merged([*results, Result(absent, pd.DataFrame())])


EXPERIMENT = Experiment(forecast, run, reads=("gemm",), forecast_reads=("bandwidth", "launch_cost", "operator_cost"))


def _measured(context: Context) -> list[Cell]:
    return [cell for cell in cells_of(context.sizes, context.device) if not cell.absent]


def measure(context: Context, report, numbers: list[int]) -> Result:
    """The worker's side: the variants with these numbers among all that are measured here, one after the other."""
    cells = _measured(context)
    bench = _Bench(context, {(cells[n].model.name, cells[n].variant) for n in numbers})
    for done, cell in enumerate(cells[n] for n in numbers):
        report(done, len(numbers), f"{cell.model.name} {cell.variant}")
        bench.measure(cell)
        gc.collect()
    report(len(numbers), len(numbers), "done")
    return Result(bench.rows, pd.concat(bench.frames, ignore_index=True) if bench.frames else pd.DataFrame())


class _Bench:
    """The rows and samples of the variants that one process measures, and the losses that compiled ones are held against."""

    def __init__(self, context: Context, here: set[tuple[str, StepVariant]]):
        self.context, self.device, self.here = context, context.device, here
        self.rows: list[Row] = []
        self.frames: list[pd.DataFrame] = []
        self._losses: dict[tuple[str, StepVariant], np.ndarray] = {}

    def measure(self, cell: Cell) -> None:
        """One variant: its rows, or the one that says why there is none."""
        if cell.variant.compiled and (missing := missing_compiler(self.device)):
            self.rows.append(_absent(self.context, cell, f"unavailable: {missing}"))
            return
        try:
            self._measure(cell)
        except (RuntimeError, MemoryError) as error:
            refusal = allocator_refusal(error, self.device)
            if refusal is None:
                raise
            self.rows.append(_absent(self.context, cell, f"out of memory: {refusal}"))

    def _measure(self, cell: Cell) -> None:
        context, model, variant, batch = self.context, cell.model, cell.variant, self.context.sizes["batch_size"]
        left_gib = None if self.device.kind == "cpu" else torch.cuda.memory_allocated(self.device.torch_device) / GIB
        eager = self._eager_losses(cell) if variant.compiled else None
        step = self._step(cell, variant)
        compiling_s = self._compile(step) if variant.compiled else None
        with PeakMemoryRegion(self.device) as region:
            timing, learned = timed(step, self.device, context.sizes["time_limit_s"])
        rows, frame = step_rows(context, model, batch, variant.dtype, timing, learned, **variant.params)
        self.frames.append(frame)
        self.rows += [
            _count_row(context, cell, parameter_count(step.module)),
            *rows,
            mfu_of_maf(context, cell, timing),
            _memory_row(context, cell, region.peak, left_gib),
        ]
        if variant.compiled:
            self.rows.append(_row(context, cell, "compile_time_s", compiling_s, blocks=len(model.layout().blocks)))
            twins = train_twins(
                twin_format(variant.dtype), context.seed, lambda: self._losses_after(self._step(cell, _eager(variant))).tolist()
            )
            self.frames.append(twins.assign(variant=model.name))
            self.rows += parity_rows(context, cell, self._losses_after(step), eager, twins)
            torch._dynamo.reset()  # what was compiled refers to the model
        elif (model.name, StepVariant(variant.dtype, variant.channels_last, compiled=True)) in self.here:
            self._losses[model.name, variant] = self._losses_after(step)

    def _step(self, cell: Cell, variant: StepVariant) -> TrainingStep:
        return TrainingStep(cell.model.name, self.context.sizes["batch_size"], variant, self.device, self.context.seed)

    def _compile(self, step: TrainingStep) -> float:
        self.context.workspace.mkdir(parents=True, exist_ok=True)
        probe_vector_instructions(self.device, self.context.workspace)
        return measure_first_calls(step.once, self.device)

    def _eager_losses(self, cell: Cell) -> np.ndarray:
        """Of the same steps, done eagerly, in this process: they were timed before, or are done now."""
        eager = _eager(cell.variant)
        known = self._losses.pop((cell.model.name, eager), None)
        return self._losses_after(self._step(cell, eager)) if known is None else known

    def _losses_after(self, step: TrainingStep) -> np.ndarray:
        """The losses of the first `parity_steps` steps; those that are still to be done are done now."""
        count = self.context.sizes["parity_steps"]
        while len(step.losses) < count:
            step.once()
        return torch.stack(step.losses[:count]).double().cpu().numpy()


def _eager(variant: StepVariant) -> StepVariant:
    return StepVariant(variant.dtype, variant.channels_last)


def _params(context: Context, cell: Cell) -> dict:
    return step_params(context.sizes["batch_size"]) | cell.variant.params


def _row(context: Context, cell: Cell, metric: str, value: float | None, *, columns: dict | None = None, **more) -> Row:
    params = _params(context, cell) | more
    return context.row(cell.model.name, metric, value, dtype=cell.variant.dtype, params=params, **(columns or {}))


def _absent(context: Context, cell: Cell, reason: str = "") -> Row:
    return _row(context, cell, "step_time_s", None, columns={"value_reason": reason or cell.absent})


def _count_row(context: Context, cell: Cell, counted: int) -> Row:
    """Parameters of what was really trained, held against the published number."""
    error = float(abs(counted - cell.model.parameter_count))
    check = {"check": "expected count", "check_error": error, "check_tolerance": 0.0}
    return _row(context, cell, "count", float(counted), columns=check, what="parameters")


def mfu_of_maf(context: Context, cell: Cell, timing: StepTiming) -> Row:
    """Model FLOPs over time and over the fastest square product that this run measured in the format: what software can
    still gain, where MFU tells what the data sheet promises."""
    maf, dtype = maf_row(context.upstream, cell.variant.dtype), cell.variant.dtype
    if maf is None:
        reason = f"this run has measured no product in {dtype} (chapter 1.1)"
        return _row(context, cell, "mfu_maf", None, columns={"value_reason": reason})
    work = cell.model.flops.forward_backward * context.sizes["batch_size"]
    rate = timing.whole.estimate.map(lambda seconds: work / seconds / 1e12)
    peak, source = gemm_limit(context.device, dtype)
    size = " x ".join(str(maf.params[side]) for side in "mnk")  # it may be another one in the next run: no part of the key
    columns = timed_columns(rate, timing.whole) | {
        # Both ends at once: the interval holds the ratio at least as often as the two hold their own values.
        "ci_low": rate.ci_low / maf.ci_high,
        "ci_high": rate.ci_high / maf.ci_low,
        "limit": None if peak is None else peak / maf.value,
        "limit_source": f"{source}; over the fastest product, {maf.value:.4g} TFLOPS at {size}",
    }
    return _row(context, cell, "mfu_maf", rate.value / maf.value, columns=columns, maf=maf.experiment)


def _memory_row(context: Context, cell: Cell, peak: PeakMemory, left_gib: float | None) -> Row:
    """The peak of the steps, above what weights, gradients, moments and the batch take by themselves."""
    check = {}
    if left_gib is not None:
        check = {"check": "GiB left by the variant before", "check_error": left_gib, "check_tolerance": _LEFT_GIB}
    limit = {"limit": least_memory_gib(cell.model, context.sizes["batch_size"]), "limit_source": LEAST_MEMORY}
    return _row(context, cell, peak.metric, peak.gib, columns={"value_reason": peak.reason, **limit, **check})


def parity_rows(context: Context, cell: Cell, losses: np.ndarray, eager: np.ndarray, twins: pd.DataFrame) -> list[Row]:
    """How far the losses of compiled steps lie from those of the same steps done eagerly, early and late, and how far they
    may: as far as eager trainings lie apart that round differently."""
    return [
        _row(
            context,
            cell,
            "relative_difference",
            agreement.difference,
            columns={"check": agreement.check, "check_error": agreement.difference, "check_tolerance": agreement.tolerance},
            of="training_loss",
            **{"from": EAGER},
            steps=len(losses),
            **agreement.params,
        )
        for agreement in agreements(losses, eager, twins)
    ]
