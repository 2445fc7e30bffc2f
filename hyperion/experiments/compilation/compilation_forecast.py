"""What compilation should bring, from ceilings and shapes alone: a call without launches, its element-wise work fused or not."""

from hyperion.chapter.context import Context, Forecast
from hyperion.chapter.rows import stream_ceiling
from hyperion.experiments.compilation.compilation_subjects import make_subject, subject_params
from hyperion.measure.clock.census import Census, count_operations
from hyperion.measure.steps.compilation import EAGER


def forecast(context: Context) -> list[Forecast]:
    """For each model the speed-up of its last mode, which the reader is asked to guess, then the time of each mode."""
    forecasts = [_of_model(context, spec) for spec in context.sizes["models"]]
    return [speedup for speedup, _ in forecasts] + [time for _, times in forecasts for time in times]


def _of_model(context: Context, spec: dict) -> tuple[Forecast, list[Forecast]]:
    params = subject_params(spec, context.seed)
    dtype, modes = spec["dtype"], spec["modes"]
    gemm, stream = context.best_upstream("gemm_tflops", dtype), stream_ceiling(context.upstream)
    seconds: dict[str, float | None] = dict.fromkeys(modes)
    basis = "no estimate: this run has measured no ceilings (01_hardware_exploration)"  # for all models alike
    if gemm is not None and stream is not None:
        subject = make_subject(spec, "meta", context.seed)
        census = count_operations(lambda: subject.module(*subject.inputs))
        products = census.total_flops / (gemm.value * 1e12)
        apart = census.other_bytes / (stream.value * 1e9)
        fused = _fused_bytes(census, subject.weight_bytes) / (stream.value * 1e9)
        seconds = {mode: products + (apart if mode == EAGER else fused) for mode in modes}
        basis = (
            f"{spec['model']}: {products * 1e3:.3g} ms of products at the measured {gemm.value:.4g} TFLOPS; "
            f"everything else moves its operands at the measured {stream.value:.4g} GB/s: "
            f"{apart * 1e3:.3g} ms operation by operation, {fused * 1e3:.3g} ms in one pass "
            f"between products; launching its {census.operations} operations is free"
        )
    speedup = None if None in seconds.values() else seconds[EAGER] / seconds[modes[-1]]
    columns = {"dtype": dtype, "params": params, "basis": basis}
    times = [Forecast(variant=m, metric="inference_time_s", estimate=seconds[m], **columns) for m in modes]
    return Forecast(variant=modes[-1], metric="speedup", estimate=speedup, **columns), times


def _fused_bytes(census: Census, weight_bytes: int) -> int:
    """What element-wise work moves at least, when it is one pass from the output of a product to the input of the next."""
    return min(census.other_bytes, max(census.product_bytes - weight_bytes, 0))
