"""Predict the weak-scaling efficiency from the FLOPs of a step and the bytes that each rank sends."""

from dataclasses import replace

from hyperion.chapter.context import Context, Forecast
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.experiments.scaling.scaled_training import ScaledTraining, lm_config
from hyperion.models import (
    flops_per_image,
    flops_per_token,
    llama_flops_per_token,
    llama_parameter_count,
    parameter_count,
    random_llama_shape,
    resnet18,
)
from hyperion.training.lora import ATTENTION
from hyperion.workloads.fine_tuning import RANK

# Share of the computation that can hide communication. DDP overlaps its all-reduce only with the backward pass. FSDP2 overlaps
# its all-gathers with the whole step.
_HIDING = {"ddp": 2 / 3, "fsdp": 1.0}


def efficiency_forecast(context: Context, training: ScaledTraining, ranks: int, dtype: str) -> Forecast:
    """Predict the weak-scaling efficiency of one workload on `ranks` devices.

    The step time on several devices is the computation time plus the communication time that computation cannot hide.
    """
    gemm, busbw = context.best_gemm(dtype), _best_busbw(context)
    estimate, basis = None, "no estimate: this run has not measured products and collectives (chapters 1.1 and 1.3)"
    if gemm and gemm.value and busbw:
        flops, sent = flops_and_bytes(training, ranks, dtype)
        computing = flops * training.items("weak", ranks) / ranks / (gemm.value * 1e12)
        exchanging = sent / (busbw * 1e9)
        exposed = max(0.0, exchanging - _HIDING[training.strategy] * computing)
        estimate = computing / (computing + exposed)
        basis = (
            f"{computing * 1e3:.3g} ms of products at the measured {gemm.value:.4g} TFLOPS; {sent / 1e9:.3g} GB per rank at the "
            f"measured {busbw:.4g} GB/s take {exchanging * 1e3:.3g} ms, of which {exposed * 1e3:.3g} ms cannot be hidden"
        )
    return Forecast(training.name, "scaling_efficiency", estimate, basis, dtype=dtype, params=training.params("weak", ranks))


def flops_and_bytes(training: ScaledTraining, ranks: int, dtype: str) -> tuple[float, float]:
    """Return (FLOPs per token or image, bytes that each rank sends in a step)."""
    if training.item == "image":
        flops = flops_per_image(CLASS_COUNT, training.width).forward_backward
        parameters = reduced = parameter_count(resnet18(CLASS_COUNT, training.width))
        kept = 0  # not estimated, because its blocks differ in size
    elif training.lora:
        config = random_llama_shape(training.model, training.vocabulary)
        flops = llama_flops_per_token(config, training.sequence_length, RANK, ATTENTION).forward_backward
        parameters, reduced = llama_parameter_count(config), 0  # of the gradients, only those of the adapters are reduced
        layers = config.num_hidden_layers
        kept = parameters - (layers - 1) * (llama_parameter_count(replace(config, num_hidden_layers=layers + 1)) - parameters)
    else:
        config = lm_config(training)
        flops = flops_per_token(config, training.sequence_length).forward_backward
        parameters = reduced = config.parameter_count
        layers = config.layers
        kept = parameters - (layers - 1) * (replace(config, layers=layers + 1).parameter_count - parameters)
    # With the ring algorithm, each rank sends (N - 1) / N of the tensor in a reduce-scatter, and as much in an all-gather. An
    # all-reduce consists of both.
    passes = (ranks - 1) / ranks
    if training.strategy == "ddp":
        return flops, 2 * passes * 4 * reduced  # all-reduce of float32 gradients
    gathered = 2 if dtype == "bf16" else 4
    # All-gather in the forward and backward pass, then reduce-scatter. The last block and the parameters outside of the blocks
    # stay gathered between the two passes (see `parallelize`).
    return flops, passes * (gathered * (2 * parameters - kept) + 4 * reduced)


def _best_busbw(context: Context) -> float | None:
    rates = [r.value for r in context.upstream if r.metric == "busbw_gb_s" and r.variant == "all_reduce" and r.value]
    return max(rates, default=None)
