"""Build and load Llama models of transformers (Touvron et al. 2023), with the same interface as TransformerLM.

A Llama has either random or pretrained weights:

- The names of configurations with random weights start with `random_`. Their losses say nothing about a pretrained Llama,
  but their shapes, bytes and FLOPs are those of a Llama of this size.
- Pretrained weights come from a folder in transformers' format or from the Hugging Face Hub. The names and shapes of all
  tensors are checked before the weights are loaded.

Letters in formulas: L layers, D width, N heads, H = D / N width of a head, K key-value heads, F width of the MLP,
V vocabulary, T length of a sequence, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.packing import IGNORE_INDEX
from hyperion.data.store.folders import DataUnavailable, cache_root, staged
from hyperion.data.store.sources import download, hub_endpoint, mirror_root
from hyperion.errors import HyperionError
from hyperion.kernels.token_loss import token_loss
from hyperion.models.layout import Layout, ModelFlops
from hyperion.paths import expanded
from hyperion.untrusted import inner_path, open_regular, read_json

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

WEIGHTS_FOLDER = "llama"  # name of the folder for the user's weights, in a data mirror or in the cache
HUB_FOLDER = "hub"  # cache folder for models downloaded by their id from the Hugging Face Hub
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Usual suffixes of pickled weights. Such files are named in the error and not opened.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_AGAIN = "copy the whole folder again from its source"
# Largest accepted number of unused rows in an embedding. Embeddings are often padded to a round number of rows, but more unused
# rows indicate the wrong tokenizer.
UNUSED_ROWS = 1024


@dataclass(frozen=True)
class LlamaShape:
    """Fields of transformers' LlamaConfig that determine a Llama's number of parameters, bytes and FLOPs."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 0
    tie_word_embeddings: bool = False


RANDOM_LLAMAS = {
    "random_llama_d64_l2": LlamaShape(64, 2, 4, 2, 176),
    "random_llama_d512_l8": LlamaShape(512, 8, 8, 4, 1408),
    "random_llama_d1024_l16": LlamaShape(1024, 16, 16, 8, 2816),
    # The shape of TinyLlama-1.1B (Zhang et al. 2024), which has 1,100,048,384 parameters with its vocabulary of 32,000.
    "random_llama_1b": LlamaShape(2048, 22, 32, 4, 5632),
    # The shape of Llama-2-7B (Touvron et al. 2023), which has 6,738,415,616 parameters with its vocabulary of 32,000.
    "random_llama_7b": LlamaShape(4096, 32, 32, 32, 11008),
}


def random_llama_shape(name: str, vocab_size: int) -> LlamaShape:
    """Return the shape of a randomly initialised Llama. This function works without transformers.

    Raises:
        HyperionError: there is no configuration with this name, or vocab_size is below 1.
    """
    if name not in RANDOM_LLAMAS:
        raise HyperionError(
            f"no random Llama is named {name!r}",
            where="hyperion/models/llama.py",
            next_step=f"choose one of {', '.join(RANDOM_LLAMAS)}, or give a folder with pretrained weights",
        )
    if vocab_size < 1:
        raise HyperionError(f"vocab_size is {vocab_size}", where=name, next_step="give the tokenizer's vocab_size")
    return replace(RANDOM_LLAMAS[name], vocab_size=vocab_size)


def random_llama_config(name: str, vocab_size: int) -> LlamaConfig:
    """Return the configuration of a randomly initialised Llama.

    The weights have a standard deviation of D^-0.5, so that a layer preserves the magnitude of its input. The default of
    transformers is 0.02 for every width. For a small width this gives such small logits that a frozen head cannot
    distinguish tokens.

    Raises:
        HyperionError: see random_llama_shape.
    """
    shape = random_llama_shape(name, vocab_size)
    from transformers import LlamaConfig

    return LlamaConfig(
        name_or_path=name,  # pyright: ignore[reportCallIssue] - an argument of the base class of LlamaConfig
        initializer_range=shape.hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **asdict(shape),
    )


def build_random_llama(
    name: str, vocab_size: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """Return a Llama with random weights.

    The weights are drawn from torch's default random generator of the device. Seed this generator first.

    Raises:
        HyperionError: see random_llama_shape.
    """
    from transformers import AutoModelForCausalLM

    config = random_llama_config(name, vocab_size)
    with torch.device(device):
        # Set the dtype at construction. Casting the model afterwards would also cast the angles of the rotary embedding, which
        # must stay float32.
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def require_vocabulary(tokenizer_size: int, model: LlamaForCausalLM, where: object = None) -> None:
    """Check that a tokenizer belongs to the model. Call this function before training on the tokenizer's ids.

    Args:
        tokenizer_size: the tokenizer's largest id + 1.
        model: model that receives the ids.
        where: value for the field `where` of an error, such as the path of the data.

    Raises:
        HyperionError: the embedding does not have config.vocab_size rows, the tokenizer has an id that is not in the
            embedding, or the embedding has more unused rows than padding can explain.
    """
    embedding: Any = model.get_input_embeddings()
    rows, stated = embedding.weight.shape[0], model.config.vocab_size
    remedy = "use the tokenizer from the folder of the model's weights"
    if rows != stated:
        raise HyperionError(f"the embedding has {rows} rows, but the configuration says {stated}", where=where, next_step=remedy)
    if tokenizer_size > rows:
        raise HyperionError(
            f"the tokenizer's largest id is {tokenizer_size - 1}, but the model's embedding has {rows} rows",
            where=where,
            next_step=remedy,
        )
    if rows - tokenizer_size > UNUSED_ROWS:
        raise HyperionError(
            f"the tokenizer has {tokenizer_size} ids, but the embedding has {rows} rows: this model has another tokenizer",
            where=where,
            next_step=remedy,
        )


class LlamaLM(nn.Module):
    """A LlamaForCausalLM, or a peft model around a LlamaForCausalLM, with the interface of TransformerLM.

    The sequences of a batch must be padded on the right. With causal attention no token attends to the padding after it.
    Therefore the model needs no attention mask and can use the fast kernels for causal attention.

    The weights and their names remain those of transformers. Two parts compute the same in fewer passes over memory: PyTorch's
    RMSNorm, which has one kernel on a GPU, replaces the norms of `lm`; and `token_loss` computes the loss. Of a Llama with 1.2
    billion parameters, the norms and other elementwise operators of transformers take a quarter of a step on an H200, and the
    matrix products of a head with 50,257 rows, which are not aligned, a sixth.
    """

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        _replace_norms(lm)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits or, if targets are given, the negative log-likelihood of each target.

        Args:
            inputs_BT: int64 token ids.
            targets_BT: int64 ids of the next tokens. Targets equal to IGNORE_INDEX are not scored.

        Returns:
            Without targets: logits_BTV in the dtype of the model. With targets: nll_BT in nats, in float32, and zero where
            the target is IGNORE_INDEX.
        """
        # No cache: training and scoring process the whole sequence at once.
        if targets_BT is None:
            return self.lm(input_ids=inputs_BT, use_cache=False).logits
        causal: Any = self.get_submodule(self._inside)
        x_BTD = causal.model(input_ids=inputs_BT, use_cache=False).last_hidden_state
        x_MD, targets_M = x_BTD.flatten(0, 1), targets_BT.flatten()
        if type(causal.lm_head) is nn.Linear:
            nll_M = token_loss(x_MD, causal.lm_head.weight, targets_M)
        else:  # a quantised head has no floating-point weight
            nll_M = F.cross_entropy(causal.lm_head(x_MD).float(), targets_M, ignore_index=IGNORE_INDEX, reduction="none")
        return nll_M.view_as(targets_BT)

    @property
    def _inside(self) -> str:
        """Name of the LlamaForCausalLM. If `lm` is a peft model, the name includes peft's prefix."""
        return "lm.base_model.model" if hasattr(self.lm, "peft_config") else "lm"

    def layout(self) -> Layout:
        """Return the names of the embedding, the decoder layers, the last norm and the head."""
        inside = self._inside
        config: Any = self.get_submodule(inside).config
        return Layout(
            stem=(f"{inside}.model.embed_tokens",),
            blocks=tuple(f"{inside}.model.layers.{i}" for i in range(config.num_hidden_layers)),
            head=(f"{inside}.model.norm", f"{inside}.lm_head"),
            tied=((f"{inside}.lm_head", f"{inside}.model.embed_tokens"),) if config.tie_word_embeddings else (),
        )


def _replace_norms(lm: nn.Module) -> None:
    """Replace each LlamaRMSNorm in the model by PyTorch's RMSNorm with the same weight."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for parent in list(lm.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, LlamaRMSNorm):
                weight = norm.weight
                replaced = nn.RMSNorm(len(weight), eps=norm.variance_epsilon, device="meta")
                replaced.weight = weight
                setattr(parent, name, replaced)


def layer_shapes(config: LlamaShape | LlamaConfig) -> dict[str, tuple[int, int]]:
    """Return a dict that maps the name of each linear layer in a decoder layer to its (d_in, d_out)."""
    D, wide = config.hidden_size, config.intermediate_size
    # Newer configurations of transformers state the width of a head, which need not be D / N.
    head = getattr(config, "head_dim", None) or D // config.num_attention_heads
    key_value_heads = config.num_key_value_heads or config.num_attention_heads
    queries, keys = config.num_attention_heads * head, key_value_heads * head
    return {
        "q_proj": (D, queries),
        "k_proj": (D, keys),
        "v_proj": (D, keys),
        "o_proj": (queries, D),
        "gate_proj": (D, wide),
        "up_proj": (D, wide),
        "down_proj": (wide, D),
    }


def llama_parameter_count(config: LlamaShape | LlamaConfig) -> int:
    """Return the number of parameters of the model.

    The number includes the embedding, the head (unless it is tied to the embedding), L decoder layers with two norms each,
    and the last norm.
    """
    D, L = config.hidden_size, config.num_hidden_layers
    matrices = config.vocab_size * D * (1 if config.tie_word_embeddings else 2)
    return matrices + L * (sum(d_in * d_out for d_in, d_out in layer_shapes(config).values()) + 2 * D) + D


def llama_lora_parameter_count(config: LlamaShape | LlamaConfig, rank: int, targets: Sequence[str]) -> int:
    """Return the number of trainable parameters of LoRA: L times the sum over the target layers of r (d_in + d_out)."""
    shapes = layer_shapes(config)
    return config.num_hidden_layers * sum(rank * sum(shapes[target]) for target in targets)


def llama_flops_per_token(
    config: LlamaShape | LlamaConfig, sequence_length: int, lora_rank: int = 0, targets: Sequence[str] = ()
) -> ModelFlops:
    """Return the FLOPs per token of the forward and the backward pass, for full training or for LoRA on a frozen base model.

    forward = 2 (L sum d_in d_out + V D) + 4 L T N H, plus 2 r (d_in + d_out) for each adapter. Attention is counted for all
    T x T pairs of positions, as in the appendix of the PaLM paper, although a causal kernel may skip half of them.

    For each matrix product (GEMM) of the forward pass, the backward pass computes two: the gradient of the input and the gradient
    of the weight. A frozen weight needs only the gradient of the input. The frozen q, k and v of the first layer need no gradient
    at all, because nothing before them is trained. So a LoRA step costs about two thirds of a full training step.

    A test compares the result with torch's FlopCounterMode. They are equal for full training, and for LoRA if q, k or v is among
    the targets.

    Args:
        config: shape of the model.
        sequence_length: T, the number of tokens in a sequence.
        lora_rank: r; 0 for full training.
        targets: names of the layers with adapters.
    """
    shapes, L = layer_shapes(config), config.num_hidden_layers
    linear = 2 * (L * sum(d_in * d_out for d_in, d_out in shapes.values()) + config.vocab_size * config.hidden_size)
    attention = 4 * L * sequence_length * shapes["o_proj"][0]
    if not lora_rank:
        forward = linear + attention
        return ModelFlops(forward, 3 * forward)
    adapters = 2 * llama_lora_parameter_count(config, lora_rank, targets)
    entry = ("q_proj", "k_proj", "v_proj")
    # The input of the first layer needs no gradient. This saves one matrix product for each of the frozen q, k and v, and one for
    # the matrix A of each of their adapters.
    spared = sum(2 * shapes[name][0] * shapes[name][1] for name in entry)
    spared += sum(2 * lora_rank * shapes[name][0] for name in entry if name in targets)
    forward = linear + attention + adapters
    # The backward pass has one product for each frozen weight, and two for each matrix product of attention and of the adapters.
    return ModelFlops(forward, forward + linear + 2 * (attention + adapters) - spared)


def load_llama(
    model_id: str | Path, *, vocab_size: int | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LlamaForCausalLM:
    """Load a Llama with random or pretrained weights.

    Args:
        model_id: the name of a configuration with random weights, such as 'random_llama_1b'; or a folder with pretrained
            weights; or the id 'organisation/model' of a model on the Hugging Face Hub. A model of the hub is downloaded into
            the cache once.
        vocab_size: size of the tokenizer; used for random weights only.
        dtype: dtype of the weights.
        device: device of the weights.

    Raises:
        HyperionError: the configuration, folder or model does not exist; the download failed; or the weights are incomplete,
            pickled, quantised, or belong to a model that is not a Llama.
    """
    folder = llama_folder(model_id)
    if folder is None:
        return build_random_llama(str(model_id), vocab_size or 0, dtype, device)
    return _load_folder(folder, dtype, device)


def llama_folder(model_id: str | Path) -> Path | None:
    """Return the folder with a model's pretrained weights and tokenizer, or None for a configuration with random weights.

    If `model_id` is not a folder, the model is downloaded from the Hugging Face Hub into the cache.

    Raises:
        HyperionError: neither the folder nor the model exists, or the download failed.
    """
    name = str(model_id)
    if name.startswith("random_") or name in RANDOM_LLAMAS:
        return None
    folder = expanded(name)
    return folder if folder.is_dir() else _from_hub(name)


def local_llama(data_source: str) -> Path | None:
    """Return the folder llama/ of the mirror or of the cache, or None if neither has it.

    Args:
        data_source: requested source of data, such as 'mirror' or 'cache'. 'auto' looks into the mirror, then into the cache.
    """
    places = {"mirror": ("auto", "mirror"), "cache": ("auto", "cache", "download")}
    for place in [place for place, sources in places.items() if data_source in sources]:
        try:
            folder = (mirror_root() if place == "mirror" else cache_root()) / WEIGHTS_FOLDER
        except DataUnavailable:
            continue  # no mirror is configured
        if folder.is_dir():
            return folder
    return None


def verify_llama_folder(folder: Path) -> LlamaForCausalLM:
    """Check that a folder contains a complete Llama: its configuration, all shards, and all tensors with the right shapes.

    Only the headers of the weight files are read.

    Returns:
        The model on the meta device.

    Raises:
        HyperionError: a file or a tensor is missing or wrong. The message names this file or tensor.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = _json(folder / "config.json")
    if settings.get("model_type") != "llama":
        raise HyperionError(
            f"config.json has the model type {settings.get('model_type')!r}, not 'llama'",
            where=folder / "config.json",
            next_step="give the folder of a Llama",
        )
    if "quantization_config" in settings:
        raise HyperionError(
            "the weights are quantised", where=folder / "config.json", next_step="give a folder with the original weights"
        )
    shapes = _stored_shapes(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        # A tied head is the same tensor as the embedding, so files need not contain it.
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
    """Read the headers of all weight files. Return a dict that maps each tensor's name to its shape."""
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
            f"the weights are pickle files ({pickled}). Reading a pickle can run code, so they were not opened",
            where=folder,
            next_step="save the weights as safetensors on a machine where you trust them: model.save_pretrained(folder)",
        )
    raise HyperionError(
        f"the folder contains neither {SINGLE} nor {INDEX}", where=folder, next_step="give a folder with safetensors weights"
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
    """Return the cache folder of a model on the Hugging Face Hub. Download the model if the folder does not exist."""
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise HyperionError(
            f"{name!r} is not a folder, a random configuration, or an id of the form organisation/model",
            where=Path(name).absolute(),
            next_step=f"give a folder with weights, or one of {', '.join(RANDOM_LLAMAS)}",
        )
    target = cache_root() / HUB_FOLDER / "--".join(parts)
    if not target.is_dir():
        # The folder gets its final name only after the check, so that a broken download is not mistaken for a model.
        with staged(target) as work:
            _download(name, work)
            verify_llama_folder(work)
    return target


def _download(name: str, work: Path) -> None:
    """Download a model: first its list of files, then the JSON files (configuration, tokenizer) and the safetensors files."""
    listing = work / "listing"
    try:
        download(f"{hub_endpoint()}/api/models/{name}", listing)
    except DataUnavailable as error:
        # These status codes mean that the hub refuses this model. Other errors are network errors.
        if getattr(error.__cause__, "code", None) not in (401, 403, 404):
            raise
        raise DataUnavailable(
            f"the hub refuses to serve {name}: {error.__cause__}",
            where=f"{hub_endpoint()}/{name}",
            next_step="check the id; if the model is gated, accept its licence, download the model yourself and give its folder",
        ) from error
    siblings = _json(listing).get("siblings", [])
    listing.unlink()
    if not isinstance(siblings, list) or not all(isinstance(entry, dict) for entry in siblings):
        raise DataUnavailable(
            f"the hub's reply for {name} contains no list of files", where=hub_endpoint(), next_step="try again later"
        )
    files = [str(entry.get("rfilename", "")) for entry in siblings]
    # transformers reads files at the top level only.
    wanted = [file for file in files if "/" not in file and file.endswith((".json", ".safetensors"))]
    if not any(file.endswith(".safetensors") for file in wanted):
        raise DataUnavailable(
            f"the hub has no safetensors files of {name}",
            where=f"{hub_endpoint()}/{name}",
            next_step="choose a model with safetensors files",
        )
    for file in wanted:
        download(f"{hub_endpoint()}/{name}/resolve/main/{file}", inner_path(work, file, DataUnavailable, _AGAIN))
