"""One file with the whole model, for other programs: gathered from the shards of all ranks."""

import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hyperion.checkpoints.ranks import on_rank_0
from hyperion.checkpoints.states import CheckpointError, own_copy
from hyperion.errors import refused_write
from hyperion.parallel import average_statistics


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's tensors by name on rank 0's CPU, wrappers' prefixes removed; an empty dict on other ranks.

    Gathering is a collective: all ranks call it.
    """
    average_statistics(model)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def export_model(model: nn.Module, path: Path) -> Path:
    """Write the whole model as one safetensors file, whole or not at all. All ranks call it; rank 0 writes.

    Args:
        path: of the file, ".safetensors" by custom; `model.load_state_dict(safetensors.torch.load_file(path))` reads it
            without this library.

    Raises:
        CheckpointError: on all ranks: the file cannot be written.
    """
    path = Path(path)
    state = full_state(model)
    on_rank_0(lambda: _write_whole(state, path))
    return path


def _write_whole(state: dict[str, Tensor], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, which only this user may enter: at a name that can be guessed there may be a link.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as made:
            new = Path(made) / path.name
            save_file({name: own_copy(tensor) for name, tensor in state.items()}, new, metadata={"format": "pt"})
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(path)
    except (OSError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))  # a full disk arrives as SafetensorError
        raise refused_write(
            cause,
            CheckpointError,
            where=path,
            elsewhere="name another file",
            action="the model could not be exported",
            kept="nothing was changed",
        ) from error
