"""Checkpoints of LoRA adapters only, in peft's own file format: megabytes instead of the model's gigabytes.

A saved adapter is a checkpoint folder like any other (written completely or not at all, with hashes). It contains
adapter_model.safetensors, adapter_config.json, and base.json with the hash of the frozen weights. On another base of the
same shape an adapter would load without an error and give meaningless outputs; the hash detects this.
"""

import copy
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperion.checkpoints.folders import HASHING_THREADS, MANIFEST, checkpoint_path, saving, verify
from hyperion.checkpoints.ranks import on_rank_0
from hyperion.checkpoints.states import CheckpointError, own_copy, read_tensors
from hyperion.untrusted import read_json

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
_MARK, _NAME = ".lora_", "default"


def save_adapter(folder: Path, step: int, model: nn.Module, base_sha256: str, keep: int = 2) -> Path:
    """Save a model's adapters as folder/step-<step>. All ranks call it; shards are gathered, rank 0 writes.

    Args:
        model: a peft model with LoRA, or a module around one, sharded or not.
        base_sha256: `frozen_sha256` of the base, computed before sharding.
        keep: number of checkpoints to keep.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks: the model has no adapters, or the folder cannot be written.
    """
    tensors = {_stored_name(name): _full(parameter) for name, parameter in _adapters(model).items()}
    # peft stores adapters in inference mode; this one is still in training mode.
    config = copy.copy(_peft_model(model).peft_config[_NAME])
    config.inference_mode = True
    with saving(folder, step, keep) as new:
        on_rank_0(lambda: _write(new, tensors, config, base_sha256))
    return checkpoint_path(folder, step)


def load_adapter(model: nn.Module, path: Path, base_sha256: str | None = None) -> None:
    """Load saved adapters into a model that has adapters of the same rank on the same layers, in a single process.

    Args:
        model: the result of add_lora, or a module around it.
        path: a folder written by save_adapter, verified by its manifest, or a folder written by peft, which has none.
        base_sha256: `frozen_sha256` of the model, to require that the adapter was trained on these weights.

    Raises:
        CheckpointError: a file is damaged, weights are pickled, or the adapter has another rank, scale, layers, shape or
            base. The model is unchanged.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        verify(path)
    _require_same_config(_peft_model(model).peft_config[_NAME], _json(path / CONFIG), path)
    tensors, parameters = _tensors(path / WEIGHTS), _adapters(model)
    expected = {_stored_name(name): parameter for name, parameter in parameters.items()}
    for name in sorted(expected.keys() | tensors.keys()):
        mine, theirs = (list(side[name].shape) if name in side else "absent" for side in (expected, tensors))
        if mine != theirs:
            raise CheckpointError(
                f"the adapter's {name} is {theirs}, but the model's is {mine}: it was trained on a model of another shape",
                where=path / WEIGHTS,
                next_step="load it into the base model that it was trained on",
            )
    if base_sha256 is not None and (path / BASE).is_file():
        trained_on = _json(path / BASE).get("sha256")
        if trained_on != base_sha256:
            raise CheckpointError(
                f"the adapter was trained on base weights {str(trained_on)[:12]}, but these are {base_sha256[:12]}",
                where=path / BASE,
                next_step="load the base weights that it was trained on",
            )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def frozen_sha256(model: nn.Module) -> str:
    """Return the hash of the frozen weights, by their names without adapters.

    It is the same before and after add_lora. For sharded weights it is the hash of this rank's shards.
    """
    frozen = {_base_name(name): p for name, p in model.named_parameters() if _MARK not in name}
    names = sorted(frozen)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = threads.map(lambda name: _digest(frozen[name]), names)
        return hashlib.sha256("".join(f"{n} {d}\n" for n, d in zip(names, digests, strict=True)).encode()).hexdigest()


def _digest(parameter: Tensor) -> str:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    digest = hashlib.sha256(f"{parameter.dtype} {tuple(parameter.shape)} ".encode())
    digest.update(local.detach().contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _peft_model(model: nn.Module) -> "PeftModel":
    peft_model = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    if peft_model is None:
        raise CheckpointError(
            "the model has no adapters", where=type(model).__name__, next_step="add adapters: parallel.add_lora(model)"
        )
    return cast("PeftModel", peft_model)


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' parameters by their names in the peft model."""
    return {name: p for name, p in _peft_model(model).named_parameters() if _MARK in name}


def _stored_name(name: str) -> str:
    """Return the name in peft's file, which lacks the name of the adapter inside the model."""
    return name.replace(f".{_NAME}.", ".")


def _base_name(name: str) -> str:
    for wrapper in ("module.", "lm.", "base_model.model."):
        name = name.removeprefix(wrapper)
    return name.replace(".base_layer.", ".")


def _full(parameter: Tensor) -> Tensor:
    return own_copy(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


def _write(folder: Path, tensors: dict[str, Tensor], config: Any, base_sha256: str) -> None:
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # raised for a full disk too, instead of OSError
        raise OSError(str(error)) from error
    config.save_pretrained(str(folder))
    (folder / BASE).write_text(json.dumps({"sha256": base_sha256}), encoding="utf-8")


def _require_same_config(mine: Any, stored: dict[str, Any], path: Path) -> None:
    wanted = {"peft_type": "LORA", "r": mine.r, "lora_alpha": mine.lora_alpha, "use_rslora": mine.use_rslora}
    wanted["target_modules"] = sorted(mine.target_modules)
    theirs = {name: stored.get(name) for name in wanted}
    targets = theirs["target_modules"]
    if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
        theirs["target_modules"] = sorted(targets)
    for name, value in wanted.items():
        if theirs[name] != value:
            raise CheckpointError(
                f"the adapter has {name} {theirs[name]}, but the model's adapters have {value}",
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
        raise CheckpointError(f"{path.name} is not a JSON object", where=path, next_step=remedy)
    return content


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path.name} holds no adapter: {_explanation(path, error)}",
            where=path,
            next_step="copy the adapter's folder again, with its weights as safetensors",
        ) from error


def _explanation(path: Path, error: CheckpointError) -> str:
    pickles = [other.name for other in sorted(path.parent.glob("*.bin"))]
    if not path.is_file() and pickles:
        return f"{pickles[0]} is a pickle, which could run code; it was not opened"
    return error.what
