"""The tokenizer that belongs to a model: tokenizer.json beside its weights, as transformers saves it."""

import hashlib
from pathlib import Path

import tokenizers

from hyperion.data.store.faults import DataError
from hyperion.data.store.shards import token_dtype
from hyperion.data.text.tokenizer import Tokenizer, id_count
from hyperion.untrusted import read_bounded, read_json

FILE = "tokenizer.json"
TOKENIZER_BYTES = 1 << 28  # the largest vocabularies in use take some 35 MB
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def read_tokenizer(folder: Path, source: str = "folder") -> Tokenizer:
    """The tokenizer of a model's folder. It need not give every text back letter by letter: Llama's adds a space.

    Args:
        source: where the folder came from.

    Returns:
        A tokenizer whose vocab_size is its largest id + 1.

    Raises:
        DataError: tokenizer.json is missing, unreadable or has ids of more than 31 bits, or nothing says which token ends a text.
    """
    path, again = Path(folder) / FILE, "copy the folder again"
    if not path.exists():
        convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise DataError(f"the model has no {FILE}", where=path, next_step=f"make it with transformers: {convert}")
    try:
        content = read_bounded(path, DataError, again, TOKENIZER_BYTES)
        bpe = tokenizers.Tokenizer.from_buffer(content)
        size = id_count(bpe)
        token_dtype(size)
    except DataError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"no readable tokenizer: {error}", where=path, next_step=again) from error
    special = {name: _special(Path(folder), f"{name}_token", bpe) for name in ("bos", "eos")}
    if special["eos"] is None:
        raise DataError(
            f"neither {' nor '.join(_CONFIGS)} names an eos_token that {FILE} knows",
            where=folder,
            next_step="copy tokenizer_config.json of the same model as well",
        )
    digest = hashlib.sha256(content).hexdigest()
    return Tokenizer(
        Path(folder).name, source, f"{FILE} of the model, ids up to {size - 1}", size, digest, special["eos"], bpe, special["bos"]
    )


def _special(folder: Path, name: str, bpe: tokenizers.Tokenizer) -> int | None:
    """Id of the token that the first of the configuration files which speaks of `name` gives, None where none does."""
    for config in _CONFIGS:
        path = folder / config
        if not path.exists():
            continue
        document = read_json(path, DataError, "copy it again")
        if not isinstance(document, dict):
            raise DataError(f"{config} is no JSON object", where=path, next_step="copy it again")
        token = document.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if not isinstance(token, str):
            fault = f"{config} gives {name} as {type(token).__name__}, expected a text"
            raise DataError(fault, where=path, next_step="copy it again")
        return bpe.token_to_id(token.encode(errors="replace").decode())
    return None
