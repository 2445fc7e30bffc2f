"""How fast are the loaders by themselves, how much of what they deliver is text, and how long does a step wait for them?"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import bandwidth_limit, sample_frame, stream_ceiling, timed_columns
from hyperion.data import IGNORE_INDEX, PreparedText, Tokenizer
from hyperion.data.batches.loaders import LanguageBatches, PaddedBatches, ResumableBatches
from hyperion.data.batches.prefetch import Prefetched
from hyperion.measure import Timing, Verification, time_function
from hyperion.models import TransformerLM, flops_per_token, named_config
from hyperion.results import Row
from hyperion.training import LanguageEngine, Plan, WarmupCosine, adamw, choose_precision, seed_everything, train
from hyperion.workloads import datasets

_PACKED, _FILE, _AHEAD, _PADDED = (
    "packed, on the device",
    "packed, from its file",
    "packed, from its file, ahead",
    "padded, on the device",
)
_ID_BYTES, _MADE_BYTES = 4, 8  # an id on the device, and in a batch


@dataclass(frozen=True)
class _Loader:
    """A loader to be timed.

    Args:
        workers: threads that make batches ahead, 0 for none.
        sample_bytes: what device memory must at least move for a sample; None where it does not bound the loader.
    """

    variant: str
    workers: int
    batches: ResumableBatches | Prefetched
    sample_bytes: int | None
    why_unbounded: str = ""


def forecast(context: Context) -> list[Forecast]:
    """The share of a step's time spent waiting, when the stream lies on the device."""
    params = _params(context, 0) | {"what": "waiting for the loader"}
    vocabulary = datasets.vocabulary_row(context)
    dtype = choose_precision(context.device).dtype
    gemm, stream = context.best_upstream("gemm_tflops", dtype), stream_ceiling(context.upstream)
    if None in (vocabulary, gemm, stream):
        basis = "no estimate: this run has measured no ceilings (01_hardware_exploration)"
        return [Forecast(variant=_PACKED, metric="share", estimate=None, basis=basis, params=params, dtype=dtype)]
    config = named_config(context.sizes["model"], vocab_size=int(vocabulary.value), context=context.sizes["sequence_length"])
    tokens = context.sizes["batch_size"] * context.sizes["sequence_length"]
    loading = context.sizes["batch_size"] * _window_bytes(context) / (stream.value * 1e9)
    step = flops_per_token(config).forward_backward * tokens / (gemm.value * 1e12)
    basis = f"{loading * 1e6:.3g} us to move a batch at the measured bandwidth, {step * 1e3:.3g} ms of products"
    estimate = loading / (loading + step)
    return [Forecast(variant=_PACKED, metric="share", estimate=estimate, basis=basis, params=params, dtype=dtype)]


def run(context: Context, report) -> Result:
    """Time each loader alone, compare its batches, and train some steps on packed batches."""
    seed_everything(context.seed)
    corpus, tokenizer, prepared = datasets.text(context)
    rows, frames = [], []
    with ExitStack() as stack:
        loaders = _loaders(context, prepared, tokenizer, stack)
        starts = [loader.batches.state_dict() for loader in loaders]
        for number, loader in enumerate(loaders):
            report(number, len(loaders) + 1, loader.variant)
            check = _check(context, loader, prepared.tokens["train"], loaders[0].batches)
            timing = time_in_a_row(context, loader.batches.next_batch)
            rows += [_rate_row(context, loader, timing, check, corpus.source)]
            frames.append(sample_frame(timing, loader.variant, "", _params(context, loader.workers)))
            if loader.variant in (_PACKED, _PADDED):
                rows.append(_text_share_row(context, loader, corpus.source))
        report(len(loaders), len(loaders) + 1, "train")
        for loader, start in zip(loaders, starts, strict=True):
            loader.batches.load_state_dict(start)  # a training begins with an epoch
        trained = [loader for loader in loaders if loader.variant in (_PACKED, _AHEAD)]
        rows += [_waiting_row(context, loader, tokenizer, corpus.source) for loader in trained]
    return Result(rows, pd.concat(frames, ignore_index=True), corpus.source)


EXPERIMENT = Experiment(forecast, run, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=datasets.TEXT)


def _params(context: Context, workers: int) -> dict:
    return {"batch": context.sizes["batch_size"], "length": context.sizes["sequence_length"], "workers": workers}


def _window_bytes(context: Context) -> int:
    """A window is read, and its inputs and targets are written."""
    length = context.sizes["sequence_length"]
    return (length + 1) * _ID_BYTES + 2 * length * _MADE_BYTES


def _loaders(context: Context, prepared: PreparedText, tokenizer: Tokenizer, stack: ExitStack) -> list[_Loader]:
    sizes, tokens = context.sizes, prepared.tokens["train"]
    length, size, device = sizes["sequence_length"], sizes["batch_size"], context.device.torch_device
    cached = "no limit: the file lies in the system's cache, and its pages are read by the host"

    def from_file() -> LanguageBatches:
        return LanguageBatches(tokens, length, size, context.seed, resident=False)

    packed = LanguageBatches(tokens, length, size, context.seed, device)
    padded = PaddedBatches(tokens, prepared.samples["train"], length, size, tokenizer.eos_id, context.seed, device)
    loaders = [_Loader(_PACKED, 0, packed, _window_bytes(context))]
    if context.device.kind == "cpu":  # elsewhere the step needs them on the device, which Prefetched sees to
        loaders.append(_Loader(_FILE, 0, from_file(), None, cached))
    for workers in sizes["workers"]:
        ahead = stack.enter_context(Prefetched(from_file(), workers, device=device))
        loaders.append(_Loader(_AHEAD, workers, ahead, None, cached))
    return [*loaders, _Loader(_PADDED, 0, padded, _window_bytes(context))]


def time_in_a_row(context: Context, next_batch: Callable) -> Timing:
    """Batches in a row, as a loop asks for them, until the device has made the last one."""
    return time_function(
        next_batch, context.device, cold=False, back_to_back=context.sizes["calls"], time_limit_s=context.sizes["time_limit_s"]
    )


def _check(context: Context, loader: _Loader, tokens: np.ndarray, packed: LanguageBatches) -> Verification:
    """Share of batches that are not the windows of the stream which they should be, for packed ones; else of targets that are
    wrong.
    """
    taken = [loader.batches.next_batch() for _ in range(context.sizes["calls"])]
    if loader.variant in (_PACKED, _FILE, _AHEAD):
        size, length = context.sizes["batch_size"], context.sizes["sequence_length"]
        starts = packed.examples(0)[: len(taken) * size].reshape(len(taken), size, 1)
        windows = torch.from_numpy(np.asarray(tokens[starts + np.arange(length + 1)], dtype=np.int64))
        wrong = [
            not (torch.equal(inputs.cpu(), window[:, :-1]) and torch.equal(targets.cpu(), window[:, 1:]))
            for (inputs, targets), window in zip(taken, windows, strict=True)
        ]
        return Verification("share of batches that are not the stream's windows", sum(wrong) / len(wrong), 0.0)
    inputs, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
    shifted = (targets[:, :-1] != IGNORE_INDEX) & (targets[:, :-1] != inputs[:, 1:])
    return Verification("share of targets that are not the next token", shifted.float().mean().item(), 0.0)


def _rate_row(context: Context, loader: _Loader, timing: Timing, check: Verification, source: str) -> Row:
    params = _params(context, loader.workers)
    if loader.sample_bytes is None:
        limit = {"limit_source": loader.why_unbounded}
    else:
        limit = loader_limit(context, loader.sample_bytes, params["batch"])
    rate = timing.estimate.map(lambda seconds: params["batch"] / seconds)
    return context.row(
        loader.variant,
        "loader_samples_per_s",
        rate.value,
        params=params,
        data_source=source,
        **limit,
        **timed_columns(rate, timing, check),
    )


def loader_limit(context: Context, sample_bytes: int, batch_size: int) -> dict:
    """The columns of a limit in samples/s for a loader that device memory bounds, or of the reason why there is none."""
    gb_s, source = bandwidth_limit(context.device, sample_bytes * batch_size)
    return {"limit": None if gb_s is None else gb_s * 1e9 / sample_bytes, "limit_source": source}


def _text_share_row(context: Context, loader: _Loader, source: str) -> Row:
    """How many of the positions that a step computes carry a loss, over the batches of some calls."""
    targets = torch.cat([loader.batches.next_batch()[1] for _ in range(context.sizes["calls"])])
    share = (targets != IGNORE_INDEX).float().mean().item()
    params = _params(context, loader.workers) | {"what": "positions that carry a loss"}
    return context.row(loader.variant, "share", share, params=params, data_source=source)


def _waiting_row(context: Context, loader: _Loader, tokenizer: Tokenizer, source: str) -> Row:
    """The share of training time for which the loop waits for a batch."""
    sizes, device = context.sizes, context.device
    config = named_config(sizes["model"], vocab_size=tokenizer.vocab_size, context=sizes["sequence_length"])
    model = TransformerLM(config).to(device.torch_device)
    engine = LanguageEngine(model, adamw(model, 1e-3), WarmupCosine(1e-3, 1, sizes["steps"]), choose_precision(device), device)
    record = train(engine, loader.batches, Plan(steps=sizes["steps"])).epochs[-1]
    params = _params(context, loader.workers) | {"what": "waiting for the loader"}
    return context.row(
        loader.variant, "share", record.waiting_share, dtype=engine.precision.dtype, params=params, data_source=source
    )
