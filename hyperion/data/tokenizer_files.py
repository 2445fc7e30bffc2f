"""The tokenizer that belongs to a model: tokenizer.json beside its weights, as transformers saves it."""

import json
from pathlib import Path

import tokenizers

from hyperion.data.faults import DataError
from hyperion.data.staging import sha256_of
from hyperion.data.tokenizer import Tokenizer

FILE = "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def read_tokenizer(folder: Path, source: str = "folder") -> Tokenizer:
    """The tokenizer of a model's folder. It need not give every text back letter by letter: Llama's adds a space.

    Args:
        source: where the folder came from.

    Returns:
        A tokenizer whose vocab_size is its largest id + 1.

    Raises:
        DataError: tokenizer.json is missing or unreadable, or nothing says which token ends a text.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise DataError(f"the model has no {FILE}", where=path, next_step=f"make it with transformers: {convert}")
    try:
        bpe = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"no readable tokenizer: {error}", where=path, next_step="copy the folder again") from error
    ids = bpe.get_vocab(with_added_tokens=True).values()
    special = {name: _special(Path(folder), f"{name}_token", bpe) for name in ("bos", "eos")}
    if special["eos"] is None:
        raise DataError(
            f"neither {' nor '.join(_CONFIGS)} names an eos_token that {FILE} knows",
            where=folder,
            next_step="copy tokenizer_config.json of the same model as well",
        )
    size = max(ids) + 1
    return Tokenizer(
        Path(folder).name, source, f"{FILE} of the model, ids up to {size - 1}", size, sha256_of(path), special["eos"],
        bpe, special["bos"],
    )  # fmt: skip


def _special(folder: Path, name: str, bpe: tokenizers.Tokenizer) -> int | None:
    """Id of the token that the first of the configuration files which speaks of `name` gives, None where none does."""
    for config in _CONFIGS:
        path = folder / config
        if not path.is_file():
            continue
        try:
            token = json.loads(path.read_text(encoding="utf-8")).get(name)
        except (ValueError, AttributeError) as error:
            raise DataError(f"{config} is no JSON object: {error}", where=path, next_step="copy it again") from error
        if token is not None:
            return bpe.token_to_id(token["content"] if isinstance(token, dict) else str(token))
    return None
