"""How well a training should scale: the bytes its ranks exchange in a step, at the rates that chapters 1.1 and 1.3 measured."""

from hyperion.chapter.context import Context, Forecast
from hyperion.experiments.scaling.scaling_workloads import Workload, lm_config
from hyperion.models import flops_per_token, llama_flops_per_token, llama_parameter_count, random_llama_config
from hyperion.parallel.lora import ATTENTION

_RANK = 16  # of the adapters
# DDP can hide its all-reduce behind the backward pass only, two thirds of the step; FSDP2 its gathers behind all of it.
_HIDING = {"ddp": 2 / 3, "fsdp": 1.0}


def efficiency_forecast(context: Context, workload: Workload, ranks: int, dtype: str) -> Forecast:
    """Weak-scaling efficiency on `ranks` devices: the part of the exchange that computation cannot hide costs time."""
    params = {"model": workload.model, "strategy": workload.strategy, "mode": "weak", "ranks": ranks}
    tokens = workload.batch("weak", ranks) * workload.sequence_length
    gemm, busbw = context.best_upstream("gemm_tflops", dtype), _best_busbw(context)
    estimate, basis = None, "no estimate: this run has not measured products and collectives (chapters 1.1 and 1.3)"
    if ranks == 1:
        basis = "no estimate: this machine has one device"
    elif gemm and busbw:
        flops, sent = _work(workload, ranks, dtype)
        computing = flops * tokens / ranks / (gemm.value * 1e12)
        exchanging = sent / (busbw * 1e9)
        exposed = max(0.0, exchanging - _HIDING[workload.strategy] * computing)
        estimate = computing / (computing + exposed)
        basis = (
            f"{computing * 1e3:.3g} ms of products at the measured {gemm.value:.4g} TFLOPS; {sent / 1e9:.3g} GB a rank at the "
            f"measured {busbw:.4g} GB/s take {exchanging * 1e3:.3g} ms, of which {exposed * 1e3:.3g} ms cannot be hidden"
        )
    return Forecast(
        variant=workload.name,
        metric="scaling_efficiency",
        estimate=estimate,
        basis=basis,
        dtype=dtype,
        params=params | {"tokens": tokens},
    )


def _best_busbw(context: Context) -> float | None:
    rates = [r.value for r in context.upstream if r.metric == "busbw_gb_s" and r.variant == "all_reduce" and r.value]
    return max(rates, default=None)


def _work(workload: Workload, ranks: int, dtype: str) -> tuple[float, float]:
    """(FLOPs of a token, bytes that each rank's links carry in a step)."""
    if workload.lora:
        config = random_llama_config(workload.model, workload.vocabulary)
        flops = llama_flops_per_token(config, workload.sequence_length, _RANK, ATTENTION).forward_backward
        parameters, reduced = llama_parameter_count(config), 0  # gradients of the adapters alone
    else:
        config = lm_config(workload)
        flops = flops_per_token(config, workload.sequence_length).forward_backward
        parameters = reduced = config.parameter_count
    passes = (ranks - 1) / ranks
    if workload.strategy == "ddp":
        return flops, 2 * passes * 4 * reduced  # all-reduce of float32 gradients
    gathered = 2 if dtype == "bf16" else 4
    return flops, passes * (2 * gathered * parameters + 4 * reduced)  # gathered forward and backward, then scattered
