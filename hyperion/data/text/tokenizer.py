"""Load GPT-2's tokenizer, train a tokenizer on the corpus, or read the tokenizer in the folder of a model.

GPT-2's tokenizer is read from a mirror, the cache or the Hugging Face hub. GPT-2's tokenizer and trained tokenizers use a
byte-level BPE: they can encode every text, and decode(encode(text)) == text.

Source of GPT-2's tokenizer: Radford et al. 2019; model openai-community/gpt2 on the hub.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import tokenizers

from hyperion.data.store.arrays import token_dtype
from hyperion.data.store.folders import DataError, DataUnavailable, staged
from hyperion.data.store.sources import Checksums, PublishedSet, compare_checksums, download, hub_endpoint, take
from hyperion.data.text.corpus import TextCorpus
from hyperion.data.text.encoding import EncoderPool
from hyperion.untrusted import parse_json, printable, read_bounded, read_json

FOLDER = "gpt2"
HUB_FOLDER = "openai-community/gpt2/resolve/main"
END_OF_TEXT = "<|endoftext|>"
GPT2_VOCABULARY = 50257
GPT2_SHA256 = {
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
SYNTHETIC_VOCABULARY = 640  # 256 bytes, the end of text, and enough merges to make each of the 256 synthetic words one token
TRAINED_VOCABULARY = 8192


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        name: 'gpt2' or 'bpe-<size>-<corpus>'.
        source: 'mirror', 'cache' or 'download' for GPT-2's tokenizer, 'trained' for a tokenizer trained on the corpus, or the
            `source` that was given to `read_tokenizer`.
        detail: description of the source.
        vocab_size: largest token id + 1, including the end of text. It exceeds the number of entries if some ids are unused.
        sha256: hash of the tokenizer's complete definition.
        eos_id: id of the end of text, such as <|endoftext|>. It is also used as prefix and as padding.
        bos_id: id of the beginning of text; None if the tokenizer has no such token (GPT-2).
        checksums: result of the comparison with the published checksums; None for tokenizers other than GPT-2's.
    """

    name: str
    source: str
    detail: str
    vocab_size: int
    sha256: str
    eos_id: int
    _bpe: tokenizers.Tokenizer = field(repr=False, compare=False)
    bos_id: int | None = None
    checksums: Checksums | None = None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, int32 [tokens].

        Texts are encoded in parallel unless the environment variable TOKENIZERS_PARALLELISM is "false".
        """
        # Add no special tokens, so that the ids of texts can be concatenated. The caller adds the tokens for the beginning and
        # the end of text.
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encoding(self, workers: int = 1) -> EncoderPool:
        """Return a context manager that starts `workers` processes to encode text of any length. See `EncoderPool`."""
        return EncoderPool(self._bpe, workers)

    def encode_split(self, lines: Sequence[str]) -> np.ndarray:
        """Return the token ids of the lines of a split, int32 [tokens]. Newlines are encoded, and no special tokens are added."""
        return np.concatenate([np.empty(0, np.int32), *self.encode(lines)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids. With a byte-level tokenizer, it is exactly the text that was encoded."""
        return self._bpe.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def library_tokenizer(self) -> tokenizers.Tokenizer:
        """Return a copy of this tokenizer as an object of the tokenizers library."""
        return tokenizers.Tokenizer.from_str(self.definition())

    def definition(self) -> str:
        """Return the complete definition in the JSON format of the tokenizers library."""
        return self._bpe.to_str()


def load_tokenizer(source: str = "auto", corpus: TextCorpus | None = None) -> Tokenizer:
    """Load GPT-2's tokenizer, or train a BPE tokenizer on the train split of the corpus.

    'auto' loads GPT-2's tokenizer from the mirror, the cache or the hub. If none of them has it, 'auto' trains a tokenizer. For
    a synthetic corpus, 'auto' always trains a tokenizer, because the merges of an English tokenizer would split the synthetic
    words.

    Args:
        source: 'auto', 'mirror', 'cache', 'download', or 'synthetic' for a trained tokenizer.
        corpus: the text to train on; required if a tokenizer may be trained.

    Raises:
        DataError: the files are wrong, no source has them, or a tokenizer must be trained and no corpus is given.
    """
    if source == "auto" and corpus is not None and corpus.source == "synthetic":
        source = "synthetic"
    suppliers = GPT2.suppliers()
    if corpus is not None or source == "synthetic":
        suppliers["synthetic"] = lambda: train_tokenizer(corpus)
    return take("tokenizer", source, suppliers)


def train_tokenizer(corpus: TextCorpus | None, vocab_size: int | None = None) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the train split of the corpus.

    The same corpus and the same size give the same tokenizer.

    Args:
        corpus: the text to train on.
        vocab_size: maximum number of entries. None means 640 for a synthetic and 8192 for a real corpus.

    Raises:
        DataError: the corpus is None.
    """
    if corpus is None:
        raise DataError("no corpus to train a tokenizer on", next_step="call load_tokenizer(source, corpus=load_wikitext2())")
    if vocab_size is None:
        vocab_size = SYNTHETIC_VOCABULARY if corpus.source == "synthetic" else TRAINED_VOCABULARY
    bpe = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes are in the vocabulary, so every text can be encoded. The alphabet has no fixed order, so it is sorted.
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus.splits["train"], trainer)
    size = id_count(bpe)
    detail = f"byte-level BPE of {size} entries trained on the train split of {corpus.name}"
    definition = hashlib.sha256(bpe.to_str().encode()).hexdigest()
    name = f"bpe-{size}-{corpus.name}"
    return Tokenizer(name, "trained", detail, size, definition, _end_of_text(bpe), bpe)


def checksums(folder: Path) -> Checksums:
    """Compare GPT-2's files in `folder` with the hashes of the hub's files."""
    return compare_checksums({folder / name: expected for name, expected in GPT2_SHA256.items()}, "sha256")


def id_count(bpe: tokenizers.Tokenizer) -> int:
    """Return the largest id + 1, which is the number of rows that an embedding needs.

    It exceeds the number of entries if some ids are unused.
    """
    return max(bpe.get_vocab(with_added_tokens=True).values()) + 1


def _end_of_text(bpe: tokenizers.Tokenizer) -> int:
    """Return the id of the special token END_OF_TEXT. GPT-2's tokenizer and trained tokenizers have this token."""
    return cast(int, bpe.token_to_id(END_OF_TEXT))


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    return bpe


def _gpt2(folder: Path, source: str, label: str) -> Tokenizer:
    if not folder.is_dir():
        raise DataUnavailable(
            f"{label} has no {FOLDER}/", where=folder, next_step="put vocab.json and merges.txt there, or run `make fetch`"
        )
    remedy = "copy GPT-2's vocab.json and merges.txt again, or remove the folder and run `make fetch`"
    contents = {name: _content(folder / name, remedy) for name in GPT2_SHA256}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    definition = "".join(f"{name} {digest}\n" for name, digest in hashes.items())
    try:
        bpe = _byte_level(tokenizers.models.BPE(*_parsed(contents, folder, remedy)))
        bpe.add_special_tokens([END_OF_TEXT])
        # Encode a test string, because the files may be readable but belong to another tokenizer, which gives other ids.
        probe = bpe.encode("Hello world").ids
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"not a readable tokenizer: {error}", where=folder, next_step=remedy) from error
    entries, size = bpe.get_vocab_size(), id_count(bpe)
    if entries != GPT2_VOCABULARY or size != GPT2_VOCABULARY or probe != [15496, 995]:
        raise DataError(
            f"not GPT-2's tokenizer: {entries} entries with ids up to {size - 1} (expected {GPT2_VOCABULARY} and "
            f"{GPT2_VOCABULARY - 1}), 'Hello world' gives {probe} (expected [15496, 995])",
            where=folder,
            next_step=remedy,
        )
    published = checksums(folder)
    detail = f"GPT-2, {size} entries, {published}"
    hashed = hashlib.sha256(definition.encode()).hexdigest()
    return Tokenizer("gpt2", source, detail, size, hashed, _end_of_text(bpe), bpe, checksums=published)


def _content(path: Path, remedy: str) -> bytes:
    try:
        return read_bounded(path, DataError, remedy)
    except FileNotFoundError as error:
        raise DataError(f"{path.name} is missing", where=path, next_step=remedy) from error
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=remedy) from error


def _parsed(contents: dict[str, bytes], folder: Path, remedy: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges in GPT-2's two files.

    Raises:
        DataError: the vocabulary is not a JSON object with distinct ids below 2**31, or a line of the merges is not a pair.
    """
    path = folder / "vocab.json"
    vocabulary = parse_json(contents[path.name], DataError, remedy, where=path)
    if not isinstance(vocabulary, dict):
        raise DataError("the vocabulary is not a JSON object", where=path, next_step=remedy)
    owners: dict[int, str] = {}
    for token, number in vocabulary.items():
        # `isinstance` would accept True and False as ids.
        if type(number) is not int or not 0 <= number < 1 << 31:
            fault = f"token {printable(token)[:40]!r} has the id {str(number)[:40]}, expected 0 to {(1 << 31) - 1}"
            raise DataError(fault, where=path, next_step=remedy)
        if owners.setdefault(number, token) != token:
            fault = f"tokens {printable(owners[number])[:40]!r} and {printable(token)[:40]!r} share the id {number}"
            raise DataError(fault, where=path, next_step=remedy)
    path = folder / "merges.txt"
    merges = []
    for number, line in enumerate(contents[path.name].decode(errors="replace").split("\n"), 1):
        if not line or line.startswith("#version"):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2:
            fault = f"line {number} has {len(parts)} parts, expected the two parts of a merge"
            raise DataError(fault, where=path, next_step=remedy)
        merges.append((parts[0], parts[1]))
    return vocabulary, merges


def _fetch(target: Path) -> None:
    with staged(target) as work:
        for name, expected in GPT2_SHA256.items():
            download(f"{hub_endpoint()}/{HUB_FOLDER}/{name}", work / name, sha256=expected)


GPT2 = PublishedSet(FOLDER, _gpt2, lambda folder: [folder / name for name in GPT2_SHA256], _fetch, manifest=False)

FILE = "tokenizer.json"
TOKENIZER_BYTES = 1 << 28  # maximum size of tokenizer.json; the largest vocabularies in use need about 35 MB
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def read_tokenizer(folder: Path, source: str = "folder") -> Tokenizer:
    """Load the tokenizer.json that transformers saves next to a model's weights.

    Decoding may not reproduce every text exactly. For example, Llama's tokenizer adds a space.

    Args:
        folder: the folder of the model.
        source: value for the attribute `source` of the tokenizer.

    Raises:
        DataError: tokenizer.json is missing, unreadable or has ids of more than 31 bits, or the end-of-text token is unknown.
    """
    path, again = Path(folder) / FILE, "copy the folder again"
    if not path.exists():
        convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise DataError(f"the model has no {FILE}", where=path, next_step=f"create {FILE} with transformers: {convert}")
    try:
        content = read_bounded(path, DataError, again, TOKENIZER_BYTES)
        bpe = tokenizers.Tokenizer.from_buffer(content)
        size = id_count(bpe)
        token_dtype(size)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"not a readable tokenizer: {error}", where=path, next_step=again) from error
    special = {name: _special(Path(folder), f"{name}_token", bpe) for name in ("bos", "eos")}
    if special["eos"] is None:
        raise DataError(
            f"neither {' nor '.join(_CONFIGS)} names an eos_token that {FILE} knows",
            where=folder,
            next_step="copy tokenizer_config.json of the same model too",
        )
    digest = hashlib.sha256(content).hexdigest()
    return Tokenizer(
        Path(folder).name, source, f"{FILE} of the model, ids up to {size - 1}", size, digest, special["eos"], bpe, special["bos"]
    )


def _special(folder: Path, name: str, bpe: tokenizers.Tokenizer) -> int | None:
    """Return the id of a special token from the first configuration file with an entry `name`, or None if no file has it."""
    for config in _CONFIGS:
        path = folder / config
        if not path.exists():
            continue
        document = read_json(path, DataError, f"copy {config} again")
        if not isinstance(document, dict):
            raise DataError(f"{config} is not a JSON object", where=path, next_step=f"copy {config} again")
        token = document.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if not isinstance(token, str):
            fault = f"{name} in {config} is {type(token).__name__}, expected a string"
            raise DataError(fault, where=path, next_step=f"copy {config} again")
        # JSON may contain an unpaired surrogate, which the Rust library cannot represent.
        return bpe.token_to_id(token.encode(errors="replace").decode())
    return None
