"""Real Llama weights: a folder as transformers saves it, checked whole before a byte of it is loaded, or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hyperion.data.store.faults import DataUnavailable
from hyperion.data.store.network import download, hub_endpoint
from hyperion.data.store.sources import mirror_root
from hyperion.data.store.staging import cache_root, staged
from hyperion.errors import HyperionError
from hyperion.models.llama import RANDOM_LLAMAS, build_random_llama
from hyperion.paths import expanded
from hyperion.untrusted import inner_path, open_regular, read_json

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

FOLDER = "llama"  # in a mirror or the cache: the weights of whoever has some, which no command fetches
HUB = "hub"  # in the cache: what was named by its id on the hub
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_AGAIN = "copy the folder again from where it came, whole"


def load_llama(
    model_id: str | Path, *, vocab_size: int | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """A Llama by name: random weights by a configuration's name, real ones by a folder or an id on the hub.

    Args:
        model_id: a name such as 'random_llama_1b', a folder, or 'organisation/model' on the hub, which is downloaded into
            the cache once.
        vocab_size: of a random one: the tokenizer's; real weights have their own.
        dtype: of the weights.

    Raises:
        HyperionError: no such configuration or folder, no network, weights that are incomplete, pickled, quantised or not
            Llama's: named, before anything is trained.
    """
    folder = llama_folder(model_id)
    if folder is None:
        return build_random_llama(str(model_id), vocab_size or 0, dtype, device)
    return _load_folder(folder, dtype, device)


def llama_folder(model_id: str | Path) -> Path | None:
    """The folder that real weights and their tokenizer lie in, after a download where an id on the hub is new; None for the
    name of a random configuration.

    Raises:
        HyperionError: no such folder and no such model, or no network.
    """
    name = str(model_id)
    if name.startswith("random_") or name in RANDOM_LLAMAS:
        return None
    folder = expanded(name)
    return folder if folder.is_dir() else _from_hub(name)


def local_llama(data_source: str) -> Path | None:
    """The folder llama/ of the mirror or of the cache, whichever the data source asks first; None where neither has it."""
    places = {"mirror": ("auto", "mirror"), "cache": ("auto", "cache", "download")}
    for place in [place for place, asked in places.items() if data_source in asked]:
        try:
            folder = (mirror_root() if place == "mirror" else cache_root()) / FOLDER
        except DataUnavailable:
            continue  # no mirror is named
        if folder.is_dir():
            return folder
    return None


def verify_llama_folder(folder: Path) -> LlamaForCausalLM:
    """Check that a folder holds a whole Llama: configuration, every shard, every tensor in its shape; no weight is read.

    Returns:
        The model without storage.

    Raises:
        HyperionError: names the file or tensor that is missing or wrong.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = _json(folder / "config.json")
    if settings.get("model_type") != "llama":
        raise HyperionError(
            f"config.json is of a model of type {settings.get('model_type')!r}, not 'llama'",
            where=folder / "config.json",
            next_step="name the folder of a Llama",
        )
    if "quantization_config" in settings:
        raise HyperionError(
            "the weights are quantised", where=folder / "config.json", next_step="name the folder of the original weights"
        )
    shapes = _stored_shapes(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    tied = set(model._tied_weights_keys) if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name not in shapes and name not in tied:
            raise HyperionError(f"no file holds the tensor {name}", where=folder, next_step=_AGAIN)
        if name in shapes and shapes[name] != list(tensor.shape):
            raise HyperionError(
                f"{name} has the shape {shapes[name]}, config.json asks for {list(tensor.shape)}",
                where=folder,
                next_step="use weights and config.json of the same model",
            )
    return model


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of each tensor by name, from the headers of all weight files."""
    index = folder / INDEX
    if index.is_file():
        files = _json(index).get("weight_map")
        if not isinstance(files, dict):
            raise HyperionError(f"{INDEX} holds no weight_map", where=index, next_step=_AGAIN)
        shards = {str(name): inner_path(folder, name, HyperionError, _AGAIN, links=True) for name in files.values()}
        for name, place in sorted(shards.items()):
            if not place.is_file():
                raise HyperionError(f"the shard {name} is missing", where=place, next_step=_AGAIN)
        stored = {name: _headers(place) for name, place in sorted(shards.items())}
        for tensor, name in files.items():
            if tensor not in stored[name]:
                raise HyperionError(f"{name} lacks {tensor}, which {INDEX} places there", where=folder / name, next_step=_AGAIN)
        return {tensor: stored[name][tensor] for tensor, name in files.items()}
    if (folder / SINGLE).is_file():
        return _headers(folder / SINGLE)
    pickled = next((path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        raise HyperionError(
            f"the weights are pickles ({pickled}), which could run code when loaded; they were not opened",
            where=folder,
            next_step="save them as safetensors on a machine you trust: model.save_pretrained(folder)",
        )
    raise HyperionError(f"no {SINGLE} and no {INDEX}", where=folder, next_step="name a folder of weights as safetensors")


def _headers(path: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path, HyperionError, _AGAIN).close()  # safe_open would wait for the writer of a named pipe
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError) as error:
        raise HyperionError(f"{path.name} is cut off or no safetensors: {error}", where=path, next_step=_AGAIN) from error


def _json(path: Path) -> dict:
    try:
        content = read_json(path, HyperionError, _AGAIN)
    except (OSError, HyperionError) as error:
        told = error.what if isinstance(error, HyperionError) else error
        raise HyperionError(f"{path.name} cannot be read: {told}", where=path, next_step=_AGAIN) from error
    if not isinstance(content, dict):
        raise HyperionError(f"{path.name} is no JSON object", where=path, next_step=_AGAIN)
    return content


def _load_folder(folder: Path, dtype: torch.dtype, device: str | torch.device) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    verify_llama_folder(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    model.config.name_or_path = folder.name
    return model.to(device)


def _from_hub(name: str) -> Path:
    """The folder in the cache of a model of the hub, downloaded where it is not there yet."""
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise HyperionError(
            f"{name!r} is no folder, no random configuration and no id of the form organisation/model",
            where=Path(name).absolute(),
            next_step=f"name a folder of weights, or one of {', '.join(RANDOM_LLAMAS)}",
        )
    target = cache_root() / HUB / "--".join(parts)
    if not target.is_dir():
        with staged(target) as work:
            _download(name, work)
            verify_llama_folder(work)
    return target


def _download(name: str, work: Path) -> None:
    """Configuration, tokenizer and safetensors of a model; the list of its files comes first."""
    listing = work / "listing"
    try:
        download(f"{hub_endpoint()}/api/models/{name}", listing)
    except DataUnavailable as error:
        if getattr(error.__cause__, "code", None) not in (401, 403, 404):
            raise
        raise DataUnavailable(
            f"the hub does not give out {name}: {error.__cause__}",
            where=f"{hub_endpoint()}/{name}",
            next_step="check the id; of a gated model accept its licence, download it yourself and name the folder",
        ) from error
    siblings = _json(listing).get("siblings", [])
    listing.unlink()
    if not isinstance(siblings, list) or not all(isinstance(entry, dict) for entry in siblings):
        raise DataUnavailable(f"the hub's list of the files of {name} is none", where=hub_endpoint(), next_step=_AGAIN)
    files = [str(entry.get("rfilename", "")) for entry in siblings]
    wanted = [file for file in files if "/" not in file and file.endswith((".json", ".safetensors"))]
    if not any(file.endswith(".safetensors") for file in wanted):
        raise DataUnavailable(
            f"the hub has no safetensors of {name}", where=f"{hub_endpoint()}/{name}", next_step="choose a model that has"
        )
    for file in wanted:
        download(f"{hub_endpoint()}/{name}/resolve/main/{file}", inner_path(work, file, DataUnavailable, _AGAIN))
