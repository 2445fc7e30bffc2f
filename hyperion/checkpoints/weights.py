"""A model's weights from whatever file holds them: safetensors, a checkpoint of this library, or a state dict of torch.save."""

import hashlib
import pickle
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hyperion.checkpoints.folders import MANIFEST, verify
from hyperion.checkpoints.sharded import stored_tensors
from hyperion.checkpoints.states import STATE, CheckpointError, read_tensors, reading
from hyperion.untrusted import open_regular

_MODEL = "model/"
_NESTED = ("model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class Weights:
    """Tensors by name, on the CPU.

    Attributes:
        path: the file or checkpoint folder that they were read from.
        sha256: of the file; of a checkpoint folder that of its manifest, which holds the hash of every file.
    """

    path: Path
    sha256: str
    tensors: dict[str, torch.Tensor] = field(repr=False)


def read_weights(path: Path) -> Weights:
    """Read a model's weights. Nothing in the file is executed.

    Args:
        path: a .safetensors file; a checkpoint folder (step-00000100), whose files are verified first and of which the
            model is read and the optimizer left alone; any other file is taken for a state dict that torch.save wrote.

    Raises:
        CheckpointError: it is missing, damaged, or holds something other than tensors.
    """
    path = Path(path)
    if path.is_dir():
        verify(path)
        return Weights(path, _sha256(path / MANIFEST), _of_checkpoint(path))
    if not path.is_file():
        raise CheckpointError("there is no such file", where=path, next_step="name a file or a checkpoint folder")
    return Weights(path, _sha256(path), _of_safetensors(path) if path.suffix == ".safetensors" else _of_pickle(path))


def _refused(path: Path, why: str) -> CheckpointError:
    remedy = "save the model's state_dict(), as safetensors if you can"
    return CheckpointError(f"{path.name} holds no weights: {why}", where=path, next_step=remedy)


def _of_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    stored = {name: told for name, told in stored_tensors(folder, (STATE, MANIFEST)).items() if name.startswith(_MODEL)}
    if not stored:
        raise CheckpointError("the checkpoint holds no model", where=folder, next_step="name one of a training run")
    with warnings.catch_warnings(), reading(folder, "holds no weights"):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        wanted = {name: torch.empty(told.size, dtype=told.properties.dtype) for name, told in stored.items()}
        try:
            dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except CheckpointException as error:  # no Exception, but PyTorch's collection of those of all ranks
            raise ValueError(str(error)) from error
    return {name.removeprefix(_MODEL): tensor for name, tensor in wanted.items()}


def _of_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(path)
    except CheckpointError as error:
        raise _refused(path, error.what) from error


def _of_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(path, "it is no pickle of tensors alone; nothing in it was executed") from error
    except Exception as error:  # a file that is no pickle at all makes the unpickler fail in any way
        raise _refused(path, f"it cannot be read as a state dict ({type(error).__name__}: {error})") from error
    for _ in _NESTED:  # a pickle can hold itself
        if isinstance(state, dict) and (nested := next((name for name in _NESTED if name in state), None)):
            state = state[nested]
    if not isinstance(state, dict) or not state or not all(map(_is_named_tensor, state.items())):
        raise _refused(path, "it is no state dict: a dictionary of tensors was expected")
    return state


def _is_named_tensor(item: tuple[object, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def _sha256(path: Path) -> str:
    with open_regular(path, CheckpointError, "name a file of weights or a checkpoint folder") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
