"""LoRA: add trainable low-rank updates to frozen target layers (Hu et al. 2021, arXiv 2106.09685), and save and load them.

The updates of all target layers form an adapter. An adapter takes megabytes, while a model takes gigabytes. An adapter is saved
in the file format of the peft library, in a checkpoint folder. Like other checkpoints, the folder is written completely or not at
all, and its manifest contains hashes. The files are adapter_model.safetensors, adapter_config.json, and base.json with the hash
of the frozen weights. Without this hash, an adapter could be loaded into another base model of the same shape without an error.
The outputs would then be meaningless.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyperion.checkpoints.folders import HASHING_THREADS, MANIFEST, checkpoint_path, saving, verify
from hyperion.checkpoints.sharded import on_rank_0
from hyperion.checkpoints.states import CheckpointError, own_copy, read_tensors
from hyperion.errors import HyperionError
from hyperion.untrusted import read_json

if TYPE_CHECKING:
    from peft import PeftModel

ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
)  # names of the projections of attention in the Llama models of the transformers library
WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
_MARK, _NAME = ".lora_", "default"


def add_lora(model: nn.Module, rank: int = 16, alpha: float = 32, targets: Sequence[str] = ATTENTION) -> nn.Module:
    """Add LoRA adapters of the peft library to the model, and freeze all other parameters. Call it before `parallelize`.

    A target layer with the weight W of shape [d_out, d_in] computes W x + (alpha / r) B A x. A has shape [r, d_in] and starts
    with random values. B has shape [d_out, r] and starts at zero, so that before the first step the model has the outputs of
    the base model. Only A and B are trainable. The number of trainable parameters is

        sum over target layers of r (d_in + d_out)

    The adapters of a 16-bit base model are float32, because the updates of AdamW are too small for 16-bit parameters.

    Args:
        model: model with the target layers, which are nn.Linear. It is modified in place.
        rank: r, at most the smaller of d_in and d_out of every target layer.
        alpha: numerator of the scale alpha / r.
        targets: last parts of the names of the target layers, such as "q_proj".

    Returns:
        The peft model that wraps `model`.

    Raises:
        HyperionError: no layer has the name of a target, the rank is too large or below 1, or the number of trainable
            parameters differs from the formula.
    """
    expected = expected_lora_parameters(model, rank, targets)
    from peft import LoraConfig, get_peft_model  # imported here, because peft is slow to import

    # peft's class for causal language models adds generate(). It works only with models that have the methods of transformers.
    task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    scale: Any = alpha  # peft annotates int, but other numbers work too
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=list(targets), task_type=task)
    with warnings.catch_warnings():
        # peft uses a deprecated property of transformers. Users cannot change this, so hide the warning.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = get_peft_model(model, config)
    trainable = trainable_parameter_count(adapted)
    if trainable != expected:
        raise HyperionError(
            f"{trainable:,} parameters are trainable, but sum r (d_in + d_out) is {expected:,}",
            where=f"add_lora, rank {rank} on {', '.join(targets)}",
            next_step="freeze all other parameters, or name targets that are nn.Linear layers only",
        )
    return adapted


def expected_lora_parameters(model: nn.Module, rank: int, targets: Sequence[str] = ATTENTION) -> int:
    """Return the number of trainable parameters with LoRA: the sum over target layers of r (d_in + d_out).

    Args:
        model: a base model, or a model that already has adapters.
        rank: r.
        targets: last parts of the names of the target layers.

    Raises:
        HyperionError: no layer has the name of a target, or the rank is below 1 or larger than d_in or d_out of a layer.
    """
    # peft's LoRA layers are not nn.Linear, but have the same attributes.
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and hasattr(module, "in_features")
    }
    if missing := [target for target in targets if not any(name.rpartition(".")[2] == target for name in layers)]:
        raise HyperionError(
            f"no linear layer is named {', '.join(missing)}",
            where=f"LoRA targets in {type(model).__name__}",
            next_step="name layers of this model; print(model) lists them",
        )
    for name, layer in layers.items():
        if not 1 <= rank <= min(layer.in_features, layer.out_features):
            raise HyperionError(
                f"rank {rank} is not possible for a layer of shape {layer.out_features} x {layer.in_features}",
                where=name,
                next_step="choose a rank that is at least 1 and at most the smaller dimension of every target layer",
            )
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers.values())


def trainable_parameter_count(model: nn.Module) -> int:
    """Return the number of trainable parameters. The number includes all shards of sharded parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def save_adapter(folder: Path, step: int, model: nn.Module, base_sha256: str) -> Path:
    """Save the adapters of a model as folder/step-<step>. All ranks must call this function.

    Shards are gathered, and rank 0 writes the files. The new checkpoint and the newest other checkpoint are kept.

    Args:
        folder: folder that contains the checkpoints of the run.
        step: number of optimizer steps done.
        model: the result of add_lora, or a module that contains it. It may be sharded.
        base_sha256: `frozen_sha256` of the base model, computed before sharding.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the model has no adapters, or the folder cannot be written. The error is raised on all ranks.
    """
    tensors = {_stored_name(name): _full(parameter) for name, parameter in _adapters(model).items()}
    # peft stores configurations with inference_mode=True. The configuration of this model has False, so change a copy.
    config = copy.copy(_peft_model(model).peft_config[_NAME])
    config.inference_mode = True
    with saving(folder, step) as new:
        on_rank_0(lambda: _write(new, tensors, config, base_sha256))
    return checkpoint_path(folder, step)


def load_adapter(model: nn.Module, path: Path, base_sha256: str | None = None) -> None:
    """Load saved adapters into a model that has adapters of the same rank on the same layers. Works in a single process only.

    Args:
        model: the result of add_lora, or a module that contains it.
        path: a folder that save_adapter or peft wrote. If save_adapter wrote the folder, the files are verified with its
            manifest.
        base_sha256: `frozen_sha256` of the model. If given, the adapter must have been trained on weights with this hash. A
            folder without base.json is not checked.

    Raises:
        CheckpointError: a file is damaged, the weights are pickled, or the adapter has another rank, scale, shape, target
            layers or base model. The model is not changed.
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
                next_step="load the adapter into the base model on which it was trained",
            )
    if base_sha256 is not None and (path / BASE).is_file():
        trained_on = _json(path / BASE).get("sha256")
        if trained_on != base_sha256:
            raise CheckpointError(
                f"the adapter was trained on weights with sha256 {str(trained_on)[:12]}, but this base has {base_sha256[:12]}",
                where=path / BASE,
                next_step="load the base weights on which the adapter was trained",
            )
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])


def frozen_sha256(model: nn.Module) -> str:
    """Return the sha256 of the frozen weights and their names.

    Adapters are not included, and the names are those of the base model. Therefore the hash is the same before and after
    add_lora. For sharded weights the hash depends only on the shards of this rank.
    """
    frozen = {_base_name(name): p for name, p in model.named_parameters() if _MARK not in name}
    names = sorted(frozen)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        digests = threads.map(lambda name: _digest(frozen[name]), names)
        return hashlib.sha256("".join(f"{n} {d}\n" for n, d in zip(names, digests, strict=True)).encode()).hexdigest()


def _digest(parameter: Tensor) -> str:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    digest = hashlib.sha256(f"{parameter.dtype} {tuple(parameter.shape)} ".encode())
    # Hash the bytes of the tensor, because NumPy has no dtype for bfloat16.
    digest.update(local.detach().contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _peft_model(model: nn.Module) -> "PeftModel":
    peft_model = next((module for module in model.modules() if hasattr(module, "peft_config")), None)
    if peft_model is None:
        raise CheckpointError(
            "the model has no adapters", where=type(model).__name__, next_step="add adapters: training.add_lora(model)"
        )
    return cast("PeftModel", peft_model)


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a dict that maps each name in the peft model to the adapter parameter with this name."""
    return {name: p for name, p in _peft_model(model).named_parameters() if _MARK in name}


def _stored_name(name: str) -> str:
    """Return a parameter's name in the file of peft, without the name of the adapter ("default")."""
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
    except SafetensorError as error:  # safetensors raises this error, and not OSError, if the disk is full
        raise OSError(str(error)) from error
    config.save_pretrained(str(folder))
    (folder / BASE).write_text(json.dumps({"sha256": base_sha256}), encoding="utf-8")


def _require_same_config(mine: Any, stored: dict[str, Any], path: Path) -> None:
    wanted = {"peft_type": "LORA", "r": mine.r, "lora_alpha": mine.lora_alpha, "use_rslora": mine.use_rslora}
    # Sort the targets, because peft stores them as a set, whose order in the file is arbitrary.
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
