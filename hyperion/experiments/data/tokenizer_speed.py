"""Compare how fast this library's pipeline and `datasets.map` tokenize text and write the tokens to disk.

Both use the same tokenizer. They are timed in alternation, so that changes in machine speed affect both.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import sample_frame, speedup_row, timed_row
from hyperion.data import Tokenizer
from hyperion.data.prepare.prepare import write_split
from hyperion.hardware import detect_cpu
from hyperion.measure import Timing, Verification, time_interleaved
from hyperion.results import Row
from hyperion.workloads import datasets

_OURS, _THEIRS = "each distinct word once", "datasets.map"
_WINDOW = 128
_NO_LIMIT = "no limit: there is no lower bound on the work of a tokenizer"


class TokenizerSpeedOptions(Options):
    """Options for the `tokenizer_speed` experiment.

    Args:
        lines: number of lines of the train split to tokenize.
        processes: numbers of worker processes to compare.
        cores: number of CPU cores that all processes share.
        samples: minimum number of timing samples for each pipeline.
        time_limit_s: total timing budget in seconds for all pipelines.
    """

    lines: int
    processes: tuple[int, ...]
    cores: int
    samples: int
    time_limit_s: float

    def params(self, processes: int) -> dict:
        """Return the params of the rows for this number of processes."""
        return {"lines": self.lines, "cores": self.cores, "processes": processes}


def forecast(context: Context) -> list[Forecast]:
    """Predict the speed-up of this library's pipeline over `datasets.map`."""
    options = TokenizerSpeedOptions.of(context)
    basis = (
        "about half of the work of datasets.map is BPE, the rest Python's lists and Arrow's copies; of BPE next to nothing is "
        "left where each distinct word goes through it once, and arrays take the place of the lists"
    )
    params = options.params(options.processes[0]) | {"over": _THEIRS}
    return [Forecast(_OURS, "speedup", 2.0, basis, params=params)]


def run(context: Context, report: Report) -> Result:
    """Tokenize part of the train split with both pipelines, time them in alternation, and compare all tokens."""
    options = TokenizerSpeedOptions.of(context)
    report(0, 2, "load")
    corpus, tokenizer, _ = datasets.text(context)
    lines = list(islice(corpus.splits["train"], options.lines))
    each = [(variant, processes) for variant in (_OURS, _THEIRS) for processes in options.processes]
    with tempfile.TemporaryDirectory() as place, _on_cores(options.cores):
        work = [Path(place) / str(number) for number in range(len(each))]
        make = {_OURS: _ours, _THEIRS: _theirs}
        tokenize = [make[variant](lines, tokenizer, n, folder) for (variant, n), folder in zip(each, work, strict=True)]
        tokens = [_read(call()) for call in tokenize]
        report(1, 2, "tokenize, in turn")
        timings = time_interleaved(
            tokenize, detect_cpu(), cold=False, back_to_back=1, minimum_samples=options.samples, time_limit_s=options.time_limit_s
        )
    timing_of = dict(zip(each, timings, strict=True))
    rows = [
        _rate_row(context, options, key, timing_of[key], written, tokens[0], corpus.source)
        for key, written in zip(each, tokens, strict=True)
    ]
    rows += [_speedup_row(context, options, n, timing_of, corpus.source) for n in options.processes]
    frames = [sample_frame(timing, variant, "", options.params(n)) for (variant, n), timing in timing_of.items()]
    return Result(rows, pd.concat(frames, ignore_index=True), corpus.source)


# The experiment gets its own process, because it binds the process to a few cores and because `datasets` forks it.
EXPERIMENT = Experiment(forecast, run, isolated=True, data=datasets.TEXT, options=TokenizerSpeedOptions)


def _rate_row(
    context: Context,
    options: TokenizerSpeedOptions,
    key: tuple[str, int],
    timing: Timing,
    tokens: np.ndarray,
    expected: np.ndarray,
    source: str,
) -> Row:
    variant, processes = key
    rate = timing.estimate.map(lambda seconds: len(expected) / seconds)
    differing = 1.0 if len(tokens) != len(expected) else float(np.mean(tokens != expected))
    check = Verification("share of tokens that differ", differing, 0.0)
    return timed_row(
        context,
        variant,
        "tokenizer_tokens_per_s",
        rate,
        timing,
        check,
        limit=(None, _NO_LIMIT),
        params=options.params(processes),
        data_source=source,
    )


def _speedup_row(
    context: Context, options: TokenizerSpeedOptions, processes: int, timing_of: dict[tuple[str, int], Timing], source: str
) -> Row:
    ours, theirs = timing_of[_OURS, processes], timing_of[_THEIRS, processes]
    params = options.params(processes) | {"over": _THEIRS}
    return speedup_row(context, _OURS, ours, theirs, _NO_LIMIT, params=params, data_source=source)


def _ours(lines: list[str], tokenizer: Tokenizer, processes: int, folder: Path) -> Callable[[], np.ndarray]:
    """Return a function that tokenizes the lines with this library and returns the token ids.

    The pipeline writes 16-bit or 32-bit tokens, checksums and counts. It also checks that decoding restores the text.
    """

    def tokenize() -> np.ndarray:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with tokenizer.encoding(processes) as encoding:
            write_split(folder, "train", lines, tokenizer, encoding, _WINDOW)
        return np.load(folder / "train.npy", mmap_mode="r")

    return tokenize


def _theirs(lines: list[str], tokenizer: Tokenizer, processes: int, folder: Path) -> Callable[[], object]:
    """Return a function that tokenizes the lines with `datasets.map` and writes the tokens to an Arrow file.

    The code follows the `datasets` tutorials: it calls a fast tokenizer on batches of 1,000 lines.
    """
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


def _read(written: Any) -> np.ndarray:
    """Return all token ids in one array. `written` is an array or a `datasets.Dataset`."""
    if isinstance(written, np.ndarray):
        return np.array(written, dtype=np.int64)
    return np.concatenate([chunk.flatten().to_numpy() for chunk in written.data.column("input_ids").chunks])


@contextlib.contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Context manager that binds this process and its children to the first `count` CPU cores, if the system allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
