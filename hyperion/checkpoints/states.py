"""A nested state as two files of one process: tensors as safetensors, everything else as JSON. Neither format can
execute code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hyperion.errors import HyperionError

STATE = "state.json"
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
    path = folder / "tensors.safetensors"
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # a full disk arrives as this, not as OSError
        raise CheckpointError(
            f"the tensors could not be written: {error}", where=path, next_step="free space, then start again"
        ) from error


def read_state(folder: Path) -> dict[str, Any]:
    """The state that write_state wrote, tensors on the CPU.

    Raises:
        CheckpointError: a file is missing or is not of its format; the file and what it looks like are named.
    """
    path = folder / "tensors.safetensors"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} holds no tensors: {looks_like(path, error)}", where=path, next_step=EARLIER
        ) from error
    return read_tree(folder, tensors)


def write_tree(folder: Path, tree: Any) -> None:
    """Write what to_tree made as state.json."""
    (folder / STATE).write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")


def read_tree(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    """The state of state.json with these tensors in their places.

    Raises:
        CheckpointError: it is missing, is no JSON, or names a tensor that is not there.
    """
    path = folder / STATE
    try:
        return _from_tree(json.loads(path.read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path.name} holds no state: {looks_like(path, error)}", where=path, next_step=EARLIER
        ) from error


def to_tree(
    value: Any, tensors: dict[str, torch.Tensor], keep: Callable[[torch.Tensor], torch.Tensor], name: str = ""
) -> Any:
    """`value` as JSON; `keep` of each of its tensors goes into `tensors` under the path that leads to it."""
    if isinstance(value, torch.Tensor):
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
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and abs(value) < float("inf")):
        return value
    raise CheckpointError(
        f"{type(value).__name__} {value!r} cannot be stored",
        where=name,
        next_step="store tensors, finite numbers and text",
    )


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU that shares storage with nothing."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _from_tree(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, dict):
        if set(tree) == {TENSOR_MARK}:
            return tensors[tree[TENSOR_MARK]]
        return {key: _from_tree(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_from_tree(item, tensors) for item in tree]
    return tree


def looks_like(path: Path, error: Exception | None = None) -> str:
    """What a file that could not be read is, in words."""
    if not path.is_file():
        return "the file is missing"
    with path.open("rb") as file:
        start = file.read(4)
    if start[:1] == b"\x80" or start == b"PK\x03\x04":
        return "it is a pickle (or a zip around one), which could run code; it was not opened"
    return f"{type(error).__name__}: {error}" if error else "of an unknown format; it was not opened"
