"""Write and read the nested state of a model that is distributed over ranks.

Each rank writes its shards as safetensors. Rank 0 writes all other values as JSON.

`agreed` and `on_rank_0` raise an error of one rank on all ranks, so that no rank waits for a rank that has failed. In a single
process, without torch.distributed, they only call the function.

torch.distributed.checkpoint (DCP) writes the shards in its safetensors format. A single process also uses DCP. Therefore the
format is the same for every number of ranks and every layout of the tensors, and a state with one layout can be loaded into any
other layout. The default format of DCP contains a pickled index and files of torch.save, which can run code. The safetensors
format contains neither.
"""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hyperion.checkpoints.states import EARLIER, STATE, CheckpointError, describe, read_tree, reading, to_tree, write_tree
from hyperion.errors import HyperionError, refused_write
from hyperion.untrusted import inner_path, open_regular

SHARDS = "*.safetensors"
NO_GROUP = "torch.distributed is disabled, unavailable or uninitialized"  # warning of DCP if there is no process group


T = TypeVar("T")
# Arguments of a HyperionError. Ranks send these arguments to each other instead of the exception, because not every exception can
# be pickled.
Fault = dict[str, str | None]


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank and the number of ranks, or (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: T) -> list[T]:
    """Return the values of all ranks in rank order, on every rank. All ranks must call this function."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    # all_gather_object overwrites the entries.
    values = [value] * size
    dist.all_gather_object(values, value)
    return values


def agreed(work: Callable[[], T]) -> T:
    """Call `work` on every rank. If it fails on any rank, raise an error on all ranks. All ranks must call this function.

    Args:
        work: a function that contains no collective, so that other ranks do not wait in a collective if it fails here.

    Returns:
        The result of `work` on this rank.

    Raises:
        Exception: in a single process: the exception that `work` raised.
        CheckpointError: with several ranks: the error of the first rank that failed, on all ranks. The error names the ranks
            that failed, unless all ranks failed with the same error.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        if rank_and_size()[1] == 1:
            raise
        error = raised
    # The failed rank also takes part in this collective, so all ranks leave it and then raise together.
    faults = gathered(None if error is None else _fault(error))
    if any(faults):
        raise _first_fault(faults) from error
    return cast(T, result)


def on_rank_0(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 and return its result on every rank. All ranks must call this function.

    Args:
        work: a function whose result can be pickled.

    Raises:
        Exception: in a single process: the exception that `work` raised.
        CheckpointError: with several ranks: the error of rank 0, on all ranks.
    """
    rank, size = rank_and_size()
    if size == 1:
        return work()
    outcome: tuple[T | None, Fault | None] = None, None
    error = None
    if rank == 0:
        try:
            outcome = work(), None
        except Exception as raised:
            error = raised
            outcome = None, _fault(raised)
    # One broadcast carries the result or the error, so no rank waits for a result that never comes.
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    result, fault = box[0]
    if fault is not None:
        raise _error_on_all(fault) from error
    return cast(T, result)


def _fault(error: Exception) -> Fault:
    if isinstance(error, HyperionError):
        return error.as_dict()
    return {"what": f"{type(error).__name__}: {error}", "where": None, "next_step": "read that rank's traceback"}


def _first_fault(faults: list[Fault | None]) -> CheckpointError:
    """Return the error of the first rank that failed. The message names the ranks with this error."""
    failed = {rank: fault for rank, fault in enumerate(faults) if fault is not None}
    first = next(iter(failed.values()))
    if len(failed) == len(faults) and all(fault == first for fault in failed.values()):
        return _error_on_all(first)
    same = [rank for rank, fault in failed.items() if fault["what"] == first["what"]]
    ranks = f"rank {same[0]}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
    return _error_on_all(first | {"what": f"{ranks} of {len(faults)}: {first['what']}"})


def _error_on_all(fault: Fault) -> CheckpointError:
    error = CheckpointError(str(fault["what"]), where=fault["where"], next_step=fault["next_step"])
    error.on_all_ranks = True
    return error


def write_sharded(folder: Path, state: dict[str, Any]) -> None:
    """Write a state into an existing, empty folder. All ranks must call this function with states of the same structure.

    Args:
        folder: folder that all ranks share. Its files are not flushed to disk here; `saving` does that.
        state: a state as for write_state. Each rank writes its own shard of a DTensor. A plain tensor must be the same on all
            ranks and is written once.

    Raises:
        CheckpointError: the state could not be written. The error is raised on all ranks, and names the rank that failed and
            the reason.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    tree = agreed(lambda: to_tree(state, tensors, lambda tensor: _separate(tensor.detach(), storages)))
    # With save_distributed=True, every rank writes its shards to its own files.
    writer = _Writer(str(folder), save_distributed=True)
    _call_dcp(lambda alone: save(tensors, storage_writer=writer, no_dist=alone), folder)
    agreed(writer.raise_error)
    on_rank_0(lambda: write_tree(folder, tree))


def read_sharded(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read a stored state into the tensors of `state`. All ranks must call this function.

    The stored state may have been written with another number of ranks or another layout of the tensors.

    Args:
        folder: folder that `write_sharded` wrote.
        state: a state with the current layout, as for write_sharded. Its tensors are overwritten.

    Returns:
        The stored state. Its tensors are the tensors of `state`, with the stored values.

    Raises:
        CheckpointError: a file is missing or malformed, or names, shapes or dtypes of the tensors differ. The error is raised
            on all ranks. In these cases no tensor is overwritten, unless a file changes while it is read.
    """
    tensors: dict[str, Tensor] = {}
    to_tree(state, tensors, Tensor.detach)
    # All checks come before `load`, because `load` writes into the tensors of the model.
    stored = agreed(lambda: _stored_state(folder, tensors))
    reader = _Reader(str(folder))
    _call_dcp(lambda alone: load(tensors, storage_reader=reader, no_dist=alone), folder)
    agreed(reader.raise_error)
    return stored


class _StoresError:
    """Mixin that stores an error of this rank until all ranks have left DCP. Then `raise_error` raises it inside `agreed`.

    Without this class, DCP would send the error to the other ranks as a pickle, but not every exception can be pickled.
    """

    error: Exception | None = None

    def attempt(self, work: Callable[[], Future]) -> Future:
        try:
            return work()
        except Exception as error:
            self.error = error
            empty: Future = Future()
            empty.set_result([])
            return empty


class _Writer(_StoresError, HuggingFaceStorageWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        return self.attempt(lambda: super(_Writer, self).write_data(plan, planner))

    def raise_error(self) -> None:
        if isinstance(self.error, OSError):
            raise refused_write(
                self.error,
                CheckpointError,
                where=self.path,
                elsewhere="choose another checkpoint folder",
                action="cannot write the tensors",
                unchanged="no checkpoint was written",
            ) from self.error
        if self.error is not None:
            raise self.error


class _Reader(_StoresError, HuggingFaceStorageReader):
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        return self.attempt(lambda: super(_Reader, self).read_data(plan, planner))

    def raise_error(self) -> None:
        if self.error is not None:
            raise CheckpointError(f"cannot read the tensors: {self.error}", where=self.path, next_step=EARLIER) from self.error


def _call_dcp(call: Callable[[bool], object], folder: Path) -> None:
    """Call torch.distributed.checkpoint with `no_dist=True` in a single process.

    DCP raises its own errors on all ranks as a CheckpointException. This class is not a subclass of Exception.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NO_GROUP)
        try:
            call(rank_and_size()[1] == 1)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            fault = CheckpointError(
                f"rank {rank}: {type(cause).__name__}: {cause}", where=folder, next_step="read the traceback of that rank"
            )
            fault.on_all_ranks = True
            raise fault from error


def _separate(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return a contiguous tensor whose storage no other tensor of the state uses, as safetensors requires."""
    tensor = tensor.contiguous()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    place = local.untyped_storage().data_ptr()
    # All empty shards have the address 0, but they share no storage.
    if place in storages and local.numel():
        return tensor.clone()
    storages.add(place)
    return tensor


def _stored_state(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the stored state with the given tensors inserted. Every name, shape and dtype must match the stored tensors."""
    stored = stored_tensors(folder)
    for name in sorted(set(stored) | set(tensors)):
        if name not in tensors:
            raise mismatch(f"{name} is in the checkpoint, but not in this model and optimizer", folder)
        if name not in stored:
            raise mismatch(f"{name} is not in the checkpoint", folder)
        theirs, ours = (stored[name].size, stored[name].properties.dtype), (tensors[name].shape, tensors[name].dtype)
        if theirs != ours:
            raise mismatch(f"{name} is {_format(*theirs)} in the checkpoint and {_format(*ours)} here", folder)
    return read_tree(folder, tensors)


def stored_tensors(folder: Path, others: tuple[str, ...] = (STATE,)) -> dict[str, TensorStorageMetadata]:
    """Return a dict that maps the name of each tensor in a folder written by write_sharded to its shape and dtype.

    Only the headers of files are read.

    Args:
        folder: folder that `write_sharded` wrote.
        others: names of the other files that the folder may contain, which hold no tensors.

    Raises:
        CheckpointError: the folder contains an unknown file, a file is damaged, or the shards of a tensor overlap, leave a gap,
            or have different dtypes.
    """
    with reading(folder, "holds no shards"):
        files = sorted(folder.iterdir())
    if unknown := [path for path in files if path.name not in others and not path.match(SHARDS)]:
        raise CheckpointError(
            f"this file is not part of a checkpoint: {describe(unknown[0])}", where=unknown[0], next_step=EARLIER
        )
    for path in files:
        inner_path(folder, path.name, CheckpointError, EARLIER)
        with reading(path, "holds no tensors"):
            open_regular(path, CheckpointError, EARLIER).close()
            if path.name not in others:
                # Opening reads and checks only the header.
                with safe_open(path, framework="pt"):
                    pass
    with reading(folder, "holds no shards of tensors"):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        # All entries are tensors, because safetensors files contain only tensors.
        stored = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        for index, piece in metadata.storage_data.items():
            if piece.dtype != stored[index.fqn].properties.dtype:
                raise ValueError(f"the shards of {index.fqn} have different dtypes")
        for name, whole in stored.items():
            if not _tile(whole):
                raise ValueError(f"the shards of {name} overlap, or leave a gap in its shape {list(whole.size)}")
    return stored


def _tile(whole: TensorStorageMetadata) -> bool:
    """Return True if the shards cover the tensor exactly once.

    This is the case if the shards have as many elements as the tensor, and no two shards overlap.
    """
    # If an axis is shorter than the number of ranks, some shards are empty.
    shards = sorted((tuple(c.offsets), tuple(c.sizes)) for c in whole.chunks if math.prod(c.sizes))
    if any(len(offset) != len(size) or min(offset, default=0) < 0 for offset, size in shards):
        return False
    if sum(math.prod(size) for _, size in shards) != math.prod(whole.size):
        return False
    for number, (offset, size) in enumerate(shards):
        for other, other_size in shards[number + 1 :]:
            if offset and other[0] >= offset[0] + size[0]:
                break  # no later shard can overlap, because the shards are sorted by start on axis 0
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, other_size, strict=True)):
                return False
    return True


def _format(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def mismatch(what: str, folder: Path) -> CheckpointError:
    """Return the error for a checkpoint that belongs to another model or optimizer."""
    return CheckpointError(
        f"the checkpoint does not fit this model and optimizer: {what}",
        where=folder,
        next_step="use the configuration with which the checkpoint was saved, or choose another checkpoint folder",
    )


def difference(stored: Any, here: Any, path: str = "") -> str:
    """Return the first difference between two nested states in keys, lengths, types or strings, or "" if there is none.

    Tensors are not compared, because read_sharded has compared them. The options of parameter groups depend on the version of
    PyTorch, so only options that both states contain are compared. Their numbers must be equal, because those of the checkpoint
    would replace the others. The learning rate is left out: the schedule sets it in each step.
    """
    if isinstance(here, dict) and isinstance(stored, dict):
        options = path.startswith("optimizer/param_groups/") and "params" in stored
        if not options and (others := sorted(stored.keys() ^ here.keys())):
            return f"{path or 'the state'} has other entries: {others[0]} is only in one of the two"
        pairs = [(f"{path}/{key}" if path else key, stored[key], here[key]) for key in here if key in stored]
    elif isinstance(here, list | tuple) and isinstance(stored, list) and len(here) == len(stored):
        pairs = [(f"{path}/{index}", *pair) for index, pair in enumerate(zip(stored, here, strict=True))]
    elif isinstance(here, Tensor) or isinstance(stored, Tensor):
        fits = isinstance(here, Tensor) and isinstance(stored, Tensor)
        return "" if fits else f"{path} is a tensor in only one of the two"
    else:
        fits = _kind(stored) == _kind(here) or None in (stored, here)
        fixed = isinstance(here, str) or _is_fixed_option(path) and not isinstance(here, bool) and None not in (stored, here)
        fits = fits and not isinstance(stored, dict | list) and (not fixed or stored == here)
        return "" if fits else f"{path} is {stored!r:.80} in the checkpoint and {here!r:.80} here"
    return next((found for name, theirs, ours in pairs if (found := difference(theirs, ours, name))), "")


def _is_fixed_option(path: str) -> bool:
    """Return True for a number in the options of a parameter group, except the learning rates and the parameters' numbers."""
    parts = path.split("/")
    return parts[:2] == ["optimizer", "param_groups"] and len(parts) > 3 and parts[3] not in ("lr", "initial_lr", "params")


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def non_finite_tensor(state: Any) -> str | None:
    """Return the path of the first tensor in a nested state with an infinity or a NaN, or None if all tensors are finite.

    Only floating-point tensors are checked. Of a sharded tensor only the shard of this rank is checked. The function waits for
    the device once.
    """
    tensors: list[tuple[str, Tensor]] = []
    _collect("", state, tensors)
    if not tensors:
        return None
    device = tensors[0][1].device  # tensors may be on several devices: an optimizer may keep its step counters on the CPU
    # Transfer the results of all tensors to the host at once. Testing each tensor separately would wait for the device each time.
    finite = torch.stack([tensor.isfinite().all().to(device) for _, tensor in tensors]).tolist()
    return next((path for (path, _), ok in zip(tensors, finite, strict=True) if not ok), None)


def require_finite(state: dict[str, Any], where: object, kind: type[HyperionError], next_step: str) -> None:
    """Check that all tensors in the entries "model" and "optimizer" of a state are finite.

    Args:
        state: nested state of a model and an optimizer.
        where: value for the field `where` of the error.
        kind: class of the error.
        next_step: value for the field `next_step` of the error.

    Raises:
        HyperionError: a tensor contains an infinity or a NaN. The error has the class `kind` and names the tensor.
    """
    if name := non_finite_tensor({part: state[part] for part in ("model", "optimizer")}):
        raise kind(f"{name} contains an infinity or a NaN", where=where, next_step=next_step)


def _collect(path: str, value: Any, tensors: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.is_floating_point():
            tensors.append((path, local.detach()))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{path}/{key}" if path else str(key), item, tensors)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{path}/{index}", item, tensors)
