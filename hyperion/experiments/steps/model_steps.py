"""How long do a training step of a well-known model and its phases take, and how close are they to the limits?

Each step is measured in several variants, which differ in number format, image memory format, and eager or compiled mode. The
variants are timed one after the other, not in alternation, so the experiment computes no speed-ups. A compiled step also has rows
for its compilation time and for the difference of its losses from the eager losses.
"""

import gc
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import all_samples, checked, gemm_limit, maf_row, timed_columns
from hyperion.chapter.variants import merged, run_variant
from hyperion.errors import not_none
from hyperion.hardware import Device
from hyperion.measure import PeakMemory, PeakMemoryRegion, StepTiming, allocator_refusal
from hyperion.measure.clock.timing import MINIMUM_SAMPLES
from hyperion.measure.steps.compilation import measure_first_calls, missing_compiler, probe_vector_instructions
from hyperion.models import ReferenceModel, parameter_count, reference_model
from hyperion.results import Row
from hyperion.results.rows import OUT_OF_MEMORY
from hyperion.units import GIB
from hyperion.workloads.reference_steps import (
    EAGER,
    LEAST_MEMORY,
    StepVariant,
    TrainingStep,
    forecast_reference_step,
    has_layout,
    least_memory_gib,
    step_params,
    step_rows,
    timed,
)
from hyperion.workloads.twins import agreements, train_twins, twin_format

# Memory in GiB that may remain allocated after a variant was measured. The BLAS workspaces stay until the process ends, but they
# are smaller than this. A model that was not freed is larger.
_LEFT_GIB = 0.25
_ONE_LAYOUT = "no variant: it works on sequences, which have no channels to put last; only a network of convolutions has"
_LEFT_OUT = "left out by this profile, for time"
_TWO_SWITCHES = (
    "left out: Inductor on a GPU reads PyTorch's older switch of TF32, and refuses a process that is kept to fp32 by the newer"
)


class Variant(Table):
    """Variant of a training step, as stated in a profile.

    Args:
        dtype: fp32, tf32, bf16 or fp16.
        channels_last: whether images use the channels-last memory format. In compiled variants, only convolutional networks use
            this option.
        compiled: whether to compile each block of the model.
        models: names of the models measured in this variant. None measures all models.
    """

    dtype: str
    channels_last: bool = False
    compiled: bool = False
    models: tuple[str, ...] | None = None


class ModelStepsOptions(Options):
    """Options for the `model_steps` experiment.

    Args:
        models: names of the reference models.
        variants: training-step variants. Each model is measured in all of them, in this order.
        batch_size: number of samples in a batch.
        time_limit_s: timing budget in seconds for each variant of each model.
        parity_steps: number of steps for which compiled and eager losses are compared.
        samples: minimum number of samples of each step. More are taken while the timing budget lasts.
        tolerance: not used. The stored options of the reference run h200x2 have it, and the notebook reads them in a replay.
    """

    models: tuple[str, ...]
    variants: tuple[Variant, ...]
    batch_size: int
    time_limit_s: float
    parity_steps: int
    samples: int = MINIMUM_SAMPLES
    tolerance: dict[str, float] | None = None


@dataclass(frozen=True)
class StepCell:
    """One model in one training-step variant: number format, memory format, and eager or compiled mode.

    Attributes:
        absent: reason why this variant is not measured on this device, or an empty string if it is.
    """

    model: ReferenceModel
    variant: StepVariant
    absent: str


def forecast(context: Context) -> list[Forecast]:
    """Predict the samples per second and step time of every variant, from measured ceilings and the operators of the step."""
    options = ModelStepsOptions.of(context)
    return [
        forecast
        for cell in _measured(options, context.device)
        for forecast in forecast_reference_step(context, cell.model.name, options.batch_size, cell.variant)
    ]


def run(context: Context, report: Report) -> Result:
    """Time every variant of every model. On a CPU each variant runs in its own process, so that memory is measured separately."""
    options = ModelStepsOptions.of(context)
    absent = [_absent(context, options, cell) for cell in cells_of(options, context.device) if cell.absent]
    count = len(_measured(options, context.device))
    # On a CPU, a process keeps memory pages after a model is deleted, so each variant gets its own process. On an accelerator,
    # the allocator counts the memory of tensors, and each row states how much the previous variant left behind. So one process
    # suffices there, and Python and torch start only once.
    groups = [[number] for number in range(count)] if context.device.kind == "cpu" else [list(range(count))]
    results = [run_variant(context, report, measure, {"numbers": numbers}) for numbers in groups]
    return merged([*results, Result(absent, pd.DataFrame())])


EXPERIMENT = Experiment(
    forecast, run, options=ModelStepsOptions, reads=("gemm",), forecast_reads=("bandwidth", "launch_cost", "operator_cost")
)


def cells_of(options: ModelStepsOptions, device: Device) -> list[StepCell]:
    """Return every variant of every model, in the order of the options."""
    cells = []
    for name in options.models:
        model = reference_model(name)
        for asked in options.variants:
            last = asked.channels_last and (has_layout(model) or not asked.compiled)
            variant = StepVariant(asked.dtype, last, asked.compiled)
            left_out = asked.models is not None and name not in asked.models
            cells.append(StepCell(model, variant, _LEFT_OUT if left_out else _why_not(model, variant, device)))
    return cells


def _why_not(model: ReferenceModel, variant: StepVariant, device: Device) -> str:
    supported, how = device.supports(variant.dtype)
    if not supported:
        return f"unsupported: {how}"
    if how.startswith("emulated"):
        return f"not timed, because it says nothing of the format: {how}"
    if variant.channels_last and not has_layout(model):
        return _ONE_LAYOUT
    # When Inductor searches for convolution kernels, it reads PyTorch's older switch of TF32 (PyTorch 2.11 and 2.13).
    return _TWO_SWITCHES if variant.compiled and device.kind != "cpu" and variant.dtype in ("fp32", "tf32") else ""


def _measured(options: ModelStepsOptions, device: Device) -> list[StepCell]:
    return [cell for cell in cells_of(options, device) if not cell.absent]


def measure(context: Context, report: Report, numbers: list[int]) -> Result:
    """Measure some variants one after the other. Runs in a worker process.

    Args:
        context: context of the experiment.
        report: function called with the progress.
        numbers: indices of the variants in the list of all variants measured on this device.
    """
    options = ModelStepsOptions.of(context)
    cells = _measured(options, context.device)
    bench = _Bench(context, options, {(cells[n].model.name, cells[n].variant) for n in numbers})
    for done, cell in enumerate(cells[n] for n in numbers):
        report(done, len(numbers), f"{cell.model.name} {cell.variant}")
        bench.measure(cell)
        gc.collect()
    report(len(numbers), len(numbers), "done")
    return Result(bench.rows, all_samples(bench.frames))


class _Bench:
    """Measures several variants in one process. The results are collected in `rows` and `frames`.

    Losses of eager steps are also kept, to be compared with the losses of compiled steps.
    """

    def __init__(self, context: Context, options: ModelStepsOptions, here: set[tuple[str, StepVariant]]):
        self.context, self.options, self.device, self.here = context, options, context.device, here
        self.rows: list[Row] = []
        self.frames: list[pd.DataFrame] = []
        self._losses: dict[tuple[str, StepVariant], np.ndarray] = {}

    def measure(self, cell: StepCell) -> None:
        """Measure one variant and add its rows, or add one row with the reason if it cannot be measured."""
        if cell.variant.compiled and (missing := missing_compiler(self.device)):
            self.rows.append(_absent(self.context, self.options, cell, f"unavailable: {missing}"))
            return
        try:
            self._measure(cell)
        except (RuntimeError, MemoryError) as error:
            refusal = allocator_refusal(error, self.device)
            if refusal is None:
                raise
            self.rows.append(_absent(self.context, self.options, cell, OUT_OF_MEMORY + refusal))

    def _measure(self, cell: StepCell) -> None:
        context, options, model, variant = self.context, self.options, cell.model, cell.variant
        # Memory left by the previous variant. A check of the memory row verifies that it is negligible.
        left_gib = None if self.device.kind == "cpu" else torch.cuda.memory_allocated(self.device.torch_device) / GIB
        # The eager losses are computed first, so that the compiled step's peak excludes the eager model.
        eager = self._eager_losses(cell) if variant.compiled else None
        step = self._step(cell, variant)
        # Compile before the peak-memory region, so that the peak excludes compilation.
        compiling_s = self._compile(step) if variant.compiled else None
        with PeakMemoryRegion(self.device) as region:
            timing, learned = timed(step, self.device, options.time_limit_s, options.samples)
        rows, frame = step_rows(context, model, options.batch_size, variant.dtype, timing, learned, **variant.params)
        self.frames.append(frame)
        self.rows += [
            _count_row(context, options, cell, parameter_count(step.module)),
            *rows,
            _mfu_of_maf(context, options, cell, timing),
            _memory_row(context, options, cell, region.peak, left_gib),
        ]
        if eager is not None:
            blocks = len(model.layout().blocks)
            self.rows.append(_row(context, options, cell, "compile_time_s", compiling_s, {"blocks": blocks}))
            # Twins are eager training runs with perturbed rounding. Their spread shows how far correct losses may differ.
            twins = train_twins(
                twin_format(variant.dtype), context.seed, lambda: self._losses_after(self._step(cell, _eager(variant))).tolist()
            )
            self.frames.append(twins.assign(variant=model.name))
            self.rows += parity_rows(context, options, cell, self._losses_after(step), eager, twins)
            torch._dynamo.reset()  # compiled code keeps the model alive
        # Keep the eager losses only if this process also measures the compiled variant of the same model.
        elif (model.name, StepVariant(variant.dtype, variant.channels_last, compiled=True)) in self.here:
            self._losses[model.name, variant] = self._losses_after(step)

    def _step(self, cell: StepCell, variant: StepVariant) -> TrainingStep:
        return TrainingStep(cell.model.name, self.options.batch_size, variant, self.device, self.context.seed)

    def _compile(self, step: TrainingStep) -> float:
        """Run the first steps, which compile the model, and return their time in seconds."""
        self.context.workspace.mkdir(parents=True, exist_ok=True)
        # Inductor's test of the C++ compiler must not count as compilation of the model.
        probe_vector_instructions(self.device, self.context.workspace)
        return measure_first_calls(step.once, self.device)

    def _eager_losses(self, cell: StepCell) -> np.ndarray:
        """Return the losses of the same steps in eager mode.

        If this process has timed the eager variant, reuse its losses. Otherwise run the eager steps now.
        """
        eager = _eager(cell.variant)
        known = self._losses.pop((cell.model.name, eager), None)
        return self._losses_after(self._step(cell, eager)) if known is None else known

    def _losses_after(self, step: TrainingStep) -> np.ndarray:
        """Return the losses of the first `parity_steps` steps. If fewer steps have run so far, run the missing ones."""
        count = self.options.parity_steps
        while len(step.losses) < count:
            step.once()
        return torch.stack(step.losses[:count]).double().cpu().numpy()


def _eager(variant: StepVariant) -> StepVariant:
    return StepVariant(variant.dtype, variant.channels_last)


def _row(
    context: Context,
    options: ModelStepsOptions,
    cell: StepCell,
    metric: str,
    value: float | None,
    params: dict | None = None,
    **columns,
) -> Row:
    params = step_params(options.batch_size) | cell.variant.params | (params or {})
    return context.row(cell.model.name, metric, value, dtype=cell.variant.dtype, params=params, **columns)


def _absent(context: Context, options: ModelStepsOptions, cell: StepCell, reason: str = "") -> Row:
    return _row(context, options, cell, "step_time_s", None, value_reason=reason or cell.absent)


def _count_row(context: Context, options: ModelStepsOptions, cell: StepCell, counted: int) -> Row:
    """Return the row with the number of parameters of the trained model.

    Its check compares this number with the published one.
    """
    error = float(abs(counted - cell.model.parameter_count))
    check: dict = checked("expected count", error, 0.0)
    return _row(context, options, cell, "count", float(counted), {"what": "parameters"}, **check)


def _mfu_of_maf(context: Context, options: ModelStepsOptions, cell: StepCell, timing: StepTiming) -> Row:
    """Return the row with the model FLOPs per second divided by the MAF, the rate of the fastest square matrix product.

    MFU is relative to the data-sheet peak. This share is relative to a measured rate instead, so it shows how much faster the
    step could become with better software.
    """
    maf, dtype = maf_row(context.upstream, cell.variant.dtype), cell.variant.dtype
    if maf is None:
        reason = f"this run has measured no product in {dtype} (chapter 1.1)"
        return _row(context, options, cell, "mfu_maf", None, value_reason=reason)
    work = cell.model.flops.forward_backward * options.batch_size
    rate = timing.whole.estimate.map(lambda seconds: work / seconds / 1e12)
    maf_tflops, (peak, source) = not_none(maf.value), gemm_limit(context.device, dtype)
    # The dimensions are not a param of the row, because they may differ between runs.
    size = " x ".join(str(maf.params[side]) for side in "mnk")
    columns = timed_columns(rate, timing.whole) | {
        # Dividing opposite ends of the two intervals gives an interval that contains the true ratio with at least the same
        # confidence.
        "ci_low": rate.ci_low / not_none(maf.ci_high),
        "ci_high": rate.ci_high / not_none(maf.ci_low),
        "limit": None if peak is None else peak / maf_tflops,
        "limit_source": f"{source}; over the fastest product, {maf_tflops:.4g} TFLOPS at {size}",
    }
    return _row(context, options, cell, "mfu_maf", rate.value / maf_tflops, {"maf": maf.experiment}, **columns)


def _memory_row(context: Context, options: ModelStepsOptions, cell: StepCell, peak: PeakMemory, left_gib: float | None) -> Row:
    """Return the row with the peak memory of the steps.

    Its limit is a lower bound: the memory of weights, gradients, optimizer moments and the batch.
    """
    columns: dict = {"limit": least_memory_gib(cell.model, options.batch_size), "limit_source": LEAST_MEMORY}
    if left_gib is not None:
        columns |= checked("GiB left by the variant before", left_gib, _LEFT_GIB)
    return _row(context, options, cell, peak.metric, peak.gib, value_reason=peak.reason, **columns)


def parity_rows(
    context: Context, options: ModelStepsOptions, cell: StepCell, losses: np.ndarray, eager: np.ndarray, twins: pd.DataFrame
) -> list[Row]:
    """Return rows with the differences between compiled and eager losses, early and late in training.

    Args:
        losses: losses of the compiled steps, shape [steps].
        eager: losses of the eager steps, shape [steps].
        twins: losses of eager training runs with perturbed rounding, see `hyperion.workloads.twins`. Their spread sets the
            tolerance.
    """
    compared = {"of": "training_loss", "from": EAGER, "steps": len(losses)}
    return [
        _row(
            context,
            options,
            cell,
            "relative_difference",
            agreement.difference,
            compared | agreement.params,
            **checked(agreement.check, agreement.difference, agreement.tolerance),
        )
        for agreement in agreements(losses, eager, twins)
    ]
