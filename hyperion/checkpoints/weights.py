"""Export the weights of a model to one file that other programs can read, and read weights in common formats."""

import os
import pickle
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from hyperion.checkpoints.folders import MANIFEST, sha256_of, verify
from hyperion.checkpoints.sharded import NO_GROUP, on_rank_0, stored_tensors
from hyperion.checkpoints.states import STATE, CheckpointError, own_copy, read_tensors, reading
from hyperion.errors import refused_write
from hyperion.parallel import average_statistics

_MODEL = "model/"
_NESTED = ("model", "state_dict", "model_state_dict")
_NAME_A_FILE = "name a file of weights or a checkpoint folder"


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of the model by name.

    Rank 0 gets the tensors on its CPU. All other ranks get an empty dict.

    The names do not contain prefixes of wrappers such as DDP. All ranks must call this function, because it contains collectives.
    """
    # Average the running statistics of BatchNorm first, because they differ between ranks.
    average_statistics(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return cast(dict[str, Tensor], state)


def export_model(model: nn.Module, path: Path) -> Path:
    """Write the weights of the whole model to one safetensors file. All ranks must call this function; rank 0 writes the file.

    The file is written completely or not at all. It can be read without this library:
    `model.load_state_dict(safetensors.torch.load_file(path))`.

    Args:
        model: the model. It may be sharded or wrapped in DDP.
        path: path of the file, usually with the suffix ".safetensors".

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the file cannot be written. The error is raised on all ranks.
    """
    path = Path(path)
    state = full_state(model)
    on_rank_0(lambda: _write_file(state, path))
    return path


def _write_file(state: dict[str, Tensor], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write to a private folder first. In a shared folder another user could create a link with a predictable name.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as private:
            new = Path(private) / path.name
            save_file({name: own_copy(tensor) for name, tensor in state.items()}, new, metadata={"format": "pt"})
            with new.open("rb") as file:
                # Flush the file before the rename, so that after a crash the final name never belongs to an incomplete file.
                os.fsync(file.fileno())
            new.replace(path)
    except (OSError, SafetensorError) as error:
        cause = (
            error if isinstance(error, OSError) else OSError(str(error))
        )  # if the disk is full, safetensors raises SafetensorError
        raise refused_write(
            cause,
            CheckpointError,
            where=path,
            elsewhere="choose another file",
            action="cannot export the model",
            unchanged="nothing was changed",
        ) from error


@dataclass(frozen=True)
class Weights:
    """The weights of a model, and the file from which they were read.

    Attributes:
        path: the file or checkpoint folder from which the weights were read.
        sha256: hash of the file. For a checkpoint folder, hash of its manifest, which contains the hash of every file.
        tensors: tensors by name, on the CPU.
    """

    path: Path
    sha256: str
    tensors: dict[str, Tensor] = field(repr=False)


def read_weights(path: Path) -> Weights:
    """Read the weights of a model. Code in the file is never executed.

    Args:
        path: a .safetensors file, a checkpoint folder such as step-00000100, or a state dict that torch.save wrote. A
            checkpoint folder is verified first, and only its model is read.

    Raises:
        CheckpointError: the file is missing or damaged, or contains objects other than tensors.
    """
    path = Path(path)
    if path.is_dir():
        verify(path)
        return Weights(path, sha256_of(path / MANIFEST, _NAME_A_FILE), _read_checkpoint(path))
    if not path.is_file():
        raise CheckpointError("there is no such file", where=path, next_step="name a file or a checkpoint folder")
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pickle
    return Weights(path, sha256_of(path, _NAME_A_FILE), read(path))


def _read_checkpoint(folder: Path) -> dict[str, Tensor]:
    stored = stored_tensors(folder, (STATE, MANIFEST))
    metadata = {name: tensor for name, tensor in stored.items() if name.startswith(_MODEL)}
    if not metadata:
        raise CheckpointError("the checkpoint holds no model", where=folder, next_step="name the checkpoint of a training run")
    with warnings.catch_warnings(), reading(folder, "holds no weights"):
        warnings.filterwarnings("ignore", message=NO_GROUP)
        tensors = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in metadata.items()}
        try:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:  # CheckpointException is a BaseException that contains the exceptions of all ranks
            raise ValueError(str(error)) from error
    return {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except CheckpointError as error:
        raise _refusal(path, error.what) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(path, "the pickle contains more than tensors; nothing in it was executed") from error
    except Exception as error:  # the unpickler can raise any exception if the file is not a pickle
        raise _refusal(path, f"it cannot be read as a state dict ({type(error).__name__}: {error})") from error
    for _ in _NESTED:  # limit the number of unwrapping steps, because a pickled dict can contain itself
        if isinstance(state, dict) and (nested := next((name for name in _NESTED if name in state), None)):
            state = state[nested]
    named = isinstance(state, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
    if not named or not state:
        raise _refusal(path, "it is not a state dict (a dictionary of tensors)")
    return state


def _refusal(path: Path, why: str) -> CheckpointError:
    remedy = "save the model's state_dict(), preferably as safetensors"
    return CheckpointError(f"{path.name} holds no weights: {why}", where=path, next_step=remedy)
