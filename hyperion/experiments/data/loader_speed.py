"""Compare text loaders: speed, share of positions with a target, and the time that a training step waits for a batch."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import NO_CEILINGS, bandwidth_limit, sample_frame, stream_ceiling, timed_row
from hyperion.data import IGNORE_INDEX, PreparedText, Tokenizer
from hyperion.data.batches import LanguageBatches, PaddedBatches, Prefetched, ResumableBatches
from hyperion.errors import not_none
from hyperion.measure import Timing, Verification, time_function
from hyperion.models import TransformerLM, flops_per_token, named_config
from hyperion.results import Row
from hyperion.training import LanguageEngine, TrainingPlan, WarmupCosine, adamw, choose_precision, seed_everything, train
from hyperion.workloads import datasets

_PACKED, _FILE, _AHEAD, _PADDED = (
    "packed, on the device",
    "packed, from its file",
    "packed, from its file, ahead",
    "padded, on the device",
)
_ID_BYTES, _MADE_BYTES = 4, 8  # bytes per token id in the stream on the device (int32) and in a batch (int64)


class LoaderTimingOptions(Options):
    """Options for timing a loader.

    Args:
        calls: number of consecutive batches that form one timing sample.
        time_limit_s: timing budget in seconds for each loader.
    """

    calls: int
    time_limit_s: float


class LoaderSpeedOptions(LoaderTimingOptions):
    """Options for the `loader_speed` experiment.

    Args:
        sequence_length: number of tokens in an example.
        batch_size: number of examples in a batch.
        workers: numbers of prefetching threads to compare, one loader for each.
        model: name of the TransformerLM configuration to train.
        steps: number of optimizer steps of the training run.
    """

    sequence_length: int
    batch_size: int
    workers: tuple[int, ...]
    model: str
    steps: int

    @property
    def window_bytes(self) -> int:
        """Bytes moved per example: its window of token ids is read, and its inputs and targets are written."""
        return (self.sequence_length + 1) * _ID_BYTES + 2 * self.sequence_length * _MADE_BYTES

    def params(self, workers: int) -> dict:
        """Return the params of the rows of a loader with this number of threads."""
        return {"batch": self.batch_size, "length": self.sequence_length, "workers": workers}


@dataclass(frozen=True)
class _Loader:
    """A loader to time.

    Args:
        variant: name of the loader in the rows.
        workers: number of threads that prefetch batches. With 0, each batch is made when it is requested.
        batches: the loader itself.
        sample_bytes: minimum number of bytes that device memory must move per example, or None if device memory does not limit
            the loader.
        why_unbounded: reason why device memory does not limit the loader, or an empty string if it does.
    """

    variant: str
    workers: int
    batches: ResumableBatches | Prefetched
    sample_bytes: int | None
    why_unbounded: str = ""


def forecast(context: Context) -> list[Forecast]:
    """Predict the share of training time spent waiting for a loader whose token stream is on the device."""
    options = LoaderSpeedOptions.of(context)
    params = options.params(0) | {"what": "waiting for the loader"}
    vocabulary = datasets.vocabulary_row(context)
    dtype = choose_precision(context.device).dtype
    gemm, stream = context.best_gemm(dtype), stream_ceiling(context.upstream)
    if vocabulary is None or gemm is None or stream is None:
        basis = NO_CEILINGS
        return [Forecast(_PACKED, "share", None, basis, params=params, dtype=dtype)]
    config = named_config(options.model, vocab_size=int(not_none(vocabulary.value)), context=options.sequence_length)
    tokens = options.batch_size * options.sequence_length
    loading = options.batch_size * options.window_bytes / (not_none(stream.value) * 1e9)
    step = flops_per_token(config).forward_backward * tokens / (not_none(gemm.value) * 1e12)
    basis = f"{loading * 1e6:.3g} us to move a batch at the measured bandwidth, {step * 1e3:.3g} ms of products"
    estimate = loading / (loading + step)
    return [Forecast(_PACKED, "share", estimate, basis, params=params, dtype=dtype)]


def run(context: Context, report: Report) -> Result:
    """Time each loader outside training and check its batches. Then train for some steps on packed batches."""
    options = LoaderSpeedOptions.of(context)
    seed_everything(context.seed)
    corpus, tokenizer, prepared = datasets.text(context)
    rows, frames = [], []
    with ExitStack() as stack:
        loaders = _loaders(context, options, prepared, tokenizer, stack)
        examples = cast(LanguageBatches, loaders[0].batches).examples(0)
        starts = [loader.batches.state_dict() for loader in loaders]
        for number, loader in enumerate(loaders):
            report(number, len(loaders) + 1, loader.variant)
            # The check takes the first batches of the epoch, so it runs before the timing advances the loader.
            check = _check(options, loader, prepared.tokens["train"], examples)
            timing = time_in_a_row(context, options, loader.batches.next_batch)
            rows += [_rate_row(context, options, loader, timing, check, corpus.source)]
            frames.append(sample_frame(timing, loader.variant, "", options.params(loader.workers)))
            if loader.variant in (_PACKED, _PADDED):
                rows.append(_text_share_row(context, options, loader, corpus.source))
        report(len(loaders), len(loaders) + 1, "train")
        for loader, start in zip(loaders, starts, strict=True):
            loader.batches.load_state_dict(start)  # each training run starts at the beginning of an epoch
        trained = [loader for loader in loaders if loader.variant in (_PACKED, _AHEAD)]
        rows += [_waiting_row(context, options, loader, tokenizer, corpus.source) for loader in trained]
    return Result(rows, pd.concat(frames, ignore_index=True), corpus.source)


EXPERIMENT = Experiment(
    forecast, run, forecast_reads=("text_pipeline", "gemm", "bandwidth"), data=datasets.TEXT, options=LoaderSpeedOptions
)


def _loaders(
    context: Context, options: LoaderSpeedOptions, prepared: PreparedText, tokenizer: Tokenizer, stack: ExitStack
) -> list[_Loader]:
    tokens = prepared.tokens["train"]
    length, size, device = options.sequence_length, options.batch_size, context.device.torch_device
    cached = "no limit: the file lies in the system's cache, and its pages are read by the host"

    def from_file() -> LanguageBatches:
        return LanguageBatches(tokens, length, size, context.seed, resident=False)

    packed = LanguageBatches(tokens, length, size, context.seed, device)
    padded = PaddedBatches(tokens, prepared.samples["train"], length, size, tokenizer.eos_id, context.seed, device)
    loaders = [_Loader(_PACKED, 0, packed, options.window_bytes)]
    if context.device.kind == "cpu":  # on an accelerator Prefetched copies them to the device
        loaders.append(_Loader(_FILE, 0, from_file(), None, cached))
    for workers in options.workers:
        ahead = stack.enter_context(Prefetched(from_file(), workers, device=device))
        loaders.append(_Loader(_AHEAD, workers, ahead, None, cached))
    return [*loaders, _Loader(_PADDED, 0, padded, options.window_bytes)]


def time_in_a_row(context: Context, options: LoaderTimingOptions, next_batch: Callable) -> Timing:
    """Time batches that are requested back to back, as in a training loop, until the last batch is complete."""
    return time_function(next_batch, context.device, cold=False, back_to_back=options.calls, time_limit_s=options.time_limit_s)


def _check(options: LoaderSpeedOptions, loader: _Loader, tokens: np.ndarray, examples: np.ndarray) -> Verification:
    """Compare the batches of a loader with the token stream.

    If the loader packs lines into examples, return the share of wrong batches. If it pads each line, return the share of wrong
    targets.

    Args:
        options: options of the experiment.
        loader: loader to check.
        tokens: token stream that the loader reads.
        examples: index of the first token of each window of the first epoch, in epoch order.
    """
    taken = [loader.batches.next_batch() for _ in range(options.calls)]
    if loader.variant in (_PACKED, _FILE, _AHEAD):
        size, length = options.batch_size, options.sequence_length
        starts = examples[: len(taken) * size].reshape(len(taken), size, 1)
        windows = torch.from_numpy(np.asarray(tokens[starts + np.arange(length + 1)], dtype=np.int64))
        wrong = [
            not (torch.equal(inputs.cpu(), window[:, :-1]) and torch.equal(targets.cpu(), window[:, 1:]))
            for (inputs, targets), window in zip(taken, windows, strict=True)
        ]
        return Verification("share of batches that are not the stream's windows", sum(wrong) / len(wrong), 0.0)
    inputs, targets = (torch.cat(parts) for parts in zip(*taken, strict=True))
    # Within a row, the target at position t must be the input at position t + 1, unless the target is ignored.
    shifted = (targets[:, :-1] != IGNORE_INDEX) & (targets[:, :-1] != inputs[:, 1:])
    return Verification("share of targets that are not the next token", shifted.float().mean().item(), 0.0)


def _rate_row(
    context: Context, options: LoaderSpeedOptions, loader: _Loader, timing: Timing, check: Verification, source: str
) -> Row:
    params = options.params(loader.workers)
    if loader.sample_bytes is None:
        limit = None, loader.why_unbounded
    else:
        limit = loader_limit(context, loader.sample_bytes, params["batch"])
    rate = timing.estimate.map(lambda seconds: params["batch"] / seconds)
    return timed_row(
        context, loader.variant, "loader_samples_per_s", rate, timing, check, limit, params=params, data_source=source
    )


def loader_limit(context: Context, sample_bytes: int, batch_size: int) -> tuple[float | None, str]:
    """Return (maximum samples/s that device memory allows, source of this limit), or (None, reason why there is no limit)."""
    gb_s, source = bandwidth_limit(context.device, sample_bytes * batch_size)
    return None if gb_s is None else gb_s * 1e9 / sample_bytes, source


def _text_share_row(context: Context, options: LoaderSpeedOptions, loader: _Loader, source: str) -> Row:
    """Return the row with the share of positions that have a target, i.e. are not padding, measured on some batches."""
    targets = torch.cat([loader.batches.next_batch()[1] for _ in range(options.calls)])
    share = (targets != IGNORE_INDEX).float().mean().item()
    params = options.params(loader.workers) | {"what": "positions that carry a loss"}
    return context.row(loader.variant, "share", share, params=params, data_source=source)


def _waiting_row(context: Context, options: LoaderSpeedOptions, loader: _Loader, tokenizer: Tokenizer, source: str) -> Row:
    """Return the row with the share of training time that the training loop spends waiting for a batch."""
    device, steps = context.device, options.steps
    config = named_config(options.model, vocab_size=tokenizer.vocab_size, context=options.sequence_length)
    model = TransformerLM(config).to(device.torch_device)
    engine = LanguageEngine(model, adamw(model, 1e-3), WarmupCosine(1e-3, 1, steps), choose_precision(device), device)
    record = train(engine, loader.batches, TrainingPlan(steps=steps)).epochs[-1]
    params = options.params(loader.workers) | {"what": "waiting for the loader"}
    return context.row(
        loader.variant, "share", record.waiting_share, dtype=engine.precision.dtype, params=params, data_source=source
    )
