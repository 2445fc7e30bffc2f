"""A nested state as two files of one process: tensors as safetensors, everything else as JSON. Neither format can
execute code.
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
STATE_BYTES = 2**28  # numbers and text: a history of millions of steps is a tenth of it
TENSORS = "tensors.safetensors"
TENSOR_MARK = "$tensor"  # {"$tensor": name} in the JSON stands for the tensor of that name
EARLIER = "remove this checkpoint; the one before it is used when there is one"


class CheckpointError(HyperionError):
    """A checkpoint that cannot be written, or must not be used.

    Attributes:
        on_all_ranks: every rank raised it at the same place, so that none waits for another.
    """

    on_all_ranks = False


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write state.json and tensors.safetensors into an existing folder.

    Args:
        folder: where to; not made here and not made durable here (see `saving`).
        state: dicts with string keys, lists, tuples (read back as lists), None, bool, int, finite float, str and
            tensors, nested.

    Raises:
        CheckpointError: a value is none of these, or a float is not finite.
    """
    tensors: dict[str, torch.Tensor] = {}
    # A copy of its own of each: safetensors refuses tensors that share storage, and training goes on while bytes are
    # written.
    write_tree(folder, to_tree(state, tensors, own_copy))
    path = folder / TENSORS
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # a full disk arrives as this, not as OSError
        raise CheckpointError(
            f"the tensors could not be written: {error}", where=path, next_step="free space, then start again"
        ) from error


def read_state(folder: Path) -> dict[str, Any]:
    """The state that write_state wrote, tensors on the CPU.

    Raises:
        CheckpointError: a file is missing or is not of its format, or the two do not belong together; the file and what
            it looks like are named.
    """
    return read_tree(folder, read_tensors(inner_path(folder, TENSORS, CheckpointError, EARLIER)))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file by name, on the CPU.

    Raises:
        CheckpointError: it is missing, is not a regular file, or is damaged.
    """
    with reading(path, "holds no tensors"):
        open_regular(path, CheckpointError, EARLIER).close()  # load_file would wait for the writer of a named pipe
        return load_file(path)


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Raise a CheckpointError that says what the file looks like for whatever goes wrong inside.

    A file that somebody has edited makes the readers of PyTorch, safetensors and JSON fail in any way: MemoryError,
    RecursionError, KeyError, OverflowError. Calls of these readers alone belong inside, no code of the caller.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path.name} {what}: {looks_like(path, error)}", where=path, next_step=EARLIER) from error


def write_tree(folder: Path, tree: Any) -> None:
    """Write what to_tree made as state.json.

    Raises:
        CheckpointError: it is larger than what read_tree accepts.
    """
    content = json.dumps(tree, allow_nan=False).encode()
    if len(content) > STATE_BYTES:
        raise CheckpointError(
            f"numbers and text of {len(content) / 2**20:.0f} MiB, more than {STATE_BYTES / 2**20:.0f} MiB",
            where=folder / STATE,
            next_step="store long series as tensors",
        )
    (folder / STATE).write_bytes(content)


def read_tree(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """The state of state.json with these tensors in their places, each in exactly one.

    Raises:
        CheckpointError: it is missing, is no JSON object, holds a number that is not finite, or names other tensors.
    """
    path = inner_path(folder, STATE, CheckpointError, EARLIER)
    placed: set[str] = set()
    with reading(path, "holds no state"):
        tree = read_json(path, CheckpointError, EARLIER, STATE_BYTES)
        state = _from_tree(tree, tensors, placed, "")
    if not isinstance(state, dict):
        raise _refused(path, f"holds a {type(state).__name__} instead of an object")
    if unnamed := sorted(tensors.keys() - placed):
        raise _refused(path, f"names no place for the tensor {unnamed[0]!r}, which is stored")
    return state


def _refused(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name} {what}", where=path, next_step=EARLIER)


def to_tree(value: Any, tensors: dict[str, torch.Tensor], keep: Callable[[torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """`value` as JSON; `keep` of each of its tensors goes into `tensors` under the path that leads to it."""
    if isinstance(value, torch.Tensor):
        if not name or name in tensors:  # the keys "a/b" and "a", "b" give one path
            raise CheckpointError(f"two tensors of one path {name!r}", where="state", next_step="use keys without '/'")
        tensors[name] = keep(value)
        return {TENSOR_MARK: name}
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str) or key == TENSOR_MARK]:
            raise CheckpointError(
                f"key {wrong[0]!r} cannot be stored", where=name or "state", next_step="use other strings as keys"
            )
        return {key: to_tree(item, tensors, keep, f"{name}/{key}" if name else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(item, tensors, keep, f"{name}/{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise CheckpointError(
        f"{type(value).__name__} {value!r} cannot be stored", where=name, next_step="store tensors, finite numbers and text"
    )


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU that shares storage with nothing."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _from_tree(tree: Any, tensors: dict[str, torch.Tensor], placed: set[str], path: str) -> Any:
    """`tree` with tensors for their marks; the names of these tensors are added to `placed`."""
    if isinstance(tree, dict):
        if TENSOR_MARK in tree:
            if tree != {TENSOR_MARK: path}:  # to_tree names each tensor by the path that leads to it
                raise ValueError(f"the place {path!r} holds {tree!r}, not the tensor of its name")
            if path not in tensors:
                raise ValueError(f"the tensor {path!r} is not stored")
            placed.add(path)
            return tensors[path]
        return {key: _from_tree(item, tensors, placed, f"{path}/{key}" if path else key) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_from_tree(item, tensors, placed, f"{path}/{index}") for index, item in enumerate(tree)]
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ValueError(f"{path!r} is no finite number")  # 1e999 is JSON
    return tree


def looks_like(path: Path, error: Exception | None = None) -> str:
    """What a file that could not be read is, in words."""
    told = f"{type(error).__name__}: {error}" if error else "of an unknown format; it was not opened"
    try:
        with open_regular(path, CheckpointError, EARLIER) as file:
            start = file.read(4)
    except FileNotFoundError:
        return "the file is missing"
    except (OSError, CheckpointError):  # a folder, a named pipe, or nothing that may be read
        return told
    if start[:1] == b"\x80" or start == b"PK\x03\x04":
        return "it is a pickle (or a zip around one), which could run code; it was not opened"
    return told
