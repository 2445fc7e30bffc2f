"""Batches made ahead of need by threads, in their order, and how long the loop waited for them all the same."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from hyperion.data.batches.loaders import ResumableBatches

Batch = tuple[Tensor, Tensor]


class Prefetched:
    """Another loader's batches, the same bit for bit whatever the number of workers.

    A batch is a function of its place in the sequence alone, so it does not matter which thread makes it, or when. The state
    is the place of the batch that was handed over last, not of those that lie ready: a run resumes as without threads.

    Args:
        batches: made on the host: windows of a stream that is left in its file, say. Its own place moves along.
        workers: threads that make batches; NumPy and the file system work outside Python's lock.
        ahead: batches that lie ready or are being made.
        device: where the batches are handed over; from pinned memory, without waiting for the copy.

    Attributes:
        waited_s: seconds for which `next_batch` had to wait for a thread, since the loader was made.
    """

    def __init__(self, batches: ResumableBatches, workers: int = 2, ahead: int = 4, device: str | torch.device = "cpu"):
        self.batches, self.workers, self.ahead = batches, workers, max(ahead, workers)
        self.waited_s = 0.0
        self._device = torch.device(device)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self._pending: deque[tuple[tuple[int, int], Future[Batch]]] = deque()

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """What is left of the current epoch, or the next epoch where nothing is left."""
        for _ in range(self.batches.left_in_epoch()):
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """The next batch, across the ends of epochs."""
        place = self.batches.advance()
        if self._pending and self._pending[0][0] != place:
            self._forget()  # the place was moved since
        self._plan(place)
        made = self._pending.popleft()[1]
        asked = time.perf_counter()
        batch = made.result()
        self.waited_s += time.perf_counter() - asked
        self._plan(self.batches.place_after(place))
        if self._device.type == "cpu":
            return batch
        # The allocator of pinned memory keeps a piece until the copy out of it, which is in this stream, is done.
        return tuple(part.to(self._device, non_blocking=True) for part in batch)

    def state_dict(self) -> dict:
        """Where the sequence stands, JSON-able."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state` was taken, with any number of workers; see ResumableBatches."""
        self.batches.load_state_dict(state)
        self._forget()

    def close(self) -> None:
        """End the threads."""
        self._forget()
        self._threads.shutdown()

    def _plan(self, place: tuple[int, int]) -> None:
        """Have threads make the batch of `place` and those after it, as far as none does so yet."""
        following = self.batches.place_after(self._pending[-1][0]) if self._pending else place
        while len(self._pending) < self.ahead:
            self._pending.append((following, self._threads.submit(self._make, following)))
            following = self.batches.place_after(following)

    def _make(self, place: tuple[int, int]) -> Batch:
        batch = self.batches.batch_at(*place)
        return batch if self._device.type == "cpu" else tuple(part.pin_memory() for part in batch)

    def _forget(self) -> None:
        for _, made in self._pending:
            made.cancel()
        self._pending.clear()

    def __enter__(self) -> "Prefetched":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
