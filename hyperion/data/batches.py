"""Loaders that build batches of tokens on the device in a deterministic order. A training run can resume exactly at any batch.

There are three loaders. A row of a batch is a window of a token stream (`LanguageBatches`), a padded line of text
(`PaddedBatches`), or an instruction with its completion (`InstructionBatches`). `Prefetched` wraps any of these loaders and
builds its batches in threads.
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
WIDTH_MULTIPLE = 8  # rounding widths up to a multiple of 8 makes matrix units faster and gives fewer different shapes


class ResumableBatches(ABC):
    """An endless sequence of batches in epochs. Each batch depends only on the seed, the epoch and the position in the epoch.

    With R ranks, each global batch is divided into R equal parts of consecutive examples, and rank r gets part r. The position in
    the sequence does not depend on the number of ranks, so a training run can resume on another number of ranks.
    """

    shuffle = True  # if True, every epoch has a new order; if False, every epoch has the order of the records

    def __init__(self, records: int, batch_size: int, seed: int, drop_last: bool, rank: int, ranks: int):
        _require_equal_parts(records, batch_size, drop_last, rank, ranks)
        self.batch_size, self.seed, self.epoch, self.position = batch_size, seed, 0, 0
        self.records, self.rank, self.ranks = records, rank, ranks
        self._orders: dict[int, np.ndarray] = {}
        # Several threads of `Prefetched` may need the order of the same epoch at the same time. The lock lets only one of them
        # draw it.
        self._drawing = threading.Lock()
        # -(-a // b) is the quotient rounded up.
        self.batches_per_epoch = records // batch_size if drop_last else -(-records // batch_size)
        if self.batches_per_epoch < 1:
            raise DataError(
                f"{records} records do not fill a batch of {batch_size}", next_step="use a smaller batch, or keep the last batch"
            )

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the current epoch, or over the next epoch if the current one is complete."""
        for _ in range(self.left_in_epoch()):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """Return the next batch. After the last batch of an epoch, the next epoch begins."""
        return self.batch_at(*self.advance())

    def left_in_epoch(self) -> int:
        """Return the number of remaining batches in the current epoch, or in the next epoch if the current one is complete."""
        return self.batches_per_epoch - self.position % self.batches_per_epoch

    def advance(self) -> tuple[int, int]:
        """Return the epoch and the position of the next batch, and move the position to the batch after it."""
        # Begin a new epoch here and not after the last batch of an epoch, because `left_in_epoch` must stay correct between two
        # calls.
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        return self.epoch, self.position - 1

    def place_after(self, place: tuple[int, int]) -> tuple[int, int]:
        """Return the (epoch, position) of the batch that follows the batch at `place`, which is also a pair (epoch, position)."""
        epoch, position = place
        return (epoch, position + 1) if position + 1 < self.batches_per_epoch else (epoch + 1, 0)

    def batch_at(self, epoch: int, position: int) -> Batch:
        """Return this rank's part of a batch, without changing the position in the sequence."""
        return self._batch(epoch, position)

    def state_dict(self) -> dict:
        """Return the position in the sequence as a JSON-serializable dict.

        The end of an epoch is stored as the start of the next epoch.
        """
        ended = self.position == self.batches_per_epoch
        epoch, position = (self.epoch + 1, 0) if ended else (self.epoch, self.position)
        return {"epoch": epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state`, which may come from a run with another number of ranks.

        Raises:
            DataError: the state was stored with other data, another batch size or another seed.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise DataError(
                    f"the loader state has {key} {state.get(key)}, but this loader has {key} {mine}",
                    next_step="resume with the data, batch size and seed of the checkpoint",
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def examples(self, epoch: int) -> np.ndarray:
        """Return the examples of this rank in an epoch, in order.

        An example is an int64 number. Depending on the loader, it is the start of a window in the token stream, the index of a
        row, or the index of an image.
        """
        return np.concatenate([self._examples(epoch, position) for position in range(self.batches_per_epoch)])

    def examples_of_all_ranks(self, epoch: int) -> np.ndarray:
        """Return the examples of all ranks in an epoch, in order. They do not depend on the number of ranks."""
        return np.concatenate([self._whole_batch(epoch, position) for position in range(self.batches_per_epoch)])

    def _examples(self, epoch: int, position: int) -> np.ndarray:
        """Return this rank's examples of one batch."""
        whole = self._whole_batch(epoch, position)
        return whole[self._part(len(whole))]

    def _whole_batch(self, epoch: int, position: int) -> np.ndarray:
        """Return the examples of one global batch, including those of the other ranks."""
        return self._ordered(epoch)[position * self.batch_size : (position + 1) * self.batch_size]

    def _ordered(self, epoch: int) -> np.ndarray:
        """Return all examples of an epoch in order.

        The orders of two epochs are cached, because prefetching threads may already build batches of the next epoch.
        """
        with self._drawing:
            if epoch not in self._orders:
                # Keep the newest order known so far, because batches of the previous epoch may still be needed.
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
        """Return the examples of an epoch in order. The order must depend only on the epoch and the seed."""
        if not self.shuffle:
            return np.arange(self.records)
        # The pair (seed, epoch) gives each epoch its own random stream, so the order of an epoch can be drawn without drawing
        # those of earlier epochs.
        return np.random.default_rng((self.seed, epoch)).permutation(self.records)

    @abstractmethod
    def _batch(self, epoch: int, position: int) -> Batch:
        """Return this rank's part of a batch. The batch must depend only on the epoch, the position and the seed."""


class LanguageBatches(ResumableBatches):
    """Batches of shuffled windows of a token stream.

    Inputs and targets are int64 [batch, sequence_length]. The target of a position is the next token of the stream.

    In each epoch, the stream is cut from a new random offset into disjoint windows of sequence_length + 1 tokens, and the windows
    are shuffled. The last token of a window is only a target. An epoch omits the windows of an incomplete batch, and the tokens
    of at most two windows. Other tokens are omitted in each epoch.

    The offset is random because in the synthetic text all lines have 16 tokens. If windows always started at multiples of
    sequence_length, and sequence_length were a multiple of 16, all windows would start at the same position in a line. A model
    would then learn the positions of the newlines.

    Args:
        tokens: token ids [tokens].
        sequence_length: number of inputs in a window.
        batch_size: number of windows in a global batch.
        seed: seed of the offsets and of the order of the windows.
        device: device of the batches.
        rank, ranks: rank of this process, and number of ranks that share each batch. For an evaluation in which every rank needs
            whole batches, keep the defaults.
        resident: if True, keep the tokens on the device. If False, they stay in their file; see `TokenStream`.

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
        # The random offset skips up to sequence_length tokens, and the windows must fit into the rest of the stream.
        if np.ndim(tokens) != 1 or sequence_length < 1 or len(tokens) <= 2 * sequence_length:
            raise DataError(
                f"tokens of shape {np.shape(tokens)} have no window of {sequence_length + 1} tokens after a random offset",
                where="LanguageBatches",
                next_step="pass one stream of token ids, a shorter sequence_length, or more text",
            )
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
        # Slices of rows are not contiguous, and later calls such as `reshape(-1)` would copy them in every step.
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class PaddedBatches(ResumableBatches):
    """Batches of shuffled lines of text. Each row contains one line, which is truncated or padded to the length of the row.

    Inputs and targets are int64 [batch, sequence_length]. A target is the next token of the line. A position without a next
    token has the target IGNORE_INDEX, so padding does not change the loss. The number of tokens in a batch is the number of
    targets that are not IGNORE_INDEX.

    Args:
        tokens: token ids [tokens].
        samples: int64 [samples, 2]. For each line, its start in `tokens` and its number of tokens.
        sequence_length: number of positions in a row.
        batch_size: number of rows in a global batch.
        padding_id: token id of the padding.
        seed: seed of the order of the lines.
        device: device of the batches.
        resident: if True, keep the tokens on the device. If False, they stay in their file; see `TokenStream`.
        rank, ranks: rank of this process, and number of ranks that share each batch.

    Attributes:
        padding: numbers of tokens, padding positions and truncated tokens, summed over all rows.

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
        # A window may extend beyond the end of its line. The mask below replaces the tokens of later lines by padding.
        windows = self._stream.windows(starts, self.sequence_length + 1)
        places = torch.arange(self.sequence_length + 1, device=windows.device)
        outside = places >= on_device(sizes.copy(), windows.device)[:, None]
        # The input at position t is outside its line if t >= size. Its target is the token at t + 1, so the mask is shifted like
        # the windows.
        inputs = windows[:, :-1].masked_fill(outside[:, :-1], self.padding_id)
        return inputs, windows[:, 1:].masked_fill(outside[:, 1:], IGNORE_INDEX)


class InstructionBatches(ResumableBatches):
    """Batches of instructions with their completions, one instruction per row.

    Inputs and targets are int64 [batch, width]. The targets of prompts and padding are IGNORE_INDEX. The width is the length of
    the longest row in the global batch, rounded up to a multiple of WIDTH_MULTIPLE, so it does not depend on the number of ranks.

    Args:
        completions: rows from `tokenize_completions`. They are copied to the device.
        batch_size: number of rows in a global batch.
        seed: seed of the order of the rows.
        shuffle: if True, every epoch has a new order. If False, every epoch has the order of the rows, as an evaluation needs.
        drop_last: if True, omit the last batch of an epoch if it is incomplete.
        device: device of the batches.
        rank, ranks: rank of this process, and number of ranks that share each batch. For an evaluation in which every rank needs
            whole batches, keep the defaults.

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
        # The width is computed from the global batch, so that the shapes are equal on all ranks.
        longest = int(self._sizes[self._whole_batch(epoch, position)].max())
        width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, self._inputs.shape[1])
        own = on_device(self._examples(epoch, position), self._inputs.device)
        # The rows are stored as int32 to halve the memory. Convert them here, because embeddings and losses need int64.
        return self._inputs[own, :width].long(), self._targets[own, :width].long()


class Prefetched:
    """Loader that builds the batches of another loader in threads, before they are needed.

    The batches are bitwise equal to the loader's own batches for any number of threads, because a batch depends only on its
    position in the sequence. The state is the position after the last returned batch, without prefetched batches, so a training
    run resumes at the same batch as without threads.

    Args:
        batches: loader on the host, for example a loader that reads windows from a file. `next_batch` also advances the position
            of this loader.
        workers: number of threads. NumPy and file reads release Python's global interpreter lock, so threads run in parallel.
        ahead: maximum number of batches that are ready or being built. It must be at least `workers`.
        device: device of the returned batches. They are copied from pinned memory, and the host does not wait for the copy.

    Attributes:
        waited_s: total seconds that `next_batch` has waited for threads.
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
        """Return the next batch. After the last batch of an epoch, the next epoch begins."""
        place = self.batches.advance()
        if self._pending and self._pending[0][0] != place:
            self._forget()  # the position of the wrapped loader has changed since the last call
        # `_plan` does nothing if the queue is full. After a reset of the position, it starts building the batch at `place`.
        self._plan(place)
        future = self._pending.popleft()[1]
        # If the batch is ready, there is almost no wait. A long wait means that the loader is slower than the training step.
        started = time.perf_counter()
        batch = future.result()
        self.waited_s += time.perf_counter() - started
        # One place in the queue is free now, so start building another batch.
        self._plan(self.batches.place_after(place))
        if self._device.type == "cpu":
            return batch
        # The copy may still be running when this method returns. PyTorch's allocator does not reuse the pinned memory before
        # copies from it on this stream have finished.
        inputs, targets = batch
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def state_dict(self) -> dict:
        """Return the position in the sequence as a JSON-serializable dict."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state`, which does not depend on the number of workers. See `ResumableBatches.load_state_dict`."""
        self.batches.load_state_dict(state)
        self._forget()

    def close(self) -> None:
        """End the threads."""
        self._forget()
        self._threads.shutdown()

    def _plan(self, place: tuple[int, int]) -> None:
        """Start building batches until the queue contains `ahead` batches.

        If the queue is empty, its first batch is the one at `place`.
        """
        following = self.batches.place_after(self._pending[-1][0]) if self._pending else place
        while len(self._pending) < self.ahead:
            self._pending.append((following, self._threads.submit(self._make, following)))
            following = self.batches.place_after(following)

    def _make(self, place: tuple[int, int]) -> Batch:
        inputs, targets = self.batches.batch_at(*place)
        # Pinning copies the batch, so it happens in the thread and not in the training loop.
        return (inputs, targets) if self._device.type == "cpu" else (inputs.pin_memory(), targets.pin_memory())

    def _forget(self) -> None:
        for _, future in self._pending:
            # A batch that is already being built is completed but not used. It changes no state of the loader.
            future.cancel()
        self._pending.clear()

    def __enter__(self) -> "Prefetched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluation_windows(
    tokens: np.ndarray, context: int, stride: int, prefix_id: int, batch_size: int = 1, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """Yield windows of a token stream in which every token is a target exactly once.

    Neighbouring windows start `stride` tokens apart. The last window is moved back so that it ends with the stream. Targets that
    an earlier window already contains are set to IGNORE_INDEX, so exactly len(tokens) targets remain, and the sum of their losses
    is the negative log-likelihood of the stream.

    Args:
        tokens: token ids [tokens].
        context: number of inputs in a window. Except near the start of the stream, at least context - stride tokens precede every
            target in its window.
        stride: distance between the starts of two neighbouring windows, in tokens.
        prefix_id: token id of the input before the first token of the stream.
        batch_size: maximum number of windows in a batch.
        device: device of the windows.

    Yields:
        (inputs, targets), each int64 [at most batch_size, min(context, len(tokens))].

    Raises:
        DataError: the stride is larger than the context and would skip tokens, the stride is below 1, or there are no tokens.
    """
    if not 1 <= stride <= context or not len(tokens):
        raise DataError(
            f"windows with stride {stride} and context {context} cannot score every token once ({len(tokens)} tokens)",
            next_step="use 1 <= stride <= context and at least one token",
        )
    # stream[i] is the input whose target is stream[i + 1] = tokens[i].
    stream = torch.from_numpy(np.concatenate([[prefix_id], narrowed(tokens, np.int64, "token stream")])).to(device)
    length = min(context, len(tokens))
    last = len(tokens) - length
    # The last window starts at `last`, even if this is not a multiple of the stride.
    starts = np.append(np.arange(0, last, stride), last)
    # Index of the first target that no earlier window has scored, which is the end of the previous window.
    scored_until = np.concatenate([[0], starts[:-1] + length])
    steps = torch.arange(length, device=device)
    for first in range(0, len(starts), batch_size):
        begin, done = (on_device(values[first : first + batch_size], stream.device)[:, None] for values in (starts, scored_until))
        index = begin + steps
        yield stream[index], torch.where(index >= done, stream[index + 1], IGNORE_INDEX)


class TokenStream:
    """Reads windows of a token stream, which is stored on the device or in a file. The file may be larger than the memory.

    Args:
        tokens: token ids [tokens], often a memory map of a file.
        device: device of the windows.
        resident: if True, keep the stream on the device as int32. If False, read windows from `tokens` on the host.

    Raises:
        DataError: the stream is not resident and the device is not the CPU, or an id does not fit int32.
    """

    def __init__(self, tokens: np.ndarray, device: str | torch.device, resident: bool):
        self._device = torch.device(device)
        if not resident and self._device.type != "cpu":
            raise DataError(
                f"windows of a token stream in a file are on the CPU only, not on {self._device}",
                next_step="use device='cpu' and let Prefetched copy the batches to the device, or resident=True",
            )
        self._last = len(tokens) - 1
        self._held = torch.from_numpy(narrowed(tokens, np.int32, "token stream")).to(self._device) if resident else None
        self._tokens = tokens

    def windows(self, starts: np.ndarray, length: int) -> Tensor:
        """Return windows of token ids, int64 [starts, length]. Positions after the end of the stream repeat the last id."""
        if self._held is None:
            index = np.minimum(starts[:, None] + np.arange(length), self._last)
            # Indexing a memory map reads only the required pages, and returns a copy in memory.
            return torch.from_numpy(self._tokens[index].astype(np.int64))
        places = on_device(starts, self._device)[:, None] + torch.arange(length, device=self._device)
        return self._held[places.clamp(max=self._last)].long()


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without blocking the host.

    The array is first copied to pinned memory. With a copy from pageable memory, the host would wait until the device has
    finished all queued work, including the last training step.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _require_equal_parts(records: int, batch_size: int, drop_last: bool, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise DataError(f"rank {rank} of {ranks} does not exist", next_step="use a rank from 0 to the number of ranks - 1")
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}", where="the loader", next_step="use a batch size of at least 1")
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
            next_step="leave the last batch out (drop_last=True), or use another batch size or number of ranks",
        )
