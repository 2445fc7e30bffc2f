"""The models and prompts of the chapter: a trained Llama for correct answers, and a larger random Llama for load tests."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperion.chapter.context import Context
from hyperion.data import load_tokenizer, load_wikitext2, read_tokenizer
from hyperion.data.store.folders import processed_root, read_manifest, staged, write_manifest
from hyperion.measure import FORMATS
from hyperion.models.llama import RANDOM_LLAMAS, build_random_llama
from hyperion.workloads import datasets
from hyperion.workloads.trained_models import trained_language_model

DATA = datasets.TEXT
# `transformers serve` refuses a tokenizer without a chat template. The models have not been trained on dialogues.
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True)
class ServedModel:
    """A model in Hugging Face format.

    Args:
        name: name of the model.
        folder: folder of the model.
        source: source of its training data, or of the text of its tokenizer.
    """

    name: str
    folder: Path
    source: str

    @property
    def config(self) -> dict:
        """The content of config.json."""
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights that a decoding step reads, in the given number format.

        All weights are read, except for the embedding if the head has its own weights: then only the rows of the input tokens are
        read.
        """
        from safetensors import safe_open

        elements = 0
        for file in sorted(self.folder.glob("model*.safetensors")):
            with safe_open(file, "pt") as tensors:
                shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - not a dict
            elements += sum(int(np.prod(shape)) for shape in shapes.values())
            if not self.config["tie_word_embeddings"]:
                elements -= int(np.prod(shapes.get("model.embed_tokens.weight", [0])))
        return elements * FORMATS[dtype].bytes

    def cache_bytes(self, tokens: int, dtype: str) -> int:
        """Return the bytes of the keys and values of some tokens: 2 · layers · key-value heads · features · bytes · tokens."""
        config = self.config
        features = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * features * FORMATS[dtype].bytes * tokens

    def load(self, dtype: str, device: str) -> Any:
        """Return the model as a LlamaForCausalLM in evaluation mode."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=FORMATS[dtype].storage)
        return model.to(device).eval().requires_grad_(False)


def served_model(context: Context, name: str) -> ServedModel:
    """Return a trained Llama (`llama_…`), or a Llama with random weights (`random_llama_…`), which is created only once.

    The speed of a server does not depend on the values of the weights, so load tests may use random weights. The answers of such
    a model are meaningless, so they are not compared.
    """
    if name not in RANDOM_LLAMAS:
        trained = trained_language_model(context, name)
        return ServedModel(name, trained.folder, trained.source)
    corpus = _corpus(context)
    tokenizer = load_tokenizer("auto" if corpus.source == "synthetic" else context.data_source, corpus)
    device = context.device
    dtype = torch.float32 if device.kind == "cpu" else torch.bfloat16
    digest = hashlib.sha256(f"{tokenizer.sha256} {context.seed} {dtype} {torch.__version__}".encode()).hexdigest()
    folder = processed_root() / f"{name}-{digest[:12]}"
    if not folder.is_dir() or read_manifest(folder) is None:
        from transformers import PreTrainedTokenizerFast

        with staged(folder) as work:
            torch.manual_seed(context.seed)
            model = build_random_llama(name, tokenizer.vocab_size, dtype, device.torch_device)
            model.save_pretrained(work)
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.library_tokenizer(), eos_token="<|endoftext|>")
            fast.chat_template = _TEMPLATE
            fast.save_pretrained(work)
            write_manifest(work, name=name, source=corpus.source, detail="random weights", facts={"seed": context.seed})
    return ServedModel(name, folder, corpus.source)


def prompts_of(context: Context, folder: Path, count: int, tokens: int, seed: int) -> list[str]:
    """Return texts of about `tokens` tokens each from the test split of WikiText-2. They start at different tokens if possible.

    Equal prompts would be answered faster, because a server may reuse the cache of equal prefixes.

    Args:
        context: context of the experiment, with its data source.
        folder: folder of the model, with its tokenizer.
        count: number of texts.
        tokens: number of tokens in a text, as the model's tokenizer counts them.
        seed: seed of the random choice.
    """
    tokenizer = read_tokenizer(folder)
    ids = tokenizer.encode(["".join(_corpus(context).splits["test"])])[0]
    starts = np.random.default_rng(seed).choice(len(ids) - tokens, count, replace=len(ids) - tokens < count)
    return [tokenizer.decode(ids[start : start + tokens]) for start in starts]


def pieces_of(folder: Path, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the texts that a server sends for these tokens, in order.

    A token that ends within a UTF-8 character has no text. The next token completes the character.
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = DecodeStream([], skip_special_tokens=True)
    return tuple(text for text in (stream.step(tokenizer, token) for token in ids) if text)


def _corpus(context: Context):
    return load_wikitext2(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_lines=context.synthetic["lines"],
        seed=context.seed,
    )
