"""Adapters alone, in peft's own files: megabytes where the model has gigabytes, readable by any program that knows peft.

A saved adapter is a checkpoint folder like every other (whole or not there, with hashes): adapter_model.safetensors,
adapter_config.json, and base.json, the hash of the frozen weights that it was trained on. On another base of the same
shape an adapter loads without complaint and makes nonsense; the hash tells.
"""

import copy
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperion.checkpoints.folders import MANIFEST, checkpoint_path, saving, verify
from hyperion.checkpoints.ranks import on_rank_0
from hyperion.checkpoints.states import CheckpointError, own_copy, read_tensors
from hyperion.untrusted import read_json

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
HASHING_THREADS = 8
_MARK, _NAME = ".lora_", "default"


def save_adapter(folder: Path, step: int, model: nn.Module, base_sha256: str, keep: int = 2) -> Path:
    """Save a model's adapters as folder/step-<step>. All ranks call it; shards are gathered, rank 0 writes.

    Args:
        model: a peft model with LoRA, or a module around one, sharded or not.
        base_sha256: `frozen_sha256` of the base, taken before it was sharded.

    Raises:
        CheckpointError: on all ranks: the model has no adapters, or the folder cannot be written.
    """
    tensors = {_stored_name(name): _whole(parameter) for name, parameter in _adapters(model).items()}
    # peft writes a config of an adapter at rest so; it was training until now.
    config = copy.copy(_peft_model(model).peft_config[_NAME])
    config.inference_mode = True
    with saving(folder, step, keep) as new:
        on_rank_0(lambda: _write(new, tensors, config, base_sha256))
    return checkpoint_path(folder, step)


def load_adapter(model: nn.Module, path: Path, base_sha256: str | None = None) -> None:
    """Put saved adapters into a model that has adapters of the same rank on the same layers, in this one process.

    Args:
        model: what add_lora returned, or a module around it.
        path: a folder that save_adapter made, verified by its manifest; or one of peft's own, which has none.
        base_sha256: `frozen_sha256` of the model, where the adapter must belong to these very weights.

    Raises:
        CheckpointError: a damaged file, pickled weights, or an adapter of another rank, scale, layers, shape or base.
            Nothing was changed.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        verify(path)
    _require_same_config(_peft_model(model).peft_config[_NAME], _json(path / CONFIG), path)
    tensors, parameters = _tensors(path / WEIGHTS), _adapters(model)
    expected = {_stored_name(name): parameter for name, parameter in parameters.items()}
    for name in sorted(expected.keys() | tensors.keys()):
        mine, theirs = (list(held[name].shape) if name in held else "absent" for held in (expected, tensors))
        if mine != theirs:
            raise CheckpointError(
                f"the adapter's {name} is {theirs}, the model's {mine}: it was trained on a model of another shape",
                where=path / WEIGHTS,
                next_step="load it into the base model that it was trained on",
            )
    trained = _json(path / BASE).get("sha256") if base_sha256 is not None and (path / BASE).is_file() else base_sha256
    if trained != base_sha256:
        raise CheckpointError(
            f"the adapter was trained on base weights {str(trained)[:12]}, these are {base_sha256[:12]}",
            where=path / BASE,
            next_step="load the base weights that it was trained on",
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def frozen_sha256(model: nn.Module) -> str:
    """Hash of the weights that adapters leave alone, by the names they have without adapters; a base model's own hash is
    that of the same model with adapters. Of sharded weights it is the hash of this rank's shards.
    """
    held = {_base_name(name): p for name, p in model.named_parameters() if _MARK not in name}
    names = sorted(held)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = threads.map(lambda name: _digest(held[name]), names)
        return hashlib.sha256("".join(f"{n} {d}\n" for n, d in zip(names, digests, strict=True)).encode()).hexdigest()


def _digest(parameter: Tensor) -> str:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    digest = hashlib.sha256(f"{parameter.dtype} {tuple(parameter.shape)} ".encode())
    digest.update(local.detach().contiguous().cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def _peft_model(model: nn.Module) -> nn.Module:
    found = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    if found is None:
        raise CheckpointError(
            "the model has no adapters", where=type(model).__name__, next_step="give it some: parallel.add_lora(model)"
        )
    return found


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by their names in the peft model."""
    return {name: p for name, p in _peft_model(model).named_parameters() if _MARK in name}


def _stored_name(name: str) -> str:
    """peft leaves the name that an adapter has within the model out of its file."""
    return name.replace(f".{_NAME}.", ".")


def _base_name(name: str) -> str:
    for wrapper in ("module.", "lm.", "base_model.model."):
        name = name.removeprefix(wrapper)
    return name.replace(".base_layer.", ".")


def _whole(parameter: Tensor) -> Tensor:
    return own_copy(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


def _write(folder: Path, tensors: dict[str, Tensor], config, base_sha256: str) -> None:
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk arrives as this, not as OSError
        raise OSError(str(error)) from error
    config.save_pretrained(str(folder))
    (folder / BASE).write_text(json.dumps({"sha256": base_sha256}), encoding="utf-8")


def _require_same_config(mine, theirs: dict, path: Path) -> None:
    wanted = {"peft_type": "LORA", "r": mine.r, "lora_alpha": mine.lora_alpha, "use_rslora": mine.use_rslora}
    wanted["target_modules"] = sorted(mine.target_modules)
    found = {name: theirs.get(name) for name in wanted}
    if isinstance(found["target_modules"], list) and all(isinstance(name, str) for name in found["target_modules"]):
        found["target_modules"] = sorted(found["target_modules"])
    for name, value in wanted.items():
        if found[name] != value:
            raise CheckpointError(
                f"the adapter has {name} {found[name]}, the model's adapters {value}",
                where=path / CONFIG,
                next_step=f"call add_lora with the adapter's {name}, or load another adapter",
            )


def _json(path: Path) -> dict:
    remedy = "name the folder of an adapter"
    try:
        content = read_json(path, CheckpointError, remedy)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}", where=path, next_step=remedy) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is no JSON object", where=path, next_step=remedy)
    return content


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path.name} holds no adapter: {_what_is_there(path, error)}",
            where=path,
            next_step="copy the adapter's folder again, with its weights as safetensors",
        ) from error


def _what_is_there(path: Path, error: CheckpointError) -> str:
    pickles = [other.name for other in sorted(path.parent.glob("*.bin"))]
    if not path.is_file() and pickles:
        return f"{pickles[0]} is a pickle, which could run code; it was not opened"
    return error.what
