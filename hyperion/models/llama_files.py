"""Real Llama weights, from a folder in transformers' format or from the hub; checked completely before loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyperion.data.errors import DataUnavailable
from hyperion.data.store.network import download, hub_endpoint
from hyperion.data.store.sources import mirror_root
from hyperion.data.store.staging import cache_root, staged
from hyperion.errors import HyperionError
from hyperion.models.llama import RANDOM_LLAMAS, build_random_llama
from hyperion.paths import expanded
from hyperion.untrusted import inner_path, open_regular, read_json

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

FOLDER = "llama"  # in a mirror or the cache: weights that the user provides; no command downloads them
HUB = "hub"  # in the cache: models downloaded by their id on the hub
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_AGAIN = "copy the whole folder again from its source"


def load_llama(
    model_id: str | Path, *, vocab_size: int | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """Load a Llama: random weights by the name of a configuration, real weights by a folder or an id on the hub.

    Args:
        model_id: a name such as 'random_llama_1b', a folder, or 'organisation/model' on the hub, which is downloaded into
            the cache once.
        vocab_size: the tokenizer's size, for random weights; real weights have their own.
        dtype: of the weights.
        device: to load the weights to.

    Raises:
        HyperionError: no such configuration or folder, no network, or weights that are incomplete, pickled, quantised or
            not a Llama's.
    """
    folder = llama_folder(model_id)
    if folder is None:
        return build_random_llama(str(model_id), vocab_size or 0, dtype, device)
    return _load_folder(folder, dtype, device)


def llama_folder(model_id: str | Path) -> Path | None:
    """Return the folder with real weights and their tokenizer, downloaded if necessary; None for a random configuration.

    Raises:
        HyperionError: no such folder and no such model, or no network.
    """
    name = str(model_id)
    if name.startswith("random_") or name in RANDOM_LLAMAS:
        return None
    folder = expanded(name)
    return folder if folder.is_dir() else _from_hub(name)


def local_llama(data_source: str) -> Path | None:
    """Return the folder llama/ of the mirror or of the cache, as the data source prescribes; None if it does not exist."""
    places = {"mirror": ("auto", "mirror"), "cache": ("auto", "cache", "download")}
    for place in [place for place, sources in places.items() if data_source in sources]:
        try:
            folder = (mirror_root() if place == "mirror" else cache_root()) / FOLDER
        except DataUnavailable:
            continue  # no mirror is configured
        if folder.is_dir():
            return folder
    return None


def verify_llama_folder(folder: Path) -> LlamaForCausalLM:
    """Check that a folder holds a complete Llama: configuration, all shards, all tensors with their shapes.

    Reads no weights, only headers.

    Returns:
        The model on the meta device.

    Raises:
        HyperionError: names the missing or wrong file or tensor.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = _json(folder / "config.json")
    if settings.get("model_type") != "llama":
        raise HyperionError(
            f"config.json has the model type {settings.get('model_type')!r}, not 'llama'",
            where=folder / "config.json",
            next_step="name the folder of a Llama",
        )
    if "quantization_config" in settings:
        raise HyperionError(
            "the weights are quantised", where=folder / "config.json", next_step="name a folder with the original weights"
        )
    shapes = _stored_shapes(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name not in shapes and name not in tied:
            raise HyperionError(f"no file contains the tensor {name}", where=folder, next_step=_AGAIN)
        if name in shapes and shapes[name] != list(tensor.shape):
            raise HyperionError(
                f"{name} has the shape {shapes[name]}, but config.json requires {list(tensor.shape)}",
                where=folder,
                next_step="use weights and config.json of the same model",
            )
    return model


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor by name, from the headers of all weight files."""
    index = folder / INDEX
    if index.is_file():
        files = _json(index).get("weight_map")
        if not isinstance(files, dict):
            raise HyperionError(f"{INDEX} has no weight_map", where=index, next_step=_AGAIN)
        shards = {str(name): inner_path(folder, name, HyperionError, _AGAIN, links=True) for name in files.values()}
        for name, place in sorted(shards.items()):
            if not place.is_file():
                raise HyperionError(f"the shard {name} is missing", where=place, next_step=_AGAIN)
        stored = {name: _headers(place) for name, place in sorted(shards.items())}
        for tensor, name in files.items():
            if tensor not in stored[name]:
                raise HyperionError(f"{name} lacks the tensor {tensor} that {INDEX} lists", where=folder / name, next_step=_AGAIN)
        return {tensor: stored[name][tensor] for tensor, name in files.items()}
    if (folder / SINGLE).is_file():
        return _headers(folder / SINGLE)
    pickled = next((path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise HyperionError(
            f"the weights are pickles ({pickled}), which could run code; they were not opened",
            where=folder,
            next_step="save them as safetensors on a machine you trust: model.save_pretrained(folder)",
        )
    raise HyperionError(
        f"there is neither {SINGLE} nor {INDEX}", where=folder, next_step="name a folder with weights as safetensors"
    )


def _headers(path: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path, HyperionError, _AGAIN).close()  # safe_open would block on a named pipe
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise HyperionError(
            f"{path.name} is truncated or not in safetensors format: {error}", where=path, next_step=_AGAIN
        ) from error


def _json(path: Path) -> dict:
    try:
        content = read_json(path, HyperionError, _AGAIN)
    except (OSError, HyperionError) as error:
        reason = error.what if isinstance(error, HyperionError) else error
        raise HyperionError(f"{path.name} cannot be read: {reason}", where=path, next_step=_AGAIN) from error
    if not isinstance(content, dict):
        raise HyperionError(f"{path.name} is not a JSON object", where=path, next_step=_AGAIN)
    return content


def _load_folder(folder: Path, dtype: torch.dtype, device: str | torch.device) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    verify_llama_folder(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    model.config.name_or_path = folder.name
    return model.to(device)


def _from_hub(name: str) -> Path:
    """Return the cache folder of a model on the hub; download the model if it is missing."""
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise HyperionError(
            f"{name!r} is not a folder, a random configuration, or an id of the form organisation/model",
            where=Path(name).absolute(),
            next_step=f"name a folder with weights, or one of {', '.join(RANDOM_LLAMAS)}",
        )
    target = cache_root() / HUB / "--".join(parts)
    if not target.is_dir():
        with staged(target) as work:
            _download(name, work)
            verify_llama_folder(work)
    return target


def _download(name: str, work: Path) -> None:
    """Download the list of a model's files, then its configuration, tokenizer and safetensors."""
    listing = work / "listing"
    try:
        download(f"{hub_endpoint()}/api/models/{name}", listing)
    except DataUnavailable as error:
        if getattr(error.__cause__, "code", None) not in (401, 403, 404):
            raise
        raise DataUnavailable(
            f"the hub refuses to serve {name}: {error.__cause__}",
            where=f"{hub_endpoint()}/{name}",
            next_step="check the id; if the model is gated, accept its licence, download it yourself and name the folder",
        ) from error
    siblings = _json(listing).get("siblings", [])
    listing.unlink()
    if not isinstance(siblings, list) or not all(isinstance(entry, dict) for entry in siblings):
        raise DataUnavailable(
            f"the hub's reply for {name} has no list of files", where=hub_endpoint(), next_step="try again later"
        )
    files = [str(entry.get("rfilename", "")) for entry in siblings]
    wanted = [file for file in files if "/" not in file and file.endswith((".json", ".safetensors"))]
    if not any(file.endswith(".safetensors") for file in wanted):
        raise DataUnavailable(
            f"the hub has no safetensors of {name}", where=f"{hub_endpoint()}/{name}", next_step="choose a model that has them"
        )
    for file in wanted:
        download(f"{hub_endpoint()}/{name}/resolve/main/{file}", inner_path(work, file, DataUnavailable, _AGAIN))
