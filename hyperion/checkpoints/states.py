"""Write and read the nested state of one process in two files: tensors as safetensors, and all other values as JSON.

Reading these formats cannot execute code.
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
STATE_BYTES = 2**28  # size limit of state.json; the history of a million steps needs a tenth of this size
TENSORS = "tensors.safetensors"
TENSOR_MARK = "$tensor"  # {"$tensor": name} in the JSON file stands for the tensor with this name
EARLIER = "remove this checkpoint; the next start uses the one before it, if there is one"


class CheckpointError(HyperionError):
    """Raised when a checkpoint cannot be written, or must not be used.

    Attributes:
        on_all_ranks: True if every rank raised this error at the same place. In this case no rank waits for another rank.
    """

    on_all_ranks = False


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json and tensors.safetensors into an existing folder.

    The files are not flushed to the disk here; `saving` does that.

    Args:
        folder: folder for the two files.
        state: a nested dict with strings as keys. Values are dicts, lists, tuples (which are read back as lists), None, bool,
            int, finite float, str and tensors.

    Raises:
        CheckpointError: a value has a type that cannot be stored, a float is not finite, or the tensors cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    # Copy each tensor, because safetensors refuses tensors that share storage.
    write_tree(folder, to_tree(state, tensors, own_copy))
    path = folder / TENSORS
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # safetensors raises this error, and not OSError, if the disk is full
        raise CheckpointError(
            f"cannot write the tensors: {error}", where=path, next_step="free disk space, then start again"
        ) from error


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state written by write_state. All tensors are on the CPU.

    Raises:
        CheckpointError: a file is missing or malformed, or the two files do not match. The error names the file and the
            problem.
    """
    return read_tree(folder, read_tensors(inner_path(folder, TENSORS, CheckpointError, EARLIER)))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a safetensors file by name. They are on the CPU.

    Raises:
        CheckpointError: the file is missing, not a regular file, or damaged.
    """
    with reading(path, "holds no tensors"):
        open_regular(path, CheckpointError, EARLIER).close()  # a check, because load_file would block on a named pipe
        return load_file(path)


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Context manager that turns any exception into a CheckpointError that describes the file.

    If a file was modified, the readers of PyTorch, safetensors and JSON can raise any exception, for example MemoryError,
    RecursionError, KeyError or OverflowError. The block should contain only calls of these readers, so that errors of other
    code are not hidden.

    Args:
        path: path of the file that the block reads.
        what: the problem, as the end of a sentence that starts with the name of the file, such as "holds no tensors".
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path.name} {what}: {describe(path, error)}", where=path, next_step=EARLIER) from error


def write_tree(folder: Path, tree: Any) -> None:
    """Write the result of to_tree to state.json.

    Raises:
        CheckpointError: the file would be larger than the limit of read_tree.
    """
    content = json.dumps(tree, allow_nan=False).encode()
    if len(content) > STATE_BYTES:
        raise CheckpointError(
            f"numbers and text need {len(content) / 2**20:.0f} MiB, more than the limit of {STATE_BYTES / 2**20:.0f} MiB",
            where=folder / STATE,
            next_step="store long series as tensors",
        )
    (folder / STATE).write_bytes(content)


def read_tree(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the state in state.json with the given tensors inserted. Each tensor is inserted at exactly one place.

    Raises:
        CheckpointError: state.json is missing, is not a JSON object, contains a number that is not finite, or does not refer
            to exactly the given tensors.
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
    """Convert a nested value to JSON values, and collect its tensors.

    Args:
        value: nested value of dicts, lists, numbers, strings and tensors.
        tensors: for each tensor, `copy(tensor)` is added to this dict. The key is the path to the tensor, such as "model/weight".
        copy: function that prepares a tensor for storage.
        name: path to `value`.

    Raises:
        CheckpointError: a value or a key cannot be stored.
    """
    if isinstance(value, torch.Tensor):
        if not name or name in tensors:  # for example, x and y have the same path in {"a/b": x, "a": {"b": y}}
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
    """Return `tree` with each {"$tensor": name} replaced by the tensor, and add the names of these tensors to `placed`."""
    if isinstance(tree, dict):
        if TENSOR_MARK in tree:
            if tree != {TENSOR_MARK: path}:  # to_tree uses the path to a tensor as its name
                raise ValueError(f"{path!r} contains {tree!r}, but must contain the tensor with the name {path!r}")
            if path not in tensors:
                raise ValueError(f"the tensor {path!r} is not stored")
            placed.add(path)
            return tensors[path]
        return {key: _from_tree(item, tensors, placed, f"{path}/{key}" if path else key) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_from_tree(item, tensors, placed, f"{path}/{index}") for index, item in enumerate(tree)]
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ValueError(f"{path!r} is not a finite number")  # 1e999 is valid JSON, but is read as infinity
    return tree


def describe(path: Path, error: Exception | None = None) -> str:
    """Describe why a file could not be read: the file is missing, it is a pickle, or the reader raised an error."""
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
