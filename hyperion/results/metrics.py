"""The metric registry: each metric's name, unit, direction, and what a row of it must carry. One table, nothing else."""

from dataclasses import dataclass
from typing import Literal

from hyperion.errors import HyperionError


@dataclass(frozen=True)
class Metric:
    """What a metric means and what a row must bring along to be stored.

    Args:
        name: the field's term, units included where they are not obvious.
        unit: the unit of `value`, `limit`, `predicted` and the confidence interval.
        direction: which way is better. A limit bounds the good side: a maximum for "higher", a minimum for "lower".
        needs_limit: the row states a limit, or in `limit_source` the reason why it has none.
        needs_interval: the row states n and a 95 % confidence interval of the value.
        needs_check: the row names a check with its error and tolerance.
        meaning: one line for tables and reports.
    """

    name: str
    unit: str
    direction: Literal["higher", "lower", "none"]
    meaning: str
    needs_limit: bool = False
    needs_interval: bool = False
    needs_check: bool = False


_METRICS = (
    Metric("gemm_tflops", "TFLOPS", "higher", "matrix product rate, 2·M·N·K over the median time", True, True, True),
    Metric("taf_tflops", "TFLOPS", "higher", "products of one model, timed alone: FLOPs over all times", True, True, True),
    Metric("bandwidth_gb_s", "GB/s", "higher", "bytes read and written over the median time", True, True, True),
    Metric("energy_j_per_tflop", "J/TFLOP", "lower", "median power x median time for 10¹² operations", False, True),
    Metric("energy_j_per_gb", "J/GB", "lower", "median power x median time for 10⁹ bytes", False, True),
    Metric("launch_time_s", "s", "lower", "enqueuing one trivially small kernel, or its turn in a graph", False, True, True),
    Metric("operator_time_s", "s", "lower", "host time for one operator of an eager training step", False, True, True),
    Metric("step_overhead_s", "s", "lower", "host time of an eager training step beyond its operators", False, True, True),
    Metric("block_time_s", "s", "lower", "host time of one more compiled block, forward and backward", False, True, True),
    Metric("worthwhile_bytes", "B", "lower", "traffic of a copy that works as long as its launch takes", False, True),
    Metric("largest_allocation_gib", "GiB", "higher", "largest single allocation granted, by bisection", True, False, True),
    Metric("cache_bytes", "B", "none", "capacity of one cache of a level, as the system tells it"),
    Metric("speedup", "ratio", "higher", "interleaved A/B ratio of times, above 1 where A is faster", True, True),
    Metric("rate_ratio", "ratio", "higher", "ratio of rates measured one after the other, a drift included", True, True),
    Metric("roofline_ridge_flop_per_byte", "FLOP/byte", "none", "arithmetic intensity where the two measured roofs meet"),
    Metric("call_time_s", "s", "lower", "one call of a reader's own function, median", True, True),
    Metric("flops", "FLOP", "none", "products, convolutions and attention of one call, by dispatch; a multiply-add is 2"),
    Metric("step_time_s", "s", "lower", "one optimizer step, median", True, True),
    Metric("tokens_per_s", "tokens/s", "higher", "tokens delivered by the loader over training time, no padding", True),
    Metric("images_per_s", "images/s", "higher", "images delivered by the loader over training time", True),
    Metric("tokenizer_tokens_per_s", "tokens/s", "higher", "tokens written to a file over the median time", True, True, True),
    Metric("loader_samples_per_s", "samples/s", "higher", "samples of a batch over the median time it takes", True, True, True),
    Metric("samples_per_s", "samples/s", "higher", "samples of a batch over the time of one step", True),
    Metric("batch_efficiency", "fraction", "higher", "samples/s at a batch over those at the best batch", True, True),
    Metric("forward_time_s", "s", "lower", "forward pass of one step, loss included, median", False, True),
    Metric("backward_time_s", "s", "lower", "backward pass of one step, median", False, True),
    Metric("optimizer_time_s", "s", "lower", "update of one step, gradients cleared, median", False, True),
    Metric("inference_time_s", "s", "lower", "forward pass of one batch without gradients, median", True, True),
    Metric("compile_time_s", "s", "lower", "first calls of a compiled function, until nothing is compiled any more"),
    Metric("graph_breaks", "items", "lower", "places where the compiler had to fall back to Python"),
    Metric("break_even_calls", "calls", "lower", "calls after which a compiled function has paid for its compilation"),
    Metric("algbw_gb_s", "GB/s", "higher", "bytes of a collective over its median time", False, True, True),
    Metric("busbw_gb_s", "GB/s", "higher", "bytes each link must carry for a collective over its time", True, True, True),
    Metric("collective_time_s", "s", "lower", "one collective, the slowest rank, median", False, True, True),
    Metric("latency_s", "s", "lower", "a message without bytes: intercept of a fit over the sizes", False, True),
    Metric("asymptotic_busbw_gb_s", "GB/s", "higher", "bus bandwidth of endless messages: slope of that fit", False, True),
    Metric("fit_deviation", "fraction", "lower", "largest relative distance of a measured time from a fit"),
    Metric("half_busbw_bytes", "B", "lower", "message size that reaches half of the best bus bandwidth, interpolated"),
    Metric("recommended_bytes", "B", "lower", "message size with nine tenths of the rate of that fit", False, True),
    Metric("overlap_share", "fraction", "higher", "time saved by doing two at once, over the shorter one", False, True, True),
    Metric("scaling_efficiency", "fraction", "higher", "speed per device over the speed of one device alone", True, True),
    Metric("communication_share", "fraction", "lower", "share of the step that vanishes in a group of one", False, True),
    Metric("detection_time_s", "s", "lower", "from the death of a rank to the launcher's error", True, False, True),
    Metric("steps_lost", "steps", "lower", "optimizer steps done again after a fault, the most of any trial", needs_check=True),
    Metric("stored_gb", "GB", "lower", "bytes of files on disk"),
    Metric("relative_difference", "fraction", "lower", "distance from a reference, over it; see its check", needs_check=True),
    Metric("mfu", "fraction", "higher", "model FLOPs over time, divided by the device's peak for the dtype", True),
    Metric("mfu_maf", "fraction", "higher", "model FLOPs over time, divided by the run's fastest product of the dtype", True),
    Metric("peak_memory_gib", "GiB", "lower", "most device memory allocated by tensors at once", True),
    Metric("allocated_memory_gib", "GiB", "lower", "device memory held by tensors at this moment"),
    Metric("reserved_memory_gib", "GiB", "lower", "most device memory the allocator held, pools of captured graphs included"),
    Metric("tensor_memory_gib", "GiB", "lower", "most bytes of tensors alive at once, counted by dispatch, on any device"),
    Metric("peak_rss_gib", "GiB", "lower", "most resident host memory of the process", True),
    Metric("sample_memory_mib", "MiB", "lower", "memory that one more sample in the batch takes, slope of the peaks"),
    Metric("training_loss", "nats", "lower", "mean training loss of the epoch", True),
    Metric("validation_loss", "nats", "lower", "mean loss per predicted unit on the held-out split", True),
    Metric("perplexity_token", "perplexity", "lower", "exp of the mean negative log-likelihood per token", True, True),
    Metric("perplexity_word", "perplexity", "lower", "exp of the total negative log-likelihood per word and <eos>", True, True),
    Metric("bits_per_byte", "bits", "lower", "total negative log-likelihood per byte of UTF-8", True, True),
    Metric("perplexity_token_sd", "perplexity", "lower", "standard deviation of that perplexity from seed to seed"),
    Metric("perplexity_word_sd", "perplexity", "lower", "standard deviation of that perplexity from seed to seed"),
    Metric("bits_per_byte_sd", "bits", "lower", "standard deviation of the bits per byte from seed to seed"),
    Metric("accuracy", "fraction", "higher", "share of held-out images classified correctly", True, True),
    Metric("accuracy_sd", "fraction", "lower", "standard deviation of the accuracy from seed to seed"),
    Metric("time_to_accuracy_s", "s", "lower", "training time until the held-out accuracy reached a stated one", True),
    Metric("loss_scale", "1", "none", "factor on the loss that keeps fp16 gradients from vanishing"),
    Metric("learning_rate", "1", "none", "learning rate of the epoch's last step"),
    Metric("excess_loss_nats", "nats", "lower", "loss above the floor that a perfect model reaches", True),
    Metric("count", "items", "none", "items counted, verified where an expected count is known"),
    Metric("share", "fraction", "none", "share of a whole"),
    Metric("channel_mean", "fraction", "none", "mean pixel value of a colour channel, 0 to 1", needs_check=True),
)

REGISTRY: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


def metric_named(name: str) -> Metric:
    """The registered metric.

    Raises:
        HyperionError: no such metric; the message lists the close ones.
    """
    if name not in REGISTRY:
        raise HyperionError(
            f"unknown metric {name!r}",
            where="hyperion/results/metrics.py",
            next_step=f"use one of {', '.join(sorted(REGISTRY))}, or register the new metric with its unit and direction",
        )
    return REGISTRY[name]
