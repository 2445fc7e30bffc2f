"""What does torch.compile bring, and what does it cost? Each mode of each model in a process of its own, beside eager."""

import gc
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Result
from hyperion.chapter.rows import gemm_limit, out_of_memory_reason, sample_frame, timed_columns
from hyperion.chapter.variants import Report, merged, run_variant
from hyperion.experiments.compilation.compilation_forecast import forecast
from hyperion.experiments.compilation.compilation_subjects import (
    Subject,
    given_weights,
    make_subject,
    reference_output,
    subject_params,
)
from hyperion.measure import FORMATS, PeakMemoryRegion, Timing, Verification, relative_error, time_interleaved
from hyperion.measure.clock.census import count_operations
from hyperion.measure.memory_use.peak import GIB
from hyperion.measure.steps.compilation import (
    EAGER,
    MODES,
    Compilation,
    measure_compilation,
    missing_compiler,
    probe_vector_instructions,
)
from hyperion.results import Row, ratio_estimate

# Relative Frobenius error of the logits: three to four times what eager has against float64 in either kind of model.
TOLERANCES = {"fp32": 2e-5, "fp16": 3e-3, "bf16": 2e-2}
_STEADY_CALLS = 5
_DISTURBED, _TRIES = 0.1, 3
_LEFT_OUT = "left out: a cold compilation takes long, and neither the profile nor the call asks for this mode"


def run(context: Context, report: Report) -> Result:
    """Every mode of every model, each in a process of its own; a mode that the profile leaves out is a row that says so."""
    cells = [(spec, mode) for spec in context.sizes["models"] for mode in MODES]
    results, eager_times = [], {}
    with tempfile.TemporaryDirectory(prefix="hyperion-compiler-") as probe:
        for done, (spec, mode) in enumerate(cells):
            report(done, len(cells), f"{spec['model']} {mode}")
            if mode not in spec["modes"]:
                results.append(_absent(context, spec, mode, _LEFT_OUT))
                continue
            params = {"spec": spec, "mode": mode, "probe": probe, "eager_s": eager_times.get(spec["model"])}
            results.append(run_variant(context, _quiet, measure_mode, params))
            if mode == EAGER:
                eager_times[spec["model"]] = next(r.value for r in results[-1].rows if r.metric == "inference_time_s")
    report(len(cells), len(cells), "done")
    return merged(results)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("gemm", "bandwidth"))


def measure_mode(context: Context, report: Report, spec: dict, mode: str, probe: str, eager_s: float | None = None) -> Result:
    """One mode of one model, nothing else alive in this process.

    Args:
        spec: see `make_subject`; `checkpoint` names a file of weights.
        probe: folder in which the compiler keeps what it found out about the machine.
        eager_s: seconds of an eager call in a process of its own, where that was measured.
    """
    supported, how = context.device.supports(spec["dtype"])
    reason = f"unsupported: {how}" if not supported else ""
    if mode != EAGER and (missing := missing_compiler(context.device)):
        reason = f"unavailable: {missing}"
    if reason:
        return _absent(context, spec, mode, reason)
    try:
        subject = make_subject(spec, context.device.torch_device, context.seed, given_weights(spec))
        with _no_tf32(), _compiler_failures():
            return _Measurement(context, spec, subject, mode, Path(probe), eager_s).result()
    except torch.OutOfMemoryError as error:
        return _absent(context, spec, mode, out_of_memory_reason(error))
    except _CompilerFailed as error:
        return _absent(context, spec, mode, f"the compiler failed: {error}")


class _CompilerFailed(Exception):
    """What the compiler said, in one line."""


class _Measurement:
    """One mode of one model: compiled, its memory read while it is alone, then timed in turn with eager calls."""

    def __init__(self, context: Context, spec: dict, subject: Subject, mode: str, probe: Path, eager_s: float | None):
        self.context, self.spec, self.subject, self.mode = context, spec, subject, mode
        self.device, self.dtype, self.params = context.device, spec["dtype"], subject.params
        self.compilation: Compilation | None = None
        with torch.inference_mode():
            self.call: Callable = subject.module
            if mode != EAGER:
                probe_vector_instructions(self.device, probe)
                search = context.sizes.get("search", {}).get(mode)
                self.call, self.compilation = measure_compilation(subject.module, subject.inputs, mode, self.device, search)
            self.output = self.call(*subject.inputs).clone()
            self.memory = self._memory_rows()
            self.timings = self._undisturbed(eager_s)

    def result(self) -> Result:
        """All rows and samples."""
        own, *beside = self.timings
        verification = self._against_float64()
        rows = [self._time_row(own, verification), *self.memory, self._difference("float64", verification)]
        frames = [sample_frame(own, self.mode, self.dtype, self.params)]
        if self.compilation is None:
            rows += self._eager_rows()
        else:
            rows += self._compiled_rows(self.compilation, own, beside[0])
            frames.append(sample_frame(beside[0], f"eager beside {self.mode}", self.dtype, self.params))
        return Result(rows, pd.concat(frames, ignore_index=True))

    def _undisturbed(self, eager_s: float | None) -> list[Timing]:
        """The timings whose eager calls come nearest to those of a process of their own, which all modes share.

        A host that is busy with something else doubles what launches cost, and with it the speed-up of what saves them.
        """
        tries = []
        while len(tries) < _TRIES:
            tries.append(self._time())
            if eager_s is None or _apart(tries[-1], eager_s) <= _DISTURBED:
                return tries[-1]
        return min(tries, key=lambda timings: _apart(timings, eager_s))

    def _time(self) -> list[Timing]:
        """Seconds of a call, and of an eager call in turn with it where this is not eager itself."""
        module, call, inputs = self.subject.module, self.call, self.subject.inputs
        functions = [lambda: call(*inputs)]
        if self.mode != EAGER:
            functions.append(lambda: module(*inputs))
        sizes = self.context.sizes
        return time_interleaved(
            functions,
            self.device,
            cold=False,
            minimum_samples=sizes["samples"],
            time_limit_s=sizes["time_limit_s"],
            back_to_back=sizes["back_to_back"],
        )

    def _memory_rows(self) -> list[Row]:
        """Most memory during settled calls, and on an accelerator what its allocator holds for them."""
        gpu = self.device.kind != "cpu"
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()  # what autotuning left behind is not what calls need
        with PeakMemoryRegion(self.device) as region:
            for _ in range(_STEADY_CALLS):
                self.call(*self.subject.inputs)
        columns = {"limit": self.subject.weight_bytes / GIB, "limit_source": "the weights alone"}
        peak = region.peak
        rows = [self._row(peak.metric, peak.gib, value_reason=peak.reason, **columns)]
        if gpu:
            held = torch.cuda.max_memory_reserved(self.device.torch_device) / GIB
            rows.append(self._row("reserved_memory_gib", held, **columns))
        return rows

    def _time_row(self, timing: Timing, verification: Verification) -> Row:
        flops = count_operations(lambda: self.subject.module(*self.subject.inputs)).weight_flops
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
        """What an eager call dispatches, and whether it computes in the dtype that its rows name."""
        census = count_operations(lambda: self.subject.module(*self.subject.inputs))
        share = census.share_in(self.dtype)
        declared = {"check": "the declared dtype", "check_error": 1 - share, "check_tolerance": 0.0}
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
        faster = ratio.ci_low > 1  # else nothing is known to be saved
        saved = eager.estimate.value - own.estimate.value
        return [
            speedup,
            self._row(
                "break_even_calls",
                compilation.compile_time_s / saved if faster else None,
                value_reason="" if faster else "no time is saved for sure: the speed-up's interval reaches down to 1",
            ),
            self._row("compile_time_s", compilation.compile_time_s, more=self._circumstances(compilation)),
            *_told_by_the_compiler(self._row, compilation),
            self._difference("eager", difference),
        ]

    def _circumstances(self, compilation: Compilation) -> dict:
        search = self.context.sizes.get("search", {}).get(self.mode)
        return {
            "cache": "cold",
            "first_calls": len(compilation.first_calls_s),
            "cuda_graphs": compilation.cuda_graphs,
            "search": ", ".join(f"{name}={value}" for name, value in search.items()) if search else "as the mode has it",
        }

    def _clock(self) -> dict:
        return {"clock": f"wall, {self.context.sizes['back_to_back']} calls in a row"}

    def _against_float64(self) -> Verification:
        with torch.inference_mode():
            reference = reference_output(self.spec, self.subject)
        return self._verified("float64 slice", self.output[: len(reference)].cpu(), reference)

    def _against_eager(self) -> Verification:
        with torch.inference_mode():
            return self._verified("eager output", self.output, self.subject.module(*self.subject.inputs))

    def _verified(self, name: str, output: torch.Tensor, reference: torch.Tensor) -> Verification:
        # An output of another dtype is no output of this variant, however near it comes.
        declared = self.output.dtype is FORMATS[self.dtype].storage
        error = relative_error(output, reference) if declared else float("nan")
        return Verification(name, error, TOLERANCES[self.dtype])

    def _difference(self, origin: str, verification: Verification) -> Row:
        columns = {"check": verification.name, "check_error": verification.error, "check_tolerance": verification.tolerance}
        return self._row("relative_difference", verification.error, more={"from": origin}, **columns)

    def _row(self, metric: str, value: float | None, more: dict | None = None, **columns) -> Row:
        params = self.params | (more or {})
        return self.context.row(self.mode, metric, value, dtype=self.dtype, params=params, **columns)


def _apart(timings: list[Timing], eager_s: float) -> float:
    """How far, relative, the eager calls that were made in turn lie from those alone."""
    return abs(timings[-1].estimate.value / eager_s - 1)


def _told_by_the_compiler(row: Callable[..., Row], compilation: Compilation) -> list[Row]:
    """Breaks, graphs, recompilations and calls of the generated code; a function of which no graph was captured is refused."""
    reasons = "; ".join(f"{reason} ({times} times)" for reason, times in compilation.break_reasons.items())
    captured = {"check": "something was captured", "check_error": float(compilation.graphs < 1), "check_tolerance": 0.0}
    counts = {f"calls of {kind} kernels": number for kind, number in compilation.kernel_calls.items()}
    return [
        row("graph_breaks", compilation.graph_breaks, more={"reasons": reasons or "none"}),
        row("count", compilation.graphs, more={"what": "graphs captured"}, **captured),
        row("count", len(compilation.recompiles), more={"what": "recompilations"}),
        *(row("count", number, more={"what": what}) for what, number in counts.items()),
    ]


def _absent(context: Context, spec: dict, mode: str, reason: str) -> Result:
    params = subject_params(spec, context.seed) | {"clock": f"wall, {context.sizes['back_to_back']} calls in a row"}
    row = context.row(mode, "inference_time_s", None, dtype=spec["dtype"], params=params, value_reason=reason)
    return Result([row], pd.DataFrame())


@contextmanager
def _no_tf32():
    """float32 convolutions compute in float32; matrix products do so by default.

    The older of PyTorch's two switches: Inductor reads it while it tunes convolutions, and refuses a mixture.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def _compiler_failures():
    """Errors of the compiler as one type, without importing the compiler, which takes seconds, for an eager call."""
    try:
        yield
    except Exception as error:
        compiler = sys.modules.get("torch._dynamo.exc")
        if compiler is not None and isinstance(error, compiler.TorchDynamoException):
            raise _CompilerFailed(str(error).strip().splitlines()[0]) from error
        raise


def _quiet(done: int, total: int, note: str = "") -> None:
    """Within a mode there is nothing to report."""
