"""Batches of tokens on the device, in a deterministic order that can be resumed exactly at any batch.

Rows are windows of a token stream, padded lines, or instructions. `Prefetched` builds the batches of any of them in threads.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from hyperion.data.packing import IGNORE_INDEX, Padding
from hyperion.data.store.arrays import narrowed
from hyperion.data.store.folders import DataError
from hyperion.data.text.instructions import Completions

Batch = tuple[Tensor, Tensor]
WIDTH_MULTIPLE = 8  # matrix units prefer such widths, and fewer distinct shapes occur


class ResumableBatches(ABC):
    """An endless sequence of batches in epochs. Each batch is a function of (seed, epoch, position) alone.

    With several ranks, a batch is the global batch, and rank r of R gets the r-th of R equal runs of consecutive examples. The
    position in the sequence does not depend on the number of ranks, so a run can be resumed on any number.
    """

    shuffle = True  # a new order in every epoch; otherwise the order of the records

    def __init__(self, records: int, batch_size: int, seed: int, drop_last: bool, rank: int, ranks: int):
        _require_equal_parts(records, batch_size, drop_last, rank, ranks)
        self.batch_size, self.seed, self.epoch, self.position = batch_size, seed, 0, 0
        self.records, self.rank, self.ranks = records, rank, ranks
        self._orders: dict[int, np.ndarray] = {}
        self._drawing = threading.Lock()
        self.batches_per_epoch = records // batch_size if drop_last else -(-records // batch_size)
        if self.batches_per_epoch < 1:
            raise DataError(
                f"{records} records fill no batch of {batch_size}", next_step="use a smaller batch, or keep the last batch"
            )

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the current epoch, or over the next epoch if the current one is complete."""
        for _ in range(self.left_in_epoch()):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """Return the next batch; after the last batch of an epoch the next epoch begins."""
        return self.batch_at(*self.advance())

    def left_in_epoch(self) -> int:
        """Return the number of remaining batches of the current epoch, or of the next epoch if the current one is complete."""
        return self.batches_per_epoch - self.position % self.batches_per_epoch

    def advance(self) -> tuple[int, int]:
        """Return epoch and position of the next batch, and move on to the one after it."""
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        return self.epoch, self.position - 1

    def place_after(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return epoch and position of the batch after `place`."""
        epoch, position = place
        return (epoch, position + 1) if position + 1 < self.batches_per_epoch else (epoch + 1, 0)

    def batch_at(self, epoch: int, position: int) -> Batch:
        """Return this rank's part of a batch, without changing the position in the sequence."""
        return self._batch(epoch, position)

    def state_dict(self) -> dict:
        """Return the position in the sequence, JSON-able. The end of an epoch is stored as the start of the next one."""
        ended = self.position == self.batches_per_epoch
        epoch, position = (self.epoch + 1, 0) if ended else (self.epoch, self.position)
        return {"epoch": epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state`, on any number of ranks.

        Raises:
            DataError: the state belongs to other data, another batch size or another seed.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise DataError(
                    f"the loader state has {key} {state.get(key)}, this loader has {mine}",
                    next_step="resume with the data, batch size and seed of the checkpoint",
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def examples(self, epoch: int) -> np.ndarray:
        """Return the examples of this rank in an epoch, in order: starts of windows in the stream, or indices of images."""
        return np.concatenate([self._examples(epoch, position) for position in range(self.batches_per_epoch)])

    def examples_of_all_ranks(self, epoch: int) -> np.ndarray:
        """Return the examples of all ranks in an epoch, in order. They do not depend on the number of ranks."""
        return np.concatenate([self._whole_batch(epoch, position) for position in range(self.batches_per_epoch)])

    def _examples(self, epoch: int, position: int) -> np.ndarray:
        """Return this rank's examples of one batch."""
        whole = self._whole_batch(epoch, position)
        return whole[self._part(len(whole))]

    def _whole_batch(self, epoch: int, position: int) -> np.ndarray:
        """Return the examples of one batch, of all ranks."""
        return self._ordered(epoch)[position * self.batch_size : (position + 1) * self.batch_size]

    def _ordered(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch. Two orders are cached, because prefetching threads may be in the next epoch."""
        with self._drawing:
            if epoch not in self._orders:
                latest = list(self._orders.items())[-1:]
                self._orders = dict(latest) | {epoch: self._order(epoch)}
            return self._orders[epoch]

    def _identity(self) -> dict:
        return {"records": self.records, "batch_size": self.batch_size, "seed": self.seed}

    def _part(self, batch: int) -> slice:
        """Return the slice of this rank's examples in a global batch of `batch` examples."""
        size = batch // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the examples of an epoch in their order, a function of epoch and seed only."""
        if not self.shuffle:
            return np.arange(self.records)
        return np.random.default_rng((self.seed, epoch)).permutation(self.records)

    @abstractmethod
    def _batch(self, epoch: int, position: int) -> Batch:
        """Return this rank's part of a batch, a function of epoch, position and seed only."""


class LanguageBatches(ResumableBatches):
    """Shuffled windows of a token stream: inputs and targets int64 [batch, length], targets shifted by one token.

    Each epoch cuts the stream, from a new random offset, into disjoint windows of sequence_length + 1 tokens (the last one is
    only a target) and shuffles them. Tokens of at most two windows and the windows of an incomplete batch are left out,
    different ones in each epoch. Windows at multiples of sequence_length would all start at the same place of a line if the
    line length divides it (the synthetic text: 16), and a model would learn the positions of the newlines.

    Args:
        tokens: token ids [tokens].
        batch_size: windows in a global batch.
        rank, ranks: this process's part of each batch. For evaluation use whole batches on every rank.
        resident: hold the tokens on the device; otherwise they stay in their file, see `TokenStream`.

    Raises:
        DataError: the tokens do not fill one batch, or the ranks do not divide the batch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        rank: int = 0,
        ranks: int = 1,
        *,
        resident: bool = True,
    ):
        records = (len(tokens) - sequence_length) // (sequence_length + 1)
        super().__init__(records, batch_size, seed, True, rank, ranks)
        self.sequence_length = sequence_length
        self._stream = TokenStream(tokens, device, resident)

    @property
    def tokens_per_batch(self) -> int:
        """Number of target tokens in a global batch."""
        return self.batch_size * self.sequence_length

    def _identity(self) -> dict:
        return {**super()._identity(), "sequence_length": self.sequence_length}

    def _order(self, epoch: int) -> np.ndarray:
        generator, own = np.random.default_rng((self.seed, epoch)), self.sequence_length + 1
        return generator.integers(own) + own * generator.permutation(self.records)

    def _batch(self, epoch: int, position: int) -> Batch:
        windows = self._stream.windows(self._examples(epoch, position), self.sequence_length + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class PaddedBatches(ResumableBatches):
    """Shuffled lines: inputs and targets int64 [batch, length], one line per row, truncated or padded to `length`.

    A target is the next token of the line, or IGNORE_INDEX where there is none, so padding carries no loss. Count the tokens of
    a batch as the targets that are not IGNORE_INDEX.

    Args:
        tokens: token ids [tokens].
        samples: int64 [samples, 2], start in `tokens` and number of tokens of each line.
        sequence_length: length of a row.
        batch_size: rows in a global batch.
        padding_id: token id of the padding.
        resident: hold the tokens on the device; otherwise they stay in their file, see `TokenStream`.
        rank, ranks: this process's part of each batch.

    Attributes:
        padding: numbers of tokens, padding positions and truncated tokens in all rows.

    Raises:
        DataError: the lines do not fill one batch, or the ranks do not divide the batch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        samples: np.ndarray,
        sequence_length: int,
        batch_size: int,
        padding_id: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        *,
        resident: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ):
        super().__init__(len(samples), batch_size, seed, True, rank, ranks)
        self.sequence_length, self.padding_id = sequence_length, padding_id
        self.padding = Padding.of(np.asarray(samples[:, 1]), sequence_length)
        self._samples, self._stream = samples, TokenStream(tokens, device, resident)

    def _identity(self) -> dict:
        return {**super()._identity(), "sequence_length": self.sequence_length, "tokens": self.padding.tokens}

    def _batch(self, epoch: int, position: int) -> Batch:
        starts, sizes = np.asarray(self._samples[self._examples(epoch, position)]).T
        windows = self._stream.windows(starts, self.sequence_length + 1)
        places = torch.arange(self.sequence_length + 1, device=windows.device)
        outside = places >= on_device(sizes.copy(), windows.device)[:, None]
        inputs = windows[:, :-1].masked_fill(outside[:, :-1], self.padding_id)
        return inputs, windows[:, 1:].masked_fill(outside[:, 1:], IGNORE_INDEX)


class InstructionBatches(ResumableBatches):
    """Batches of inputs and targets int64 [batch, width], with targets IGNORE_INDEX on prompts and padding.

    The width is that of the longest row of the global batch, rounded up to WIDTH_MULTIPLE. So a row has the same shape on any
    number of ranks.

    Args:
        completions: rows from `tokenize_completions`; they are copied to the device.
        batch_size: rows in a global batch.
        shuffle: use a new order in every epoch; otherwise the order of the rows (evaluation).
        drop_last: leave out the last, incomplete batch of an epoch.
        rank, ranks: this process's part of each batch. For evaluation use whole batches on every rank.

    Raises:
        DataError: the rows do not fill one batch, or the ranks do not divide the batch.
    """

    def __init__(
        self,
        completions: Completions,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        device: str | torch.device = "cpu",
        rank: int = 0,
        ranks: int = 1,
    ):
        super().__init__(len(completions.inputs), batch_size, seed, drop_last, rank, ranks)
        self.shuffle, self._sizes = shuffle, completions.sizes
        self._inputs, self._targets = (
            torch.from_numpy(values).to(device) for values in (completions.inputs, completions.targets)
        )

    def _identity(self) -> dict:
        return {**super()._identity(), "shuffle": self.shuffle, "tokens": int(self._sizes.sum())}

    def _batch(self, epoch: int, position: int) -> Batch:
        longest = int(self._sizes[self._whole_batch(epoch, position)].max())
        width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self._inputs.shape[1])
        own = on_device(self._examples(epoch, position), self._inputs.device)
        return self._inputs[own, :width].long(), self._targets[own, :width].long()


class Prefetched:
    """Prefetches another loader's batches. They are bitwise the same for any number of workers.

    A batch is a function of its place in the sequence alone, so any thread can build it at any time. The state is the place of
    the last returned batch, not of the prefetched ones, so a run resumes as it does without threads.

    Args:
        batches: loader on the host, for example with windows of a stream in a file. Its position advances with this loader.
        workers: number of threads. NumPy and file reads release Python's global lock.
        ahead: number of batches that are ready or in progress.
        device: device of the returned batches, copied from pinned memory without waiting.

    Attributes:
        waited_s: total time for which `next_batch` waited for a thread, in seconds.
    """

    def __init__(self, batches: ResumableBatches, workers: int = 2, ahead: int = 4, device: str | torch.device = "cpu"):
        self.batches, self.workers, self.ahead = batches, workers, max(ahead, workers)
        self.waited_s = 0.0
        self._device = torch.device(device)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self._pending: deque[tuple[tuple[int, int], Future[Batch]]] = deque()

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the current epoch, or over the next epoch if the current one is complete."""
        for _ in range(self.batches.left_in_epoch()):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """Return the next batch; after the last batch of an epoch the next epoch begins."""
        place = self.batches.advance()
        if self._pending and self._pending[0][0] != place:
            self._forget()  # the wrapped loader was moved in the meantime
        self._plan(place)
        future = self._pending.popleft()[1]
        started = time.perf_counter()
        batch = future.result()
        self.waited_s += time.perf_counter() - started
        self._plan(self.batches.place_after(place))
        if self._device.type == "cpu":
            return batch
        # PyTorch's pinned-memory allocator does not reuse a block before the copy from it, on this stream, has finished.
        inputs, targets = batch
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def state_dict(self) -> dict:
        """Return the position in the sequence, JSON-able."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state`, with any number of workers; see `ResumableBatches`."""
        self.batches.load_state_dict(state)
        self._forget()

    def close(self) -> None:
        """End the threads."""
        self._forget()
        self._threads.shutdown()

    def _plan(self, place: tuple[int, int]) -> None:
        """Submit the batch of `place` and those after it, up to `ahead` batches, unless they are pending already."""
        following = self.batches.place_after(self._pending[-1][0]) if self._pending else place
        while len(self._pending) < self.ahead:
            self._pending.append((following, self._threads.submit(self._make, following)))
            following = self.batches.place_after(following)

    def _make(self, place: tuple[int, int]) -> Batch:
        inputs, targets = self.batches.batch_at(*place)
        return (inputs, targets) if self._device.type == "cpu" else (inputs.pin_memory(), targets.pin_memory())

    def _forget(self) -> None:
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()

    def __enter__(self) -> "Prefetched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluation_windows(
    tokens: np.ndarray, context: int, stride: int, prefix_id: int, batch_size: int = 1, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """Yield windows in which every token is a target exactly once, with up to `context` tokens before it.

    Windows start `stride` apart; the last one is moved back to end with the stream. Targets of an earlier window are set to
    IGNORE_INDEX, so exactly len(tokens) targets remain, and their losses add up to the negative log likelihood of the
    stream. Before the first token there is only `prefix_id`.

    Args:
        tokens: token ids [tokens].
        context: window length; except near the start, every target sees at least context - stride tokens before it.

    Yields:
        inputs and targets int64 [<= batch_size, min(context, tokens)].

    Raises:
        DataError: the stride would skip tokens, or there are no tokens.
    """
    if not 1 <= stride <= context or not len(tokens):
        raise DataError(
            f"stride {stride} with context {context} on {len(tokens)} tokens cannot score every token once",
            next_step="use 1 <= stride <= context and at least one token",
        )
    stream = torch.from_numpy(np.concatenate([[prefix_id], narrowed(tokens, np.int64, "token stream")])).to(device)
    length = min(context, len(tokens))
    last = len(tokens) - length
    starts = np.append(np.arange(0, last, stride), last)
    scored_until = np.concatenate([[0], starts[:-1] + length])
    steps = torch.arange(length, device=device)
    for first in range(0, len(starts), batch_size):
        begin, done = (on_device(values[first : first + batch_size], stream.device)[:, None] for values in (starts, scored_until))
        index = begin + steps
        yield stream[index], torch.where(index >= done, stream[index + 1], IGNORE_INDEX)


class TokenStream:
    """Reads windows of a token stream that is on the device, or in a file that may exceed the memory.

    Args:
        tokens: token ids [tokens], often a memory map.
        device: device of the windows.
        resident: hold the stream on the device as int32; otherwise windows are read from `tokens` on the host.

    Raises:
        DataError: the stream is not resident and the device is not the CPU, or an id does not fit int32.
    """

    def __init__(self, tokens: np.ndarray, device: str | torch.device, resident: bool):
        self._device = torch.device(device)
        if not resident and self._device.type != "cpu":
            raise DataError(
                f"a token stream in a file gives windows on the CPU only, not on {self._device}",
                next_step="use device='cpu' and let Prefetched copy the batches to the device, or resident=True",
            )
        self._last = len(tokens) - 1
        self._held = torch.from_numpy(narrowed(tokens, np.int32, "token stream")).to(self._device) if resident else None
        self._tokens = tokens

    def windows(self, starts: np.ndarray, length: int) -> Tensor:
        """Return ids int64 [starts, length], from each start on; positions beyond the end repeat the last id."""
        if self._held is None:
            index = np.minimum(starts[:, None] + np.arange(length), self._last)
            return torch.from_numpy(self._tokens[index].astype(np.int64))
        places = on_device(starts, self._device)[:, None] + torch.arange(length, device=self._device)
        return self._held[places.clamp(max=self._last)].long()


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without blocking the host.

    The copy starts from pinned memory. From pageable memory, the host would wait until the device has finished all queued work,
    including the last training step.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _require_equal_parts(records: int, batch_size: int, drop_last: bool, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise DataError(f"rank {rank} of {ranks} does not exist", next_step="use a rank from 0 to the number of ranks - 1")
    if batch_size % ranks:
        raise DataError(
            f"{ranks} ranks do not divide a batch of {batch_size}",
            where="the batch of all ranks together",
            next_step=f"use a batch size that is a multiple of {ranks}, or another number of ranks",
        )
    if not drop_last and records % batch_size % ranks:
        raise DataError(
            f"{ranks} ranks do not divide the last batch of {records % batch_size}",
            where=f"{records} records in batches of {batch_size}",
            next_step="leave the last batch out (drop_last), or use another batch size or number of ranks",
        )
