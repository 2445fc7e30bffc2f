"""How fast does text become tokens on disk? This library's pipeline beside `datasets.map` with the same tokenizer, in turn."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.data import Tokenizer
from hyperion.data.prepare.prepare import write_split
from hyperion.hardware import detect_cpu
from hyperion.measure import Timing, Verification, time_interleaved
from hyperion.results import Row, ratio_estimate
from hyperion.workloads import datasets

_OURS, _THEIRS = "each distinct word once", "datasets.map"
_WINDOW = 128
_NO_LIMIT = "no limit: what the least work of a tokenizer is has no bound"


def forecast(context: Context) -> list[Forecast]:
    """How many times as fast the pipeline is."""
    first = context.sizes["processes"][0]
    basis = (
        "about half of the work of datasets.map is BPE, the rest Python's lists and Arrow's copies; of BPE next to nothing is "
        "left where each distinct word goes through it once, and arrays take the place of the lists"
    )
    params = _params(context, first) | {"over": _THEIRS}
    return [Forecast(variant=_OURS, metric="speedup", estimate=2.0, basis=basis, params=params)]


def run(context: Context, report) -> Result:
    """Tokenize a part of the train split with each, in turn; compare every token."""
    report(0, 2, "load")
    corpus, tokenizer, _ = datasets.text(context)
    lines = list(islice(corpus.splits["train"], context.sizes["lines"]))
    each = [(variant, processes) for variant in (_OURS, _THEIRS) for processes in context.sizes["processes"]]
    with tempfile.TemporaryDirectory() as place, _on_cores(context.sizes["cores"]):
        work = [Path(place) / str(number) for number in range(len(each))]
        make = {_OURS: _ours, _THEIRS: _theirs}
        tokenize = [make[variant](lines, tokenizer, n, folder) for (variant, n), folder in zip(each, work, strict=True)]
        tokens = [_read(call()) for call in tokenize]
        report(1, 2, "tokenize, in turn")
        timings = time_interleaved(
            tokenize,
            detect_cpu(),
            cold=False,
            back_to_back=1,
            minimum_samples=context.sizes["samples"],
            time_limit_s=context.sizes["time_limit_s"],
        )
    timing_of = dict(zip(each, timings, strict=True))
    rows = [
        _rate_row(context, key, timing_of[key], found, tokens[0], corpus.source) for key, found in zip(each, tokens, strict=True)
    ]
    rows += [_speedup_row(context, n, timing_of, corpus.source) for n in context.sizes["processes"]]
    frames = [sample_frame(timing, variant, "", _params(context, n)) for (variant, n), timing in timing_of.items()]
    return Result(rows, pd.concat(frames, ignore_index=True), corpus.source)


# A process of its own: it binds itself to a few cores, and `datasets` forks.
EXPERIMENT = Experiment(forecast, run, isolated=True, data=datasets.TEXT)


def _params(context: Context, processes: int) -> dict:
    return {"lines": context.sizes["lines"], "cores": context.sizes["cores"], "processes": processes}


def _rate_row(
    context: Context, key: tuple[str, int], timing: Timing, tokens: np.ndarray, expected: np.ndarray, source: str
) -> Row:
    variant, processes = key
    rate = timing.estimate.map(lambda seconds: len(expected) / seconds)
    differing = 1.0 if len(tokens) != len(expected) else float(np.mean(tokens != expected))
    check = Verification("share of tokens that differ", differing, 0.0)
    return context.row(
        variant,
        "tokenizer_tokens_per_s",
        rate.value,
        params=_params(context, processes),
        limit_source=_NO_LIMIT,
        data_source=source,
        **timed_columns(rate, timing, check),
    )


def _speedup_row(context: Context, processes: int, timing_of: dict[tuple[str, int], Timing], source: str) -> Row:
    ours = timing_of[_OURS, processes]
    ratio = ratio_estimate(ours.samples_s, timing_of[_THEIRS, processes].samples_s)
    params = _params(context, processes) | {"over": _THEIRS}
    return context.row(
        _OURS, "speedup", ratio.value, params=params, limit_source=_NO_LIMIT, data_source=source, **timed_columns(ratio, ours)
    )


def _ours(lines: list[str], tokenizer: Tokenizer, processes: int, folder: Path) -> Callable[[], np.ndarray]:
    """Tokens in a file of 16 or 32 bits each, with checksums, counts, and the proof that decoding gives the text back."""

    def tokenize() -> np.ndarray:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with tokenizer.encoding(processes) as encoding:
            write_split(folder, "train", lines, tokenizer, encoding, _WINDOW)
        return np.load(folder / "train.npy", mmap_mode="r")

    return tokenize


def _theirs(lines: list[str], tokenizer: Tokenizer, processes: int, folder: Path) -> Callable[[], object]:
    """Tokens in an Arrow file, as the tutorials do it: a fast tokenizer on batches of 1,000 lines."""
    from datasets import Dataset, disable_progress_bars
    from transformers import PreTrainedTokenizerFast

    disable_progress_bars()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.library_tokenizer())
    table = Dataset.from_dict({"text": lines})

    def encode(batch: dict) -> dict:
        return {"input_ids": fast(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    def tokenize() -> Dataset:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return table.map(
            encode,
            batched=True,
            remove_columns=["text"],
            num_proc=processes if processes > 1 else None,
            load_from_cache_file=False,
            cache_file_name=str(folder / "tokens.arrow"),
        )

    return tokenize


def _read(written: object) -> np.ndarray:
    """All tokens, of an array or of an Arrow table."""
    if isinstance(written, np.ndarray):
        return np.array(written, dtype=np.int64)
    return np.concatenate([chunk.flatten().to_numpy() for chunk in written.data.column("input_ids").chunks])


@contextlib.contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """This process and those it starts on the first `count` of its cores, where the system can bind them."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
