"""How fast and how accurate is a trained model in each runtime?

The trained language model and the trained classifier run in PyTorch (eager, compiled and as a captured graph), in AOTInductor, in
ONNX Runtime and in MIGraphX. For each runtime, the rows contain:

- the error of the logits against float64 and against PyTorch eager, with a tolerance computed from the rounding of the products,
  and in a 16-bit format from the error of PyTorch eager;
- perplexity or accuracy on the held-out data, relative to the float32 model in eager mode on the same tokens or images;
- percentiles of the latency for one example, the speed-up over eager, and the throughput of the best batch size found by a
  search;
- the times of export and compilation, the size of the file, and the number of kernels launched per call.

For the language model, a call is one forward pass over windows of tokens. The experiment `decode_speed` of chapter 2.12 measures
the decoding of single tokens.
"""

import copy
import gc
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, gemm_limit, out_of_memory_reason, sample_frame, speedup_row, timed_row
from hyperion.chapter.variants import run_variant
from hyperion.errors import HyperionError, not_none
from hyperion.experiments.inference.backends import (
    AOTI,
    COMPILED,
    EAGER,
    IN_PROCESS,
    MIGRAPHX,
    ORT_CPU,
    ORT_GPU,
    Prepared,
    build_package,
    count_kernels,
    load_package,
    prepare,
    why_absent,
)
from hyperion.hardware import Device, detect_cpu
from hyperion.measure import FORMATS, Timing, Verification, matmul_precision, relative_error, time_interleaved
from hyperion.measure.clock.clocks import BlockClock, WallClock, calls_that_fill
from hyperion.measure.products.dispatch import count_operations
from hyperion.measure.steps.profiled import device_seconds
from hyperion.processes.job import JobError
from hyperion.results import Estimate, Row
from hyperion.results.rows import UNEXPECTED
from hyperion.workloads.batch_times import BEST_BATCH, BatchTimes, batch_of, second_call_s
from hyperion.workloads.datasets import IMAGES, TEXT
from hyperion.workloads.percentiles import LATENCIES
from hyperion.workloads.quality import change_of_quality
from hyperion.workloads.trained_models import (
    CLASSIFIER,
    LANGUAGE,
    Scores,
    TrainedModel,
    read_trained_model,
    trained_classifier,
    trained_language_model,
)

RUNTIMES = (*IN_PROCESS[:3], AOTI, *IN_PROCESS[3:])
HOST_BOUND_SHARE = 0.5
Found = tuple[list[Row], list[pd.DataFrame]]
_LEFT_OUT = "left out: a compilation takes longer than all other measurements, and the profile does not ask for this one"
_COMPARED = 8  # number of examples whose logits are compared with float64
_DEVIATIONS = 4
_BLOCK_S = 0.01  # a block of calls on a GPU takes at least this long, so that its synchronisation adds little
# Largest error of a runtime in a 16-bit format, relative to that of eager mode in the same format. Both round the weights alike,
# and the outputs of the products and of the operations between them. A runtime that rounds in other places, or in four times as
# many of them, has at most about twice the error, because independent roundings add up like a random walk.
_OF_EAGER_ERROR = 2


class RuntimesOptions(Options):
    """Options for the `runtimes` experiment.

    Args:
        language_model, classifier: names of trained models, see `hyperion.workloads.trained_models`.
        dtype: number format for PyTorch's runtimes. ONNX Runtime and MIGraphX run the float32 graph.
        batches: batch sizes that the search for the best one tries.
        compiled_batches: batch sizes for which torch.compile compiles the model. Its search for the best batch size tries only
            these. They include 1, and the largest of `batches` unless the profile leaves torch.compile out.
        left_out: runtimes that the profile skips, by kind of model ("language" or "classifier"). The rows of these runtimes
            contain the reason.
        latency_samples: number of calls for the latency percentiles. The 99th percentile needs at least 368.
        latency_limit_s: time limit in seconds for these calls. A slow runtime makes fewer calls. A percentile that needs more
            calls then has no value.
        time_limit_s: seconds of timing for each comparison. The search for the best batch size ends when a call takes longer.
        windows, images: largest number of windows and of images that are scored. None scores all.
        host_windows, host_images: the same numbers for a runtime that uses the CPU of a machine with a GPU.
    """

    language_model: str
    classifier: str
    dtype: str
    batches: tuple[int, ...]
    compiled_batches: tuple[int, ...] = (1,)
    left_out: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    latency_samples: int
    latency_limit_s: float = 8.0
    time_limit_s: float
    windows: int | None = None
    images: int | None = None
    host_windows: int = 32
    host_images: int = 1000

    def why_absent(self, kind: str, runtime: str, device: Device) -> str:
        """Return the reason why a runtime is not measured for a kind of model, or an empty string if it is."""
        return _LEFT_OUT if runtime in self.left_out.get(kind, ()) else why_absent(runtime, device)

    def records(self, kind: str, beside_gpu: bool) -> int | None:
        """Return the number of windows or of images that are scored, or None for all.

        Args:
            kind: "language" or "classifier".
            beside_gpu: whether the model runs on the CPU of a machine with a GPU.
        """
        if beside_gpu:
            return self.host_windows if kind == LANGUAGE else self.host_images
        return self.windows if kind == LANGUAGE else self.images


def forecast(context: Context) -> list[Forecast]:
    """Predict that no runtime changes the perplexity or the accuracy. The reader guesses the first value."""
    options = RuntimesOptions.of(context)
    forecasts = []
    for kind, name in ((LANGUAGE, options.language_model), (CLASSIFIER, options.classifier)):
        metric, same = ("perplexity_ratio", 1.0) if kind == LANGUAGE else ("accuracy_difference", 0.0)
        for runtime in RUNTIMES:
            if options.why_absent(kind, runtime, context.device):
                continue
            dtype = _dtype(runtime, options)
            basis = f"the same weights; rounding in {dtype} changes each logit by far less than the loss of a token varies"
            forecasts.append(Forecast(runtime, metric, same, basis, dtype=dtype, params={"model": name}))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Measure both models in every runtime. If a runtime cannot be used or its process crashes, its rows contain the reason."""
    options = RuntimesOptions.of(context)
    report(0, 8, "trained models")
    models = trained_language_model(context, options.language_model), trained_classifier(context, options.classifier)
    report(2, 8, f"packages of {AOTI}")
    # Build both packages at the same time. A build takes about a minute on few cores, and no timing runs meanwhile.
    with ThreadPoolExecutor(len(models)) as threads:
        builds = list(threads.map(lambda trained: _build(context, options, trained), models))
    results = []
    for done, (trained, build) in enumerate(zip(models, builds, strict=True)):
        report(3 + 2 * done, 8, f"{trained.name}, runtimes in one process")
        results.append(run_variant(context, _quiet, measure_in_process, {"folder": str(trained.folder)}))
        report(4 + 2 * done, 8, f"{trained.name}, {AOTI}")
        results.append(_ahead_of_time(context, options, trained, build))
    report(8, 8, "done")
    rows = [row for result in results for row in result.rows]
    return Result(rows, all_samples([result.samples for result in results if len(result.samples)]), models[0].source)


EXPERIMENT = Experiment(forecast, run, options=RuntimesOptions, data=(*TEXT, *IMAGES))


def measure_in_process(context: Context, report: Report, folder: str) -> Result:
    """Measure one model in all runtimes in `IN_PROCESS`. A worker process calls this function."""
    options, trained = RuntimesOptions.of(context), read_trained_model(Path(folder))
    rows: list[Row] = []
    frames: list[pd.DataFrame] = []
    references: dict[Device, _Reference] = {}
    for runtime in IN_PROCESS:
        dtype = _dtype(runtime, options)
        if reason := options.why_absent(trained.kind, runtime, context.device):
            rows += _absent(context, trained, runtime, dtype, reason)
            continue
        device = detect_cpu() if runtime == ORT_CPU else context.device
        try:
            # Prepare outside `matmul_precision`, because PyTorch 2.13 cannot export while its old and new TF32 settings differ.
            example = _inputs(trained, device)[:2]
            model, batches = trained.load(device, FORMATS[dtype].storage), options.compiled_batches
            prepared = prepare(runtime, model, example, device, dtype, context.workspace, batches)
            with matmul_precision(FORMATS[dtype]):
                if device not in references:
                    references[device] = _Reference(trained, device, context.device, options)
                new_rows, new_frames = _Variant(context, options, runtime, prepared, references[device]).measure()
        except torch.OutOfMemoryError as error:
            rows += _absent(context, trained, runtime, dtype, out_of_memory_reason(error))
        except Exception as error:
            # If a runtime fails, the others must still run. The rows contain the first line of the error message.
            if runtime == EAGER:
                raise
            rows += _failed(context, trained, runtime, dtype, _reason(error))
        else:
            rows += new_rows
            frames += new_frames
        prepared = None
        gc.collect()
    (context.workspace / "model.onnx").unlink(missing_ok=True)
    return Result(rows, all_samples(frames))


def build_in_process(context: Context, report: Report, folder: str, package: str) -> Result:
    """Compile one model ahead of time into a package file. A worker process calls this function."""
    options, trained = RuntimesOptions.of(context), read_trained_model(Path(folder))
    device, storage = context.device, FORMATS[options.dtype].storage
    example = _formed(_inputs(trained, device)[:2], storage)
    seconds = build_package(trained.load(device, storage), example, Path(package))
    params = {"model": trained.name, "what": "export and compilation into a package"}
    return Result([context.row(AOTI, "export_time_s", seconds, dtype=options.dtype, params=params)], pd.DataFrame())


def load_in_process(context: Context, report: Report, folder: str, build_s: float) -> Result:
    """Load and measure the package that `build_in_process` wrote. A worker process calls this function."""
    options, trained = RuntimesOptions.of(context), read_trained_model(Path(folder))
    with matmul_precision(FORMATS[options.dtype]):
        reference = _Reference(trained, context.device, context.device, options)
        prepared = load_package(_package(context, trained), context.device, options.dtype, build_s)
        rows, frames = _Variant(context, options, AOTI, prepared, reference).measure()
    return Result(rows, all_samples(frames))


def output_tolerance(model: nn.Module, dtype: str) -> float:
    """Return the tolerance for the relative error of logits, computed from the rounding of each product.

    A product that sums K terms in float32 has K float32 roundings, plus one rounding of its output. The relative error of a
    rounding is uniformly distributed from -u to u, where u is the unit roundoff. Its standard deviation is u / sqrt(3). The
    errors of all roundings add up like a random walk. The tolerance is four standard deviations. This also covers the
    element-wise operations: even with three times as many roundings as products, it is two standard deviations.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 2.8, on statistical rounding errors.
    """
    single, stored = torch.finfo(torch.float32).eps / 2, torch.finfo(FORMATS[dtype].storage).eps / 2
    layers = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    variance = sum(weight[0].numel() * single**2 + stored**2 for weight in layers) / 3
    return _DEVIATIONS * math.sqrt(variance)


class _Reference:
    """The model in eager mode on a device, with its inputs, its float32 scores and its float64 logits.

    Args:
        trained: the model.
        device: device of the eager model.
        run_device: device of the run. It differs from `device` for a runtime on the CPU of a machine with a GPU.
        options: options of the experiment.

    Attributes:
        records: number of windows or images that are scored, or None for all.
    """

    def __init__(self, trained: TrainedModel, device: Device, run_device: Device, options: RuntimesOptions):
        self.trained, self.device = trained, device
        self.records = options.records(trained.kind, beside_gpu=device.kind != run_device.kind)
        self.inputs = _inputs(trained, device)
        self.model = trained.load(device)
        with torch.no_grad():
            compared = self.inputs[:_COMPARED]
            double = copy.deepcopy(self.model).double()
            self.exact = double(compared.double() if compared.is_floating_point() else compared)
        with matmul_precision(FORMATS["fp32"]):
            self.scores = self.score(self.model)
        self._eager: dict[str, nn.Module] = {}

    def eager(self, dtype: str) -> nn.Module:
        """Return the model in eager mode in a number format."""
        if dtype not in self._eager:
            self._eager[dtype] = self.trained.load(self.device, FORMATS[dtype].storage)
        return self._eager[dtype]

    def score(self, call: Callable[[Tensor], Tensor]) -> Scores:
        """Score a variant on the held-out data selected by the options."""
        return self.trained.score(call, self.device, records=self.records)

    def eager_logits(self, dtype: str) -> Tensor:
        """Return the logits of the compared examples in eager mode in a number format."""
        return self.eager(dtype)(_formed(self.inputs[:_COMPARED], FORMATS[dtype].storage))

    def tolerance(self, dtype: str) -> float:
        """Return the tolerance for logits in a number format.

        In float32, the order of the sums determines the error, and each runtime may choose another one. The tolerance is
        `output_tolerance`. It is far below the error of any quantised model. In a 16-bit format, `output_tolerance` would accept
        a model with 4-bit weights, so the error of eager mode limits the tolerance, too.
        """
        bound = output_tolerance(self.model, dtype)
        if FORMATS[dtype].storage == torch.float32:
            return bound
        return min(bound, _OF_EAGER_ERROR * relative_error(self.eager_logits(dtype), self.exact))


@dataclass(frozen=True)
class _Variant:
    """A model in a runtime. `measure` returns its rows and samples.

    Args:
        context: context of the experiment.
        options: options of the experiment.
        runtime: name of the runtime.
        prepared: the model in the runtime.
        reference: the model in eager mode on the same device.
    """

    context: Context
    options: RuntimesOptions
    runtime: str
    prepared: Prepared
    reference: _Reference

    def formed(self, x: Tensor) -> Tensor:
        """Return inputs in the number format of the runtime."""
        return _formed(x, FORMATS[self.prepared.dtype].storage)

    def call(self, x: Tensor) -> Tensor:
        """Return the logits. Inputs are converted to the number format of the runtime."""
        return self.prepared.call(self.formed(x))

    def columns(self, **params: Any) -> dict:
        """Return the columns that all rows share.

        Args:
            params: additional params of the row.
        """
        return {"dtype": self.prepared.dtype, "params": {"model": self.reference.trained.name} | params}

    def row(self, metric: str, value: float | Estimate, **params: Any) -> Row:
        """Return a row of this runtime."""
        return self.context.row(self.runtime, metric, value, **self.columns(**params))

    def measure(self) -> Found:
        """Return the rows and the samples of the model."""
        prepared, reference = self.prepared, self.reference
        with torch.no_grad():
            check, rows = self.compare_logits()
            scores = reference.score(self.call)
            rows.append(self.row(*change_of_quality(reference.trained, scores, reference.scores, reference.records)))
            rows += [self.row(metric, seconds) for metric, seconds in prepared.seconds.items()]
            if prepared.stored_bytes is not None:
                rows.append(self.row("stored_gb", prepared.stored_bytes / 1e9))
            rows.append(self.kernels_row())
            latency_rows, latency_frames = self.time_latency()
            throughput_rows, throughput_frames = self.time_throughput(check)
        return rows + latency_rows + throughput_rows, latency_frames + throughput_frames

    def kernels_row(self) -> Row:
        """Return the row with the number of kernels of a call for one example."""
        try:
            kernels = count_kernels(self.prepared, self.formed(self.reference.inputs[:1]))
        except HyperionError as error:
            return self.context.absent_row(self.runtime, "kernels_per_call", error.what, **self.columns(batch=1))
        return self.row("kernels_per_call", kernels, batch=1)

    def host_bound_row(self, one: Tensor, latency_s: float) -> Row:
        """Return the row with the busy time of the GPU during a call for one example as a share of its latency.

        The busy time comes from the profiler, because times from the device's clock include gaps in which the device waits for
        the host.
        """
        params: dict[str, Any] = {"batch": 1, "cache": "hot", "what": "device time over latency"}
        try:
            with torch.no_grad():
                busy_s = device_seconds(lambda: self.prepared.call(one), self.prepared.device)
        except HyperionError as error:
            return self.context.absent_row(self.runtime, "share", error.what, **self.columns(**params))
        share = min(busy_s / latency_s, 1.0)
        return self.row("share", share, **params, label="host-bound" if share < HOST_BOUND_SHARE else "device-bound")

    def compare_logits(self) -> tuple[Verification, list[Row]]:
        """Compare the logits with float64 and with eager mode. Return the comparison with float64, and the rows."""
        prepared, reference = self.prepared, self.reference
        output = self.call(reference.inputs[:_COMPARED]).clone().to(reference.exact.device)
        tolerance = reference.tolerance(prepared.dtype)
        check = Verification("logits against float64", relative_error(output, reference.exact), tolerance)
        # The logits of both runtimes have errors, and independent errors add up like a random walk.
        agreement = relative_error(output, reference.eager_logits(prepared.dtype))
        against_eager = Verification("logits against PyTorch eager", agreement, math.sqrt(2) * tolerance)
        rows = []
        for one in (check, against_eager):
            columns = self.columns(device=prepared.device.kind, **prepared.ran, against=one.name.removeprefix("logits against "))
            rows.append(
                self.context.error_row(self.runtime, "relative_difference", one.error, one.name, one.tolerance, **columns)
            )
        return check, rows

    @property
    def times(self) -> BatchTimes:
        """Measures the times of this variant."""
        options = self.options
        limits = (options.latency_samples, options.latency_limit_s, options.time_limit_s)
        return BatchTimes(self.context, self.runtime, self.prepared.device, self.columns, *limits)

    def time_latency(self) -> Found:
        """Return rows with the percentiles of the latency of one example, and on a GPU a row that tells if the host limits it.

        The inputs are converted to the number format of the runtime before the timing.
        """
        one = self.formed(self.reference.inputs[:1].clone())
        rows, frame, timing = self.times.latency(lambda: self.prepared.call(one))
        if self.prepared.device.kind != "cpu":
            rows.append(self.host_bound_row(one, timing.estimate.value))
        return rows, [frame]

    def time_throughput(self, check: Verification) -> Found:
        """Find the batch size with the highest throughput, then compare it and batch size 1 with eager mode.

        Both get the same converted inputs. Blocks of calls of the runtime and of eager mode are timed in alternation. Within a
        block, the host may launch the next call while the device works, as in a loop over many batches. If single calls
        alternated, eager mode would start each call with an empty queue.

        Args:
            check: comparison of the logits with float64.
        """
        device, dtype, time_limit_s = self.prepared.device, self.prepared.dtype, self.options.time_limit_s
        peak, source = gemm_limit(device, dtype)
        flops = _flops_per_example(self.reference)
        limit = (None, source) if peak is None else (peak * 1e12 / flops, f"{flops / 1e9:.4g} GFLOP of an example at {source}")
        batches = self.options.compiled_batches if self.runtime == COMPILED else self.options.batches
        rows, frames, rates = self.times.search(lambda size: self.on_batch(self.prepared.call, size), batches, limit)
        best = max(rates, key=lambda size: rates[size])
        for size in dict.fromkeys((1, best)):
            calls = [self.on_batch(self.prepared.call, size)]
            if self.runtime != EAGER:
                calls.append(self.on_batch(self.reference.eager(dtype), size))
            longest_s = max(second_call_s(call, device) for call in calls)
            # ONNX Runtime has its own threads, which would compete with the idle threads of PyTorch if calls alternated.
            clock = BlockClock() if device.kind == "cpu" else WallClock(device, calls_that_fill(_BLOCK_S, longest_s))
            mine, *others = time_interleaved(calls, device, cold=False, time_limit_s=time_limit_s, clock=clock)
            role = BEST_BATCH if size == best else "one example"
            columns = self.columns(batch=size, cache="hot", role=role, order="blocks")
            rows.append(self.rate_row(self.runtime, mine, limit, check, columns))
            frames.append(sample_frame(mine, self.runtime, **columns))
            for eager in others:
                why = "no limit: two runtimes of the same model"
                rows.append(speedup_row(self.context, self.runtime, mine, eager, why, check, **columns))
                # The rate of eager mode beside this runtime is stored, so that the ratio can be compared with eager mode alone.
                columns = self.columns(batch=size, cache="hot", role=role, order="blocks", beside=self.runtime)
                rows.append(self.rate_row(EAGER, eager, limit, None, columns))
                frames.append(sample_frame(eager, EAGER, **columns))
        return rows, frames

    def rate_row(
        self, variant: str, timing: Timing, limit: tuple[float | None, str], check: Verification | None, columns: dict
    ) -> Row:
        """Return a row with the examples per second of a timing."""
        rate = timing.estimate.map(lambda seconds: columns["params"]["batch"] / seconds)
        return timed_row(self.context, variant, "samples_per_s", rate, timing, check, limit, **columns)

    def on_batch(self, call: Callable[[Tensor], Tensor], size: int) -> Callable[[], Tensor]:
        """Return a function that calls a model with a batch in the number format of the runtime."""
        x = self.formed(batch_of(self.reference.inputs, size))
        return lambda: call(x)


def _build(context: Context, options: RuntimesOptions, trained: TrainedModel) -> float | list[Row]:
    """Build a package in a separate process. Return the build time in seconds, or rows that state why there is no package."""
    if reason := options.why_absent(trained.kind, AOTI, context.device):
        return _absent(context, trained, AOTI, options.dtype, reason)
    # Two builds run at the same time, and each needs a separate folder.
    own = replace(context, workspace=context.workspace / f"build-{trained.name}")
    try:
        params = {"folder": str(trained.folder), "package": str(_package(context, trained))}
        return not_none(run_variant(own, _quiet, build_in_process, params).rows[0].value)
    except JobError as error:
        return _failed(context, trained, AOTI, options.dtype, f"the process that builds the package: {_reason(error)}")


def _ahead_of_time(context: Context, options: RuntimesOptions, trained: TrainedModel, build: float | list[Row]) -> Result:
    """Load and measure a package in a separate process.

    If there is no package, or if the process crashes, the rows contain the reason.

    Args:
        build: the result of `_build`.
    """
    if isinstance(build, list):
        return Result(build, pd.DataFrame())
    try:
        return run_variant(context, _quiet, load_in_process, {"folder": str(trained.folder), "build_s": build})
    except JobError as error:
        reason = f"the process that loads and runs the package: {_reason(error)}"
        return Result(_failed(context, trained, AOTI, options.dtype, reason), pd.DataFrame())
    finally:
        _package(context, trained).unlink(missing_ok=True)


def _flops_per_example(reference: _Reference) -> float:
    example = reference.inputs[:1]
    with torch.no_grad():
        return count_operations(lambda: reference.model(example)).total_flops


def _absent(context: Context, trained: TrainedModel, runtime: str, dtype: str, reason: str) -> list[Row]:
    quality = "perplexity_ratio" if trained.kind == LANGUAGE else "accuracy_difference"
    metrics = (quality, "relative_difference", "samples_per_s", *LATENCIES.values())
    return [context.absent_row(runtime, metric, reason, dtype=dtype, params={"model": trained.name}) for metric in metrics]


def _failed(context: Context, trained: TrainedModel, runtime: str, dtype: str, reason: str) -> list[Row]:
    """Return the rows of a runtime that can be used here but failed. The chapter reports the first row as unexpected."""
    first, *others = _absent(context, trained, runtime, dtype, reason)
    return [replace(first, value_reason=UNEXPECTED + reason), *others]


def _dtype(runtime: str, options: RuntimesOptions) -> str:
    """Return the number format of a runtime. ONNX graphs are exported in float32."""
    return "fp32" if runtime in (ORT_CPU, ORT_GPU, MIGRAPHX) else options.dtype


def _inputs(trained: TrainedModel, device: Device) -> Tensor:
    return _formed(trained.held_out(device)[0], torch.float32)


def _formed(x: Tensor, storage: torch.dtype) -> Tensor:
    """Return images in the dtype `storage` and the channels-last memory format, and token ids unchanged.

    All inputs have the same dtype and memory format, because the compiled code supports only one.
    """
    return x.to(storage, memory_format=torch.channels_last) if x.is_floating_point() else x


def _package(context: Context, trained: TrainedModel) -> Path:
    return context.workspace / f"{trained.name}.pt2"


def _reason(error: Exception) -> str:
    """Return the type of an error and the first nonempty line of its message, truncated to 200 characters.

    The message of a JobError ends with the last lines of the worker's output. Its last line names the cause and is appended.
    """
    message = error.what if isinstance(error, JobError) else str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    cause = f": {lines[-1]}"[:200] if isinstance(error, JobError) and len(lines) > 1 else ""
    return f"{type(error).__name__}: {lines[0]}"[:200] + cause


def _quiet(done: int, total: int, note: str = "") -> None:
    """Ignore the progress of a worker process, because its steps are not steps of the experiment."""
