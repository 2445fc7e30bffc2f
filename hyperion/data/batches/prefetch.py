"""Prefetch batches with threads, in order, and measure how long the loop waits for them."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from hyperion.data.batches.loaders import ResumableBatches

Batch = tuple[Tensor, Tensor]


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
