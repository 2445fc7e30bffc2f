"""A nested state of one process in two files: tensors as safetensors, everything else as JSON.

Neither format can execute code.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hyperion.errors import HyperionError
from hyperion.untrusted import inner_path, open_regular, read_json

STATE = "state.json"
STATE_BYTES = 2**28  # limit of state.json; the history of a million steps takes a tenth of it
TENSORS = "tensors.safetensors"
TENSOR_MARK = "$tensor"  # {"$tensor": name} in the JSON refers to the tensor of that name
EARLIER = "remove this checkpoint; the next start uses the one before it, if there is one"


class CheckpointError(HyperionError):
    """A checkpoint cannot be written, or must not be used.

    Attributes:
        on_all_ranks: True if every rank raised this error at the same place, so that no rank waits for another.
    """

    on_all_ranks = False


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json and tensors.safetensors into an existing folder.

    The files are not flushed to the disk here; `saving` does that.

    Args:
        state: nested dicts with string keys, lists, tuples (read back as lists), None, bool, int, finite float, str and
            tensors.

    Raises:
        CheckpointError: a value has another type, a float is not finite, or the tensors cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    # Copy each tensor, because safetensors refuses tensors that share storage.
    write_tree(folder, to_tree(state, tensors, own_copy))
    path = folder / TENSORS
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # raised for a full disk too, instead of OSError
        raise CheckpointError(
            f"cannot write the tensors: {error}", where=path, next_step="free disk space, then start again"
        ) from error


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state that write_state wrote, with tensors on the CPU.

    Raises:
        CheckpointError: a file is missing or malformed, or the two do not match; names the file and the problem.
    """
    return read_tree(folder, read_tensors(inner_path(folder, TENSORS, CheckpointError, EARLIER)))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file by name, on the CPU.

    Raises:
        CheckpointError: the file is missing, not a regular file, or damaged.
    """
    with reading(path, "holds no tensors"):
        open_regular(path, CheckpointError, EARLIER).close()  # load_file would block on a named pipe
        return load_file(path)


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn any exception inside into a CheckpointError that describes the file.

    A modified file can make the readers of PyTorch, safetensors and JSON raise anything: MemoryError, RecursionError,
    KeyError, OverflowError. Put only calls of these readers inside, none of the caller's own code.

    Args:
        what: the problem, as the predicate of a sentence about the file ("holds no tensors").
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path.name} {what}: {describe(path, error)}", where=path, next_step=EARLIER) from error


def write_tree(folder: Path, tree: Any) -> None:
    """Write the result of to_tree as state.json.

    Raises:
        CheckpointError: it is larger than read_tree accepts.
    """
    content = json.dumps(tree, allow_nan=False).encode()
    if len(content) > STATE_BYTES:
        raise CheckpointError(
            f"numbers and text take {len(content) / 2**20:.0f} MiB, more than {STATE_BYTES / 2**20:.0f} MiB",
            where=folder / STATE,
            next_step="store long series as tensors",
        )
    (folder / STATE).write_bytes(content)


def read_tree(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the state of state.json with the given tensors inserted, each at exactly one place.

    Raises:
        CheckpointError: the file is missing, is not a JSON object, contains a number that is not finite, or refers to
            other tensors.
    """
    path = inner_path(folder, STATE, CheckpointError, EARLIER)
    placed: set[str] = set()
    with reading(path, "holds no state"):
        tree = read_json(path, CheckpointError, EARLIER, STATE_BYTES)
        state = _from_tree(tree, tensors, placed, "")
    if not isinstance(state, dict):
        raise _refusal(path, f"holds a {type(state).__name__} instead of an object")
    if unnamed := sorted(tensors.keys() - placed):
        raise _refusal(path, f"does not refer to the stored tensor {unnamed[0]!r}")
    return state


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name} {what}", where=path, next_step=EARLIER)


def to_tree(value: Any, tensors: dict[str, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """Return `value` as JSON values, and put `copy(tensor)` of each tensor into `tensors` under the path to the tensor.

    Raises:
        CheckpointError: a value or key cannot be stored.
    """
    if isinstance(value, torch.Tensor):
        if not name or name in tensors:  # the keys "a/b" and "a", "b" give one path
            raise CheckpointError(f"two tensors have the path {name!r}", where="state", next_step="use keys without '/'")
        tensors[name] = copy(value)
        return {TENSOR_MARK: name}
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str) or key == TENSOR_MARK]:
            raise CheckpointError(
                f"key {wrong[0]!r} cannot be stored", where=name or "state", next_step="use other strings as keys"
            )
        return {key: to_tree(item, tensors, copy, f"{name}/{key}" if name else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(item, tensors, copy, f"{name}/{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise CheckpointError(
        f"{type(value).__name__} {value!r} cannot be stored", where=name, next_step="store tensors, finite numbers and text"
    )


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU that shares its storage with no other tensor."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _from_tree(tree: Any, tensors: dict[str, torch.Tensor], placed: set[str], path: str) -> Any:
    """Return `tree` with marks replaced by tensors, and add the names of these tensors to `placed`."""
    if isinstance(tree, dict):
        if TENSOR_MARK in tree:
            if tree != {TENSOR_MARK: path}:  # to_tree names each tensor by the path that leads to it
                raise ValueError(f"{path!r} holds {tree!r}, not the tensor of that name")
            if path not in tensors:
                raise ValueError(f"the tensor {path!r} is not stored")
            placed.add(path)
            return tensors[path]
        return {key: _from_tree(item, tensors, placed, f"{path}/{key}" if path else key) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_from_tree(item, tensors, placed, f"{path}/{index}") for index, item in enumerate(tree)]
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ValueError(f"{path!r} is not a finite number")  # 1e999 is valid JSON
    return tree


def describe(path: Path, error: Exception | None = None) -> str:
    """Return a description of a file that could not be read: missing, a pickle, or the error."""
    description = f"{type(error).__name__}: {error}" if error else "the format is unknown; it was not opened"
    try:
        with open_regular(path, CheckpointError, EARLIER) as file:
            start = file.read(4)
    except FileNotFoundError:
        return "the file is missing"
    except (OSError, CheckpointError):  # a folder, a named pipe, or an unreadable file
        return description
    if start[:1] == b"\x80" or start == b"PK\x03\x04":
        return "it is a pickle (or a zip with one), which could run code; it was not opened"
    return description
