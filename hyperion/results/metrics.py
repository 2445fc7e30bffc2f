"""Metrics: the name, the unit and the direction of each metric, and the columns that its rows must fill.

The built-in metrics are in one table below. A package adds its own metrics with `register_metric`. A run stores the definitions
of the added metrics that its rows use, so that it can also be read on a machine where the package is not installed.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from hyperion.errors import HyperionError, nearest_first
from hyperion.untrusted import printable

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")
_UNIT = re.compile(r"[\w%°/·.^*() -]{1,40}")
_LONGEST_MEANING = 300


@dataclass(frozen=True)
class Metric:
    """The definition of a metric: what it means, and which columns its rows must fill.

    Args:
        name: the common term for the quantity, in lower case, with the unit if the unit is not obvious.
        unit: the unit of the columns `value`, `limit`, `predicted`, `ci_low` and `ci_high`.
        direction: "higher" or "lower" if a higher or a lower value is better, else "none". A limit is the best possible value: a
            maximum for "higher", a minimum for "lower".
        meaning: one-line description for tables and reports, at most 300 characters.
        needs_limit: if True, a row must state a limit, or it must state in `limit_source` why it has no limit.
        needs_interval: if True, a row must state n and a 95 % confidence interval of the value.
        needs_check: if True, a row must name a check with its error and its tolerance.

    Raises:
        HyperionError: the name, the unit, the direction or the meaning does not have the required form.
    """

    name: str
    unit: str
    direction: Literal["higher", "lower", "none"]
    meaning: str
    needs_limit: bool = False
    needs_interval: bool = False
    needs_check: bool = False

    def __post_init__(self):
        for field, form, allowed in (
            ("name", _NAME, "a lower-case letter, then lower-case letters, digits and '_', 80 at most"),
            ("unit", _UNIT, "1 to 40 letters, digits, spaces and % ° / · . ^ * ( ) - _, '1' for a number without unit"),
        ):
            text = getattr(self, field)
            if not isinstance(text, str) or not form.fullmatch(text):
                raise self._fault(f"{field} is {text!r:.100}", f"use {allowed}")
        if self.direction not in ("higher", "lower", "none"):
            raise self._fault(
                f"direction is {self.direction!r:.100}, which is not a possible value", "use 'higher', 'lower' or 'none'"
            )
        text = self.meaning
        one_line = isinstance(text, str) and 0 < len(text) <= _LONGEST_MEANING and "\n" not in text and printable(text) == text
        if not one_line:
            raise self._fault(f"meaning is {text!r:.100}", f"use one line of at most {_LONGEST_MEANING} characters")

    def _fault(self, what: str, next_step: str) -> HyperionError:
        return HyperionError(f"metric {what}", where=f"definition of metric {self.name!r:.100}", next_step=next_step)


_METRICS = (
    Metric("gemm_tflops", "TFLOPS", "higher", "matrix product rate, 2·M·N·K over the median time", True, True, True),
    Metric(
        "attention_tflops",
        "TFLOPS",
        "higher",
        "FLOPs of attention over the median time; a causal mask halves them, and a backward pass is 2.5 forward passes",
        True,
        True,
        True,
    ),
    Metric("taf_tflops", "TFLOPS", "higher", "matrix products of one model, timed alone: FLOPs over time", True, True, True),
    Metric("bandwidth_gb_s", "GB/s", "higher", "bytes read and written over the median time", True, True, True),
    Metric("energy_j_per_tflop", "J/TFLOP", "lower", "median power x median time for 10¹² operations", False, True),
    Metric("energy_j_per_gb", "J/GB", "lower", "median power x median time for 10⁹ bytes", False, True),
    Metric("launch_time_s", "s", "lower", "time to launch one tiny kernel, alone or inside a graph", False, True, True),
    Metric("operator_time_s", "s", "lower", "host time for one operator of an eager training step", False, True, True),
    Metric("step_overhead_s", "s", "lower", "host time of an eager training step beyond its operators", False, True, True),
    Metric("block_time_s", "s", "lower", "host time of one more compiled block, forward and backward", False, True, True),
    Metric("worthwhile_bytes", "B", "lower", "traffic of a copy that takes as long as its own launch", False, True),
    Metric("largest_allocation_gib", "GiB", "higher", "largest single allocation that succeeds, by bisection", True, False, True),
    Metric("cache_bytes", "B", "none", "capacity of one cache of a level, as the operating system reports it"),
    Metric("speedup", "ratio", "higher", "interleaved A/B ratio of times, above 1 where A is faster", True, True),
    Metric("rate_ratio", "ratio", "higher", "ratio of two rates measured one after the other; it includes drift", True, True),
    Metric("roofline_ridge_flop_per_byte", "FLOP/byte", "none", "arithmetic intensity at which the two measured ceilings meet"),
    Metric("call_time_s", "s", "lower", "one call of a reader's own function, median", True, True),
    Metric("flops", "FLOP", "none", "FLOPs of matrix products, convolutions and attention in one call; a multiply-add is 2"),
    Metric("step_time_s", "s", "lower", "one optimizer step, median", True, True),
    Metric("epoch_time_s", "s", "lower", "wall time of the steps of one epoch, loading included, evaluations and saves not"),
    Metric("tokens_per_s", "tokens/s", "higher", "tokens without padding that the loader delivers, over training time", True),
    Metric("images_per_s", "images/s", "higher", "images that the loader delivers, over training time", True),
    Metric("tokenizer_tokens_per_s", "tokens/s", "higher", "tokens written to a file over the median time", True, True, True),
    Metric("loader_samples_per_s", "samples/s", "higher", "samples of a batch over the median time to load it", True, True, True),
    Metric("samples_per_s", "samples/s", "higher", "samples of a batch, divided by the time of one step", True),
    Metric(
        "batch_efficiency", "fraction", "higher", "samples/s at this batch size, divided by samples/s at the best one", True, True
    ),
    Metric("forward_time_s", "s", "lower", "forward pass of one step, loss included, median", False, True),
    Metric("backward_time_s", "s", "lower", "backward pass of one step, median", False, True),
    Metric("optimizer_time_s", "s", "lower", "optimizer update of one step, with clearing of gradients, median", False, True),
    Metric("inference_time_s", "s", "lower", "forward pass of one batch without gradients, median", True, True),
    Metric("compile_time_s", "s", "lower", "time of the first calls of a compiled function, until no call compiles any more"),
    Metric("graph_breaks", "items", "lower", "number of places in the code where the compiler falls back to Python"),
    Metric("break_even_calls", "calls", "lower", "calls after which the time saved exceeds the compilation time"),
    Metric("algbw_gb_s", "GB/s", "higher", "bytes of a collective over its median time", False, True, True),
    Metric(
        "busbw_gb_s", "GB/s", "higher", "bytes that each link carries, divided by the time of the collective", True, True, True
    ),
    Metric("collective_time_s", "s", "lower", "time of one collective on the slowest rank, median", False, True, True),
    Metric("latency_s", "s", "lower", "time of an empty message: intercept of a line fitted over the sizes", False, True),
    Metric("asymptotic_busbw_gb_s", "GB/s", "higher", "limit of the bus bandwidth for large messages, from a fit", False, True),
    Metric("fit_deviation", "fraction", "lower", "largest relative distance between a measured time and a fitted time"),
    Metric("half_busbw_bytes", "B", "lower", "message size that reaches half of the best bus bandwidth, interpolated"),
    Metric(
        "recommended_bytes", "B", "lower", "message size with 90 % of the fitted bus bandwidth of large messages", False, True
    ),
    Metric(
        "overlap_share",
        "fraction",
        "higher",
        "time saved by running two tasks at once, divided by the time of the shorter task",
        False,
        True,
        True,
    ),
    Metric("scaling_efficiency", "fraction", "higher", "speed per device, divided by the speed of a single device", True, True),
    Metric(
        "alone_difference",
        "fraction",
        "lower",
        "step time minus the time of the same step on one rank without communication, divided by the step time",
        False,
        True,
    ),
    Metric(
        "communication_share",
        "fraction",
        "lower",
        "time that a step needs in addition to the same step without communication, divided by the time of the step; "
        "a value below zero is a difference and not a share",
        False,
        True,
    ),
    Metric("detection_time_s", "s", "lower", "from the death of a rank to the launcher's error", True, False, True),
    Metric(
        "steps_lost", "steps", "lower", "optimizer steps repeated after a fault, largest number of any trial", needs_check=True
    ),
    Metric("stored_gb", "GB", "lower", "bytes of files on disk"),
    Metric(
        "relative_difference",
        "fraction",
        "lower",
        "difference from a reference, divided by the reference; see the check",
        needs_check=True,
    ),
    Metric(
        "mfu",
        "fraction",
        "higher",
        "model FLOPs, with full attention, over time and the data sheet's peak (limits: half of causal attention, maximum clock)",
        True,
    ),
    Metric(
        "mfu_maf", "fraction", "higher", "model FLOPs over time, divided by the run's fastest matrix product in the dtype", True
    ),
    Metric("peak_memory_gib", "GiB", "lower", "peak of the device memory that tensors occupy", True),
    Metric("allocated_memory_gib", "GiB", "lower", "device memory that tensors occupy at the time of the reading"),
    Metric("reserved_memory_gib", "GiB", "lower", "peak of the device memory that the allocator holds, with pools of graphs"),
    Metric("tensor_memory_gib", "GiB", "lower", "peak of the bytes of live tensors on any device, counted by dispatch"),
    Metric("peak_rss_gib", "GiB", "lower", "peak resident host memory of the process", True),
    Metric("sample_memory_mib", "MiB", "lower", "memory for one more sample in the batch: slope of the peak memory"),
    Metric("training_loss", "nats", "lower", "mean training loss of the epoch", True),
    Metric("validation_loss", "nats", "lower", "mean loss per predicted unit on the held-out split", True),
    Metric("perplexity_token", "perplexity", "lower", "exp of the mean negative log-likelihood per token", True, True),
    Metric("perplexity_word", "perplexity", "lower", "exp of the total negative log-likelihood per word and <eos>", True, True),
    Metric("bits_per_byte", "bits", "lower", "total negative log-likelihood per byte of UTF-8", True, True),
    Metric("perplexity_token_sd", "perplexity", "lower", "standard deviation of the perplexity per token between seeds"),
    Metric("perplexity_word_sd", "perplexity", "lower", "standard deviation of the perplexity per word between seeds"),
    Metric("bits_per_byte_sd", "bits", "lower", "standard deviation of the bits per byte between seeds"),
    Metric("accuracy", "fraction", "higher", "share of held-out images classified correctly", True, True),
    Metric(
        "accuracy_difference",
        "fraction",
        "higher",
        "accuracy of a variant of a model or a training minus that of the original, on the same images",
        needs_interval=True,
    ),
    Metric("accuracy_sd", "fraction", "lower", "standard deviation of the accuracy between seeds"),
    Metric("time_to_accuracy_s", "s", "lower", "training time until the held-out accuracy reaches a target", True),
    Metric("loss_scale", "1", "none", "factor on the loss that keeps fp16 gradients from vanishing"),
    Metric("learning_rate", "1", "none", "learning rate of the epoch's last step"),
    Metric("excess_loss_nats", "nats", "lower", "loss minus the lowest loss that a perfect model can reach", True),
    Metric(
        "quadratic_share", "fraction", "lower", "share of the quadratic term at the greatest length, from a fit", needs_check=True
    ),
    Metric("registers", "items", "none", "vector registers of a thread of a compiled kernel"),
    Metric(
        "register_spills", "items", "lower", "registers (AMD) or bytes (NVIDIA) that a thread spills to memory", needs_check=True
    ),
    Metric("shared_memory_bytes", "B", "none", "shared memory (LDS) of a program of a compiled kernel", needs_check=True),
    Metric("resident_warps", "items", "none", "warps that fit on a vector unit (AMD) or a multiprocessor (NVIDIA) at once"),
    Metric("matrix_instructions", "items", "none", "matrix instructions in the code of a compiled kernel", needs_check=True),
    Metric("count", "items", "none", "number of items; checked if the expected number is known"),
    Metric("share", "fraction", "none", "share of a whole"),
    Metric("channel_mean", "fraction", "none", "mean pixel value of a colour channel, 0 to 1", needs_check=True),
)

# Parameters of the rows with the metric "share" that say during which part of a step the GPU is busy. In the rest of the step, it
# waits for the host.
BUSY_GPU = MappingProxyType({"what": "device time over step time"})

BUILT_IN: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
_registered: dict[str, Metric] = dict(BUILT_IN)
# All metrics of this process by name: the built-in metrics and the metrics that packages registered.
REGISTRY: Mapping[str, Metric] = MappingProxyType(_registered)


def register_metric(metric: Metric) -> Metric:
    """Make a metric available to the rows of this process, and return the metric.

    Call this function at the top level of the module that uses the metric, so that importing the module registers the metric.
    Registering the same definition again changes nothing.

    Raises:
        HyperionError: a metric of this name with another definition is already registered.
    """
    # `setdefault` stores a new definition, and returns the definition that is now registered.
    known = _registered.setdefault(metric.name, metric)
    if known != metric:
        raise HyperionError(
            f"metric {metric.name!r} has two definitions: {_differences(known, metric)}",
            where=f"{'built-in' if metric.name in BUILT_IN else 'registered'}: {known}; new: {metric}",
            next_step="give the new metric another name, or register the same definition",
        )
    return known


def metric_named(name: str) -> Metric:
    """Return the built-in or registered metric of this name.

    Raises:
        HyperionError: there is no metric of this name. The message lists all metrics, similar ones first.
    """
    if name not in REGISTRY:
        raise HyperionError(
            f"unknown metric {name!r}",
            next_step=f"define it in metrics.py of your subject, or use one of {nearest_first(name, REGISTRY)}",
        )
    return REGISTRY[name]


def require_one_definition(metrics: Iterable[Metric], where: object) -> dict[str, Metric]:
    """Return a dict that maps the name of a metric to its definition, after checking that no name has two definitions.

    Args:
        metrics: the metrics; repeated equal definitions are allowed.
        where: origin of the metrics for error messages.

    Raises:
        HyperionError: two metrics have the same name and different definitions, or a metric redefines a built-in metric.
    """
    by_name: dict[str, Metric] = {}
    for metric in metrics:
        # A built-in definition has priority, so that a run cannot redefine a metric of the library.
        known = BUILT_IN.get(metric.name) or by_name.setdefault(metric.name, metric)
        if known != metric:
            owner = "built-in metric" if metric.name in BUILT_IN else "metric"
            raise HyperionError(
                f"{owner} {metric.name!r} has two definitions: {_differences(known, metric)}",
                where=where,
                next_step="give one of the two metrics another name",
            )
    return by_name


def _differences(known: Metric, new: Metric) -> str:
    """Return the fields in which two definitions differ, with both values."""
    names = [field.name for field in fields(Metric)]
    pairs = [(name, getattr(known, name), getattr(new, name)) for name in names]
    return ", ".join(f"{name} {old!r} and {now!r}" for name, old, now in pairs if old != now)
