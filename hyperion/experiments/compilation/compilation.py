"""How much time does torch.compile save in a call, and how much time does compilation take?

Each compiler mode of each model is measured in a separate process, in which timed calls of the compiled model and of the eager
model alternate.
"""

import gc
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from pydantic import Field

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import Curve, own_product_curve, own_stream_curve
from hyperion.chapter.rows import (
    NO_CEILINGS,
    check_columns,
    checked,
    gemm_limit,
    out_of_memory_reason,
    sample_frame,
    stream_ceiling,
    timed_columns,
)
from hyperion.chapter.variants import merged, run_variant
from hyperion.experiments.compilation.compilation_models import (
    CompiledModel,
    ModelSpec,
    checkpoint_weights,
    make_model,
    model_params,
    reference_output,
)
from hyperion.measure import FORMATS, PeakMemoryRegion, Timing, Verification, relative_error, time_interleaved
from hyperion.measure.products.dispatch import Census, count_operations, shapes_only
from hyperion.measure.steps.compilation import (
    EAGER,
    MODES,
    Compilation,
    measure_compilation,
    missing_compiler,
    probe_vector_instructions,
)
from hyperion.results import Row, ratio_estimate
from hyperion.units import GIB
from hyperion.workloads.reference_steps import KERNEL_OPERATORS, inference_operator_time

# Tolerance for the relative Frobenius error of the logits, by number format. It is three to four times the error of eager calls.
TOLERANCES = {"fp32": 2e-5, "fp16": 3e-3, "bf16": 2e-2}
_STEADY_CALLS = 5
_GRAPH_MODES = ("max-autotune", "reduce-overhead")  # modes that record a graph of all launches on a GPU
_DISTURBED, _TRIES = 0.1, 3
_LEFT_OUT = "left out: a cold compilation takes long, and neither the profile nor the call asks for this mode"


class CompilationOptions(Options):
    """Options for the `compilation` experiment.

    Args:
        models: models to compile, each with its compiler modes.
        samples: minimum number of timing samples for each mode.
        back_to_back: number of consecutive calls that are timed together as one sample.
        time_limit_s: seconds of timing for each mode.
        search: Inductor settings for the search for the fastest kernels, as {mode: {setting: value}}. Only some modes have such a
            search, for example "max-autotune". Modes without an entry use the default settings.
    """

    models: tuple[ModelSpec, ...]
    samples: int
    back_to_back: int
    time_limit_s: float
    search: dict[str, dict[str, str | bool]] = Field(default_factory=dict)


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed-up of each model in its last mode, then the time of a call in each mode.

    The reader of the chapter guesses the speed-up before the measurement.
    """
    forecasts = [_model_forecasts(context, spec) for spec in CompilationOptions.of(context).models]
    return [speedup for speedup, _ in forecasts] + [time for _, times in forecasts for time in times]


def _model_forecasts(context: Context, spec: ModelSpec) -> tuple[Forecast, list[Forecast]]:
    params = model_params(spec, context.seed)
    dtype, modes = spec.dtype, spec.modes
    gemm, stream = context.best_gemm(dtype), stream_ceiling(context.upstream)
    seconds: dict[str, float | None] = dict.fromkeys(modes)
    basis = NO_CEILINGS  # the same for all models
    if gemm is not None and gemm.value and stream is not None and stream.value:
        model = make_model(spec, "meta", context.seed)
        weight_bytes = model.weight_bytes
        # On meta, PyTorch would split attention into its operators, which no device does.
        with shapes_only(model.module):
            inputs = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for one in model.inputs]
            census = count_operations(lambda: model.module(*inputs))
        # A compiled model launches a library kernel for each product, and about one fused kernel between two products.
        launched = {EAGER: (census.operations, 0)} | {mode: (census.products, census.products) for mode in modes if mode != EAGER}
        product_s = _overhead_s(own_product_curve(context.upstream, context.device, dtype))
        kernel_s = _overhead_s(own_stream_curve(context.upstream, "copy"))
        operator_s, source = inference_operator_time(context)
        arithmetic = census.total_flops / (gemm.value * 1e12) + census.products * product_s
        for mode in modes:
            moved = census.other_bytes if mode == EAGER else _fused_bytes(census, weight_bytes)
            others = (census.operations - census.products) if mode == EAGER else census.products
            device_s = arithmetic + moved / (stream.value * 1e9) + others * kernel_s
            library, fused = launched[mode]
            recorded = mode in _GRAPH_MODES and context.device.kind != "cpu"
            host_s = 0.0 if recorded else (library + KERNEL_OPERATORS * fused) * operator_s
            # A GPU works while the host launches the next kernels. On a CPU, both use the same cores.
            seconds[mode] = device_s + host_s if context.device.kind == "cpu" else max(device_s, host_s)
        basis = (
            f"{spec.model}: {census.products} products at {gemm.value:.4g} TFLOPS, and {product_s * 1e6:.3g} us each; "
            f"everything else at the measured {stream.value:.4g} GB/s, operation by operation or in one pass between products, "
            f"and {kernel_s * 1e6:.3g} us each; the host takes {operator_s * 1e6:.3g} us for an operator ({source}), half of it "
            f"for a fused kernel, and nothing for a graph"
        )
    eager, last = seconds[EAGER], seconds[modes[-1]]
    speedup = None if eager is None or last is None else eager / last
    columns = {"dtype": dtype, "params": params, "basis": basis}
    times = [Forecast(m, "inference_time_s", seconds[m], **columns) for m in modes]
    return Forecast(modes[-1], "speedup", speedup, **columns), times


def _overhead_s(curve: Curve | None) -> float:
    """Return the part of a call's time that does not depend on its size, as the curve of chapter 1.1 shows it."""
    return 0.0 if curve is None else curve.overhead_s


def _fused_bytes(census: Census, weight_bytes: int) -> int:
    """Return the minimum number of bytes that element-wise operations must move.

    All element-wise operations between two matrix products are assumed to run as one fused kernel. This kernel reads the output
    of the first product and writes the input of the second product.
    """
    return min(census.other_bytes, max(census.product_bytes - weight_bytes, 0))


def run(context: Context, report: Report) -> Result:
    """Measure every mode of every model in a separate process.

    If the profile omits a mode, the row of this mode contains the reason instead of a value.
    """
    options = CompilationOptions.of(context)
    cells = [(spec, mode) for spec in options.models for mode in MODES]
    results, eager_times = [], {}
    with tempfile.TemporaryDirectory(prefix="hyperion-compiler-") as probe:
        for done, (spec, mode) in enumerate(cells):
            report(done, len(cells), f"{spec.model} {mode}")
            if mode not in spec.modes:
                results.append(_absent(context, options, spec, mode, _LEFT_OUT))
                continue
            settings = spec.model_dump(mode="json", exclude_defaults=True)
            params = {"spec": settings, "mode": mode, "probe": probe, "eager_s": eager_times.get(spec.model)}
            results.append(run_variant(context, _quiet, measure_mode, params))
            if mode == EAGER:
                # EAGER is the first mode, so its time is known before the compiled modes are measured.
                eager_times[spec.model] = next(r.value for r in results[-1].rows if r.metric == "inference_time_s")
    report(len(cells), len(cells), "done")
    return merged(results)


EXPERIMENT = Experiment(
    forecast, run, forecast_reads=("gemm", "bandwidth", "operator_cost", "launch_cost"), options=CompilationOptions
)


def measure_mode(context: Context, report: Report, spec: dict, mode: str, probe: str, eager_s: float | None = None) -> Result:
    """Measure one mode of one model. The process that runs this function measures nothing else.

    Args:
        context: context of the experiment.
        report: function that is called with the progress.
        spec: fields of a `ModelSpec`.
        mode: name of the compiler mode, or "eager".
        probe: folder shared by all modes. The compiler stores there which vector instructions the CPU supports.
        eager_s: time of an eager call in seconds, measured in another process. None if eager calls were not measured.
    """
    options, model_spec = CompilationOptions.of(context), ModelSpec.model_validate(spec, strict=False)
    supported, how = context.device.supports(model_spec.dtype)
    reason = f"unsupported: {how}" if not supported else ""
    if mode != EAGER and (missing := missing_compiler(context.device)):
        reason = f"unavailable: {missing}"
    if reason:
        return _absent(context, options, model_spec, mode, reason)
    try:
        model = make_model(model_spec, context.device.torch_device, context.seed, checkpoint_weights(model_spec))
        with _no_tf32(), _compiler_failures():
            return _Measurement(context, options, model_spec, model, mode, Path(probe), eager_s).result()
    except torch.OutOfMemoryError as error:
        return _absent(context, options, model_spec, mode, out_of_memory_reason(error))
    except _CompilerFailed as error:
        return _absent(context, options, model_spec, mode, f"the compiler failed: {error}")


class _CompilerFailed(Exception):
    """Raised if the compiler fails. The message is a single line."""


class _Measurement:
    """Measurement of one compiler mode of one model.

    First the model is compiled, then the memory of compiled calls is measured, and then compiled and eager calls are timed
    alternately.
    """

    def __init__(
        self,
        context: Context,
        options: CompilationOptions,
        spec: ModelSpec,
        model: CompiledModel,
        mode: str,
        probe: Path,
        eager_s: float | None,
    ):
        self.context, self.options, self.spec, self.model, self.mode = context, options, spec, model, mode
        self.device, self.dtype, self.params = context.device, spec.dtype, model.params
        self.compilation: Compilation | None = None
        with torch.inference_mode():
            self.call: Callable = model.module
            if mode != EAGER:
                probe_vector_instructions(self.device, probe)
                search = options.search.get(mode)
                self.call, self.compilation = measure_compilation(model.module, model.inputs, mode, self.device, search)
            # Clone the output, because with CUDA graphs the next call overwrites it.
            self.output = self.call(*model.inputs).clone()
            self.memory = self._memory_rows()
            # Read the memory before the timing, because the timing fills the allocator's cache with the tensors of eager calls.
            self.timings = self._undisturbed(eager_s)

    def result(self) -> Result:
        """Verify the outputs, and return all rows and samples."""
        own, *eager = self.timings
        verification = self._against_float64()
        rows = [self._time_row(own, verification), *self.memory, self._difference("float64", verification)]
        frames = [sample_frame(own, self.mode, self.dtype, self.params)]
        if self.compilation is None:
            rows += self._eager_rows()
        else:
            rows += self._compiled_rows(self.compilation, own, eager[0])
            frames.append(sample_frame(eager[0], f"eager beside {self.mode}", self.dtype, self.params))
        return Result(rows, pd.concat(frames, ignore_index=True))

    def _undisturbed(self, eager_s: float | None) -> list[Timing]:
        """Time the calls. Repeat the timing if other processes on the host have slowed it down.

        Eager calls should take as long in this process as in the process that measured them before. If they do not, the timing is
        repeated, and the timing with the smallest difference is returned. On a busy host, kernel launches can take twice as long.
        Eager calls then become slower, and the speed-up of a mode with fewer launches seems up to twice as large as it is.

        Args:
            eager_s: time of an eager call in seconds, measured in another process. None if eager calls were not measured.
        """
        tries, differences = [], []
        while len(tries) < _TRIES:
            tries.append(self._time())
            if eager_s is None:
                return tries[-1]
            differences = [abs(timings[-1].estimate.value / eager_s - 1) for timings in tries]
            if differences[-1] <= _DISTURBED:
                return tries[-1]
        return tries[differences.index(min(differences))]

    def _time(self) -> list[Timing]:
        """Time the calls once. For a compiled mode, compiled calls and eager calls alternate."""
        module, call, inputs = self.model.module, self.call, self.model.inputs
        functions = [lambda: call(*inputs)]
        if self.mode != EAGER:
            functions.append(lambda: module(*inputs))
        return time_interleaved(
            functions,
            self.device,
            cold=False,
            minimum_samples=self.options.samples,
            time_limit_s=self.options.time_limit_s,
            back_to_back=self.options.back_to_back,
        )

    def _memory_rows(self) -> list[Row]:
        """Return rows with the peak memory of calls after warm-up, and on an accelerator also the allocator's reserved memory."""
        gpu = self.device.kind != "cpu"
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()  # free memory that was used only during autotuning
        with PeakMemoryRegion(self.device) as region:
            for _ in range(_STEADY_CALLS):
                self.call(*self.model.inputs)
        columns = {"limit": self.model.weight_bytes / GIB, "limit_source": "the weights alone"}
        peak = region.peak
        rows = [self._row(peak.metric, peak.gib, value_reason=peak.reason, **columns)]
        if gpu:
            reserved = torch.cuda.max_memory_reserved(self.device.torch_device) / GIB
            rows.append(self._row("reserved_memory_gib", reserved, **columns))
        return rows

    def _time_row(self, timing: Timing, verification: Verification) -> Row:
        flops = count_operations(lambda: self.model.module(*self.model.inputs)).weight_flops
        limit_tflops, source = gemm_limit(self.device, self.dtype)
        return self._row(
            "inference_time_s",
            timing.estimate.value,
            more=self._clock(),
            limit=None if limit_tflops is None else flops / (limit_tflops * 1e12),
            limit_source=source if limit_tflops is None else f"products with weights at {source}",
            **timed_columns(timing.estimate, timing, verification),
        )

    def _eager_rows(self) -> list[Row]:
        """Return two rows about an eager call: its number of operators, and the share of its FLOPs in the dtype `self.dtype`."""
        census = count_operations(lambda: self.model.module(*self.model.inputs))
        share = census.share_in(self.dtype)
        declared = checked("the declared dtype", 1 - share, 0.0)
        what = {"what": "product FLOPs in the declared dtype"}
        return [
            self._row("count", census.operations, more={"what": "operations dispatched by a call"}),
            self._row("share", share, more=what, **declared),
        ]

    def _compiled_rows(self, compilation: Compilation, own: Timing, eager: Timing) -> list[Row]:
        difference = self._against_eager()
        ratio = ratio_estimate(own.samples_s, eager.samples_s)
        speedup = self._row(
            "speedup",
            ratio.value,
            more=self._clock(),
            limit_source="no limit: what eager calls lose to launches has no bound",
            **timed_columns(ratio, own, difference),
        )
        faster = ratio.ci_low > 1  # otherwise the speed-up is not significant
        saved = eager.estimate.value - own.estimate.value
        return [
            speedup,
            self._row(
                "break_even_calls",
                # After this number of calls, compiled calls have saved as much time as the compilation took.
                compilation.compile_time_s / saved if faster else None,
                value_reason="" if faster else "no time is saved for sure: the speed-up's interval reaches down to 1",
            ),
            self._row("compile_time_s", compilation.compile_time_s, more=self._circumstances(compilation)),
            *_compiler_rows(self._row, compilation),
            self._difference("eager", difference),
        ]

    def _circumstances(self, compilation: Compilation) -> dict:
        search = self.options.search.get(self.mode)
        return {
            "cache": "cold",
            "first_calls": len(compilation.first_calls_s),
            "cuda_graphs": compilation.cuda_graphs,
            "search": ", ".join(f"{name}={value}" for name, value in search.items()) if search else "as the mode has it",
        }

    def _clock(self) -> dict:
        return {"clock": f"wall, {self.options.back_to_back} calls in a row"}

    def _against_float64(self) -> Verification:
        with torch.inference_mode():
            reference = reference_output(self.spec, self.model)
        return self._verified("float64 slice", self.output[: len(reference)].cpu(), reference)

    def _against_eager(self) -> Verification:
        with torch.inference_mode():
            return self._verified("eager output", self.output, self.model.module(*self.model.inputs))

    def _verified(self, name: str, output: torch.Tensor, reference: torch.Tensor) -> Verification:
        # An output with another dtype always fails the check.
        declared = self.output.dtype is FORMATS[self.dtype].storage
        # NaN fails every check.
        error = relative_error(output, reference) if declared else float("nan")
        return Verification(name, error, TOLERANCES[self.dtype])

    def _difference(self, origin: str, verification: Verification) -> Row:
        columns = check_columns(verification)
        return self._row("relative_difference", verification.error, more={"from": origin}, **columns)

    def _row(self, metric: str, value: float | None, more: dict | None = None, **columns) -> Row:
        params = self.params | (more or {})
        return self.context.row(self.mode, metric, value, dtype=self.dtype, params=params, **columns)


def _compiler_rows(row: Callable[..., Row], compilation: Compilation) -> list[Row]:
    """Return rows with the numbers of graph breaks, graphs, recompilations, and calls of each kind of kernel.

    The check fails if no graph was captured.
    """
    reasons = "; ".join(f"{reason} ({times} times)" for reason, times in compilation.break_reasons.items())
    captured = checked("something was captured", float(compilation.graphs < 1), 0.0)
    counts = {f"calls of {kind} kernels": number for kind, number in compilation.kernel_calls.items()}
    return [
        row("graph_breaks", compilation.graph_breaks, more={"reasons": reasons or "none"}),
        row("count", compilation.graphs, more={"what": "graphs captured"}, **captured),
        row("count", len(compilation.recompiles), more={"what": "recompilations"}),
        *(row("count", number, more={"what": what}) for what, number in counts.items()),
    ]


def _absent(context: Context, options: CompilationOptions, spec: ModelSpec, mode: str, reason: str) -> Result:
    params = model_params(spec, context.seed) | {"clock": f"wall, {options.back_to_back} calls in a row"}
    row = context.absent_row(mode, "inference_time_s", reason, dtype=spec.dtype, params=params)
    return Result([row], pd.DataFrame())


@contextmanager
def _no_tf32():
    """Context manager that disables TF32 for float32 convolutions. For matrix products, TF32 is off by default.

    PyTorch has two settings for TF32, an older and a newer one. This context uses the older one. Inductor reads the older setting
    while it tunes convolutions, and PyTorch raises an error if both settings are used.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def _compiler_failures():
    """Context manager that converts compiler errors to `_CompilerFailed`. It works without an import of the compiler."""
    try:
        yield
    except Exception as error:
        compiler = sys.modules.get("torch._dynamo.exc")
        if compiler is not None and isinstance(error, compiler.TorchDynamoException):
            raise _CompilerFailed(str(error).strip().splitlines()[0]) from error
        raise


def _quiet(done: int, total: int, note: str = "") -> None:
    """Ignore progress reports, so that the progress within one compiler mode is not shown."""
