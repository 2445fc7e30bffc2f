"""Batches on the device: deterministic order from a seed, resumed bit for bit from an epoch and a position."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch

from hyperion.data.batches.packing import IGNORE_INDEX
from hyperion.data.batches.token_stream import TokenStream, on_device
from hyperion.data.store.array_files import narrowed
from hyperion.data.store.faults import DataError


class ResumableBatches(ABC):
    """An endless sequence of batches in epochs: (seed, epoch, position) alone decides the next batch.

    On many ranks that is the batch of all ranks together, and each gets its part: rank r of R the r-th of R equal runs of
    consecutive examples. Where the sequence stands does not depend on the number of ranks.
    """

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
        """Batches in an epoch."""
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is left of the current epoch, or the next epoch where nothing is left."""
        for _ in range(self.left_in_epoch()):
            yield self.next_batch()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch, across the ends of epochs."""
        return self.batch_at(*self.advance())

    def left_in_epoch(self) -> int:
        """Batches left of the current epoch, or those of the next one where nothing is left."""
        return self.batches_per_epoch - self.position % self.batches_per_epoch

    def advance(self) -> tuple[int, int]:
        """Epoch and position of the next batch; from now on the one after it is the next."""
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        return self.epoch, self.position - 1

    def place_after(self, place: tuple[int, int]) -> tuple[int, int]:
        """Epoch and position of the batch after that of `place`."""
        epoch, position = place
        return (epoch, position + 1) if position + 1 < self.batches_per_epoch else (epoch + 1, 0)

    def batch_at(self, epoch: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the batch of a place, whatever was asked for before."""
        return self._batch(epoch, position)

    def state_dict(self) -> dict:
        """Where the sequence stands, JSON-able; the end of an epoch is the start of the next one."""
        ended = self.position == self.batches_per_epoch
        epoch, position = (self.epoch + 1, 0) if ended else (self.epoch, self.position)
        return {"epoch": epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state` was taken, on any number of ranks.

        Raises:
            DataError: the state belongs to other data, another batch size or another seed.
        """
        for key, mine in self._identity().items():
            if state.get(key) != mine:
                raise DataError(
                    f"loader state has {key} {state.get(key)}, this loader has {mine}",
                    next_step="resume with the data, batch size and seed of the checkpoint",
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def examples(self, epoch: int) -> np.ndarray:
        """Which examples this rank gets in an epoch, in order: starts of windows in the stream, places of images in the
        set. Those of all ranks together are those of one device.
        """
        return np.concatenate([self._examples(epoch, position) for position in range(self.batches_per_epoch)])

    def examples_of_all_ranks(self, epoch: int) -> np.ndarray:
        """Which examples the ranks get together in an epoch, in order: those of one device, whatever the ranks are."""
        return np.concatenate([self._whole_batch(epoch, position) for position in range(self.batches_per_epoch)])

    def _examples(self, epoch: int, position: int) -> np.ndarray:
        """This rank's examples of one batch."""
        whole = self._whole_batch(epoch, position)
        return whole[self._part(len(whole))]

    def _whole_batch(self, epoch: int, position: int) -> np.ndarray:
        """The examples of one batch, of all ranks."""
        return self._ordered(epoch)[position * self.batch_size : (position + 1) * self.batch_size]

    def _ordered(self, epoch: int) -> np.ndarray:
        """The order of an epoch, drawn once; two are kept, since threads may be ahead in the next one."""
        with self._drawing:
            if epoch not in self._orders:
                latest = list(self._orders.items())[-1:]
                self._orders = dict(latest) | {epoch: self._order(epoch)}
            return self._orders[epoch]

    def _identity(self) -> dict:
        return {"records": self.records, "batch_size": self.batch_size, "seed": self.seed}

    def _part(self, batch: int) -> slice:
        """Where this rank's examples stand among the `batch` examples of a whole batch."""
        size = batch // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    @abstractmethod
    def _order(self, epoch: int) -> np.ndarray:
        """The examples of an epoch in their order, a function of it and the seed."""

    @abstractmethod
    def _batch(self, epoch: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the batch at a position of an epoch, a function of both and the seed."""


class LanguageBatches(ResumableBatches):
    """Shuffled windows of a token stream: inputs and targets int64 [batch, length], targets one token ahead.

    Each epoch cuts it into windows of sequence_length + 1 tokens of their own (the last one
    is only a target) from a new random offset, and shuffles them; at most two windows' worth of tokens and the windows
    that fill no whole batch are left out, others each epoch. Windows that lay sequence_length apart would all start at
    the same place of a line in text whose lines have a length that divides it (the synthetic text: 16), and a model would
    learn the places of newlines instead of the text.

    Args:
        tokens: token ids [tokens].
        batch_size: windows in a batch, of all ranks together.
        rank, ranks: this process's part of each batch; evaluation takes whole batches, on every rank.
        resident: hold the tokens on the device; else they stay in their file, see TokenStream.

    Raises:
        DataError: too few tokens for one batch, or a batch that the ranks do not divide.
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
        """Target tokens in every batch, of all ranks together."""
        return self.batch_size * self.sequence_length

    def _identity(self) -> dict:
        return {**super()._identity(), "sequence_length": self.sequence_length}

    def _order(self, epoch: int) -> np.ndarray:
        generator, own = np.random.default_rng((self.seed, epoch)), self.sequence_length + 1
        return generator.integers(own) + own * generator.permutation(self.records)

    def _batch(self, epoch: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self._stream.windows(self._examples(epoch, position), self.sequence_length + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _require_equal_parts(records: int, batch_size: int, drop_last: bool, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise DataError(f"there is no rank {rank} of {ranks}", next_step="use a rank from 0 to the number of ranks - 1")
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


def evaluation_windows(
    tokens: np.ndarray, context: int, stride: int, prefix_id: int, batch_size: int = 1, device: str | torch.device = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows that score every token exactly once, each with up to `context` tokens before it.

    Windows start `stride` apart (the last one is moved back to end with the stream); a target that an earlier window
    has scored is IGNORE_INDEX. Only the first token has nothing before it but `prefix_id`. Total negative log
    likelihood = sum over all targets that are not IGNORE_INDEX, of which there are exactly len(tokens).

    Args:
        tokens: token ids [tokens].
        context: window length; every token but those near the start sees at least context - stride tokens before it.

    Yields:
        inputs and targets int64 [<= batch_size, min(context, tokens)].

    Raises:
        DataError: a stride that would leave tokens out, or no tokens.
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
