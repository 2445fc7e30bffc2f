"""How many bytes does a token take in the KV cache, and how long does a decoding step take?

The keys and values of all earlier tokens are stored, so that a decoding step computes only one token. The size of the cache
limits how many requests a server can answer at once.
"""

import gc
from typing import Any

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_stream
from hyperion.chapter.rows import all_samples, bandwidth_limit, checked, sample_frame, timed_row
from hyperion.experiments.serving.served_models import DATA, ServedModel, served_model
from hyperion.measure import Verification
from hyperion.measure.clock.timing import time_function
from hyperion.results import Row

TENSORS, DEVICE, STEP = "tensors of the cache", "device memory", "one step of decoding"
# The allocator of a GPU rounds each tensor up to a multiple of this size.
_GRANULE = 512
_CALLS = 4  # calls per sample, so that the time includes launches


class KvCacheMemoryOptions(Options):
    """Options for the `kv_cache_memory` experiment.

    Args:
        model: name of the model.
        dtype: number format of the weights and the cache.
        lengths: numbers of tokens in the cache.
        time_limit_s: seconds of timing of the decoding step.
    """

    model: str
    dtype: str
    lengths: tuple[int, ...]
    time_limit_s: float


def forecast(context: Context) -> list[Forecast]:
    """Predict the cache size from the model's dimensions, and the time of a decoding step from the bytes of the weights."""
    options = KvCacheMemoryOptions.of(context)
    model = served_model(context, options.model)
    basis = "2 x layers x key-value heads x features x bytes x tokens"
    forecasts = [
        Forecast(
            TENSORS,
            "kv_cache_bytes",
            float(model.cache_bytes(length, options.dtype)),
            basis,
            options.dtype,
            _params(options, length),
        )
        for length in options.lengths
    ]
    weights = model.weight_bytes(options.dtype)
    stream = expected_stream(context, "copy", options.dtype, weights)
    step_s = None if stream.estimate is None else weights / stream.estimate / 1e9
    limit, source = decoding_limit(context, model, options.dtype)
    basis = f"{weights / 1e9:.4g} GB of weights; {stream.basis if step_s else source}"
    params = _params(options, max(options.lengths))
    return [*forecasts, Forecast(STEP, "tpot_s", step_s, basis, options.dtype, params, ceiling=limit)]


@torch.no_grad()
def run(context: Context, report: Report) -> Result:
    """Fill caches of several lengths and count their bytes. Then time one decoding step at the greatest length."""
    options = KvCacheMemoryOptions.of(context)
    device = context.device.torch_device
    served = served_model(context, options.model)
    model = served.load(options.dtype, device)
    generator = torch.Generator().manual_seed(context.seed)
    rows: list[Row] = []
    cache = None
    # The first call allocates memory that libraries keep, such as 32 MiB for cuBLAS on an H100. It must not count as cache.
    model(torch.zeros(1, min(options.lengths), dtype=torch.long, device=device), use_cache=True, logits_to_keep=1)
    for done, length in enumerate(options.lengths):
        report(done, len(options.lengths) + 1, f"{length} tokens")
        ids_BT = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)
        cache = None
        gc.collect()
        before = _allocated(device)
        cache = model(ids_BT, use_cache=True, logits_to_keep=1).past_key_values
        added = _allocated(device) - before
        predicted = served.cache_bytes(length, options.dtype)
        identity = {"dtype": options.dtype, "params": _params(options, length)}
        tensors = cache_tensors(cache)
        value = sum(tensor.nbytes for tensor in tensors)
        check = checked("predicted bytes", abs(value - predicted), 0)
        rows.append(context.row(TENSORS, "kv_cache_bytes", value, **identity, **check))
        if context.device.kind == "cpu":
            reason = "PyTorch does not count the memory of a CPU"
            rows.append(context.absent_row(DEVICE, "kv_cache_bytes", reason, **identity))
            continue
        check = checked("predicted bytes", abs(added - predicted), len(tensors) * _GRANULE)
        rows.append(context.row(DEVICE, "kv_cache_bytes", added, **identity, **check))
    report(len(options.lengths), len(options.lengths) + 1, STEP)
    step_row, samples = _time_step(context, options, served, model, cache)
    return Result([*rows, step_row], samples, served.source)


EXPERIMENT = Experiment(forecast, run, options=KvCacheMemoryOptions, forecast_reads=("bandwidth",), data=DATA)


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """Return the key and value tensors of all layers of a transformers cache."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def decoding_limit(context: Context, model: ServedModel, dtype: str) -> tuple[float | None, str]:
    """Return (the shortest possible time of a decoding step in seconds, its source), or (None, why there is none).

    A step reads all weights once, regardless of the number of requests in the batch.
    """
    weights = model.weight_bytes(dtype)
    rate, source = bandwidth_limit(context.device, weights)
    return (None, source) if rate is None else (weights / rate / 1e9, f"{weights / 1e9:.4g} GB of weights, {source}")


def _time_step(context: Context, options: KvCacheMemoryOptions, served: ServedModel, model, cache) -> tuple[Row, pd.DataFrame]:
    """Time a step that adds one token to the cache. The token is then removed, so that all steps are equal."""
    length = max(options.lengths)
    token_BT = torch.zeros(1, 1, dtype=torch.long, device=context.device.torch_device)
    lengths = []

    def step() -> None:
        model(token_BT, past_key_values=cache, use_cache=True)
        lengths.append(cache.get_seq_length())
        cache.crop(-1)

    timing = time_function(step, context.device, cold=False, time_limit_s=options.time_limit_s, back_to_back=_CALLS)
    wrong = sum(count != length + 1 for count in lengths)
    check = Verification("steps that did not add one token", wrong, 0)
    params = _params(options, length)
    limit = decoding_limit(context, served, options.dtype)
    row = timed_row(context, STEP, "tpot_s", timing.estimate, timing, check, limit, dtype=options.dtype, params=params)
    return row, all_samples([sample_frame(timing, STEP, options.dtype, params)])


def _allocated(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.memory_allocated(device)


def _params(options: KvCacheMemoryOptions, length: int) -> dict:
    return {"model": options.model, "tokens": length}
