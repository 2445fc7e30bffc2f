"""A nested state of many ranks: each rank writes its own shards as safetensors, rank 0 everything else as JSON.

The shards are those of torch.distributed.checkpoint (DCP) in its safetensors form, which one process writes too: there is
one format, whatever the number of ranks and the layout of the tensors, and each can be loaded into any other. DCP's usual
form has its index in a pickle and its objects in torch.save files, which can run code; this one has neither.
"""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hyperion.checkpoints.ranks import agreed, on_rank_0, rank_and_size
from hyperion.checkpoints.states import EARLIER, STATE, CheckpointError, looks_like, read_tree, reading, to_tree, write_tree
from hyperion.errors import refused_write
from hyperion.untrusted import inner_path, open_regular

SHARDS = "*.safetensors"


def write_sharded(folder: Path, state: dict[str, Any]) -> None:
    """Write a state of this layout into an existing, empty folder. All ranks call it with states of the same structure.

    Args:
        folder: one for all ranks; not made durable here (see `saving`).
        state: as for write_state; tensors may be DTensors, of which each rank writes its shard. Plain tensors are taken
            to be the same on all ranks and written once.

    Raises:
        CheckpointError: on all ranks alike; names the rank that could not write, and why.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    tree = agreed(lambda: to_tree(state, tensors, lambda tensor: _apart(tensor.detach(), storages)))
    writer = _Writer(str(folder), save_distributed=True)
    _collectively(lambda alone: dcp.save(tensors, storage_writer=writer, no_dist=alone), folder)
    agreed(writer.outcome)
    on_rank_0(lambda: write_tree(folder, tree))


def read_sharded(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of a state of this layout from a folder that any other layout may have written. All ranks call
    it.

    Args:
        state: as write_sharded would be given it here and now; its tensors are overwritten.

    Returns:
        The stored state, with the tensors of `state`.

    Raises:
        CheckpointError: on all ranks alike: a file is missing or not of its format, or names, shapes or types of the
            tensors differ. Nothing was overwritten unless a file broke while it was read.
    """
    tensors: dict[str, Tensor] = {}
    to_tree(state, tensors, Tensor.detach)
    stored = agreed(lambda: _stored_state(folder, tensors))
    reader = _Reader(str(folder))
    _collectively(lambda alone: dcp.load(tensors, storage_reader=reader, no_dist=alone), folder)
    agreed(reader.outcome)
    return stored


class _KeepsItsError:
    """What fails on one rank within DCP travels to the others as a pickle, which not every error survives. It is kept
    here instead, and told by `agreed` once all ranks have left DCP.
    """

    fault: Exception | None = None

    def attempt(self, work: Callable[[], Future]) -> Future:
        try:
            return work()
        except Exception as error:
            self.fault = error
            nothing: Future = Future()
            nothing.set_result([])
            return nothing


class _Writer(_KeepsItsError, HuggingFaceStorageWriter):
    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future:
        return self.attempt(lambda: super(_Writer, self).write_data(plan, planner))

    def outcome(self) -> None:
        """Raises what went wrong on this rank."""
        if isinstance(self.fault, OSError):
            raise refused_write(
                self.fault,
                CheckpointError,
                where=self.path,
                elsewhere="name another checkpoint folder",
                action="the tensors could not be written",
                kept="no checkpoint was made",
            ) from self.fault
        if self.fault is not None:
            raise self.fault


class _Reader(_KeepsItsError, HuggingFaceStorageReader):
    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future:
        return self.attempt(lambda: super(_Reader, self).read_data(plan, planner))

    def outcome(self) -> None:
        """Raises what went wrong on this rank."""
        if self.fault is not None:
            raise CheckpointError(
                f"the tensors could not be read: {self.fault}", where=self.path, next_step=EARLIER
            ) from self.fault


def _collectively(work: Callable[[bool], object], folder: Path) -> None:
    """Call DCP, told whether this process is alone. Its own errors are raised on all ranks, but not as Exceptions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            work(rank_and_size()[1] == 1)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            told = CheckpointError(
                f"rank {rank}: {type(cause).__name__}: {cause}", where=folder, next_step="read the traceback of that rank"
            )
            told.on_all_ranks = True
            raise told from error


def _apart(tensor: Tensor, storages: set[int]) -> Tensor:
    """The tensor as safetensors wants it: contiguous, and in a storage that no other tensor of the state is in."""
    tensor = tensor.contiguous()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    place = local.untyped_storage().data_ptr()
    if place in storages and local.numel():
        return tensor.clone()
    storages.add(place)
    return tensor


def _stored_state(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The stored state with these tensors in it, once every name, shape and type fits."""
    stored = stored_tensors(folder)
    for name in sorted(set(stored) | set(tensors)):
        if name not in tensors:
            raise _misfit(f"{name} is in the checkpoint, and this model and optimizer have none", folder)
        if name not in stored:
            raise _misfit(f"{name} is not in the checkpoint", folder)
        found, wanted = (stored[name].size, stored[name].properties.dtype), (tensors[name].shape, tensors[name].dtype)
        if found != wanted:
            raise _misfit(f"{name} is {_described(*found)} there and {_described(*wanted)} here", folder)
    return read_tree(folder, tensors)


def stored_tensors(folder: Path, others: tuple[str, ...] = (STATE,)) -> dict[str, TensorStorageMetadata]:
    """Shape and type of each tensor of a folder that write_sharded wrote, from the headers of its files.

    Args:
        others: names of the files that belong there and hold no tensors.

    Raises:
        CheckpointError: another file is there, one is damaged, or the shards of a tensor do not make it up: they overlap,
            leave a part out, or have different types.
    """
    with reading(folder, "holds no shards"):
        found = sorted(folder.iterdir())
    if strange := [path for path in found if path.name not in others and not path.match(SHARDS)]:
        raise CheckpointError(
            f"a file that is no part of a checkpoint: {looks_like(strange[0])}", where=strange[0], next_step=EARLIER
        )
    for path in found:
        inner_path(folder, path.name, CheckpointError, EARLIER)
        with reading(path, "holds no tensors"):
            open_regular(path, CheckpointError, EARLIER).close()
            if path.name not in others:
                with safe_open(path, framework="pt"):
                    pass
    with reading(folder, "holds no shards of tensors"):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        stored = metadata.state_dict_metadata
        for index, piece in metadata.storage_data.items():
            if piece.dtype != stored[index.fqn].properties.dtype:
                raise ValueError(f"the shards of {index.fqn} have different types")
        for name, whole in stored.items():
            if not _tile(whole):
                raise ValueError(f"the shards of {name} overlap, or leave out a part of {list(whole.size)}")
    return stored


def _tile(whole: TensorStorageMetadata) -> bool:
    """Whether the shards cover a tensor once: as many elements as it has, and no two shards meet."""
    shards = sorted((tuple(c.offsets), tuple(c.sizes)) for c in whole.chunks if math.prod(c.sizes))
    if any(len(offset) != len(size) or min(offset, default=0) < 0 for offset, size in shards):
        return False
    if sum(math.prod(size) for _, size in shards) != math.prod(whole.size):
        return False
    for number, (offset, size) in enumerate(shards):
        for other, other_size in shards[number + 1 :]:
            if offset and other[0] >= offset[0] + size[0]:
                break  # sorted by the first axis, which FSDP2 shards: the shards after it begin no earlier
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, other_size, strict=True)):
                return False
    return True


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _misfit(what: str, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint does not fit this model and optimizer: {what}",
        where=folder,
        next_step="use the configuration it was saved with, or another checkpoint folder",
    )
