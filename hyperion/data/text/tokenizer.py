"""Tokenizers: GPT-2's own from a mirror, the cache or the hub, else a byte-level BPE trained on the corpus and named
so.

Both are byte-level: every text can be encoded, and decode(encode(text)) == text.
Source of GPT-2's: Radford et al. 2019; hub model openai-community/gpt2.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers

from hyperion.data.errors import DataError, DataUnavailable
from hyperion.data.store.arrays import token_dtype
from hyperion.data.store.network import download, hub_endpoint
from hyperion.data.store.sources import Checksums, compare_checksums, mirror_root, take
from hyperion.data.store.staging import cache_root, staged
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
SYNTHETIC_VOCABULARY = 640  # 256 bytes, the end of text and room for each of the 256 made-up words to be one token
TRAINED_VOCABULARY = 8192


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        name: 'gpt2' or 'bpe-<size>-<corpus>'.
        source: 'mirror', 'cache', 'download' (GPT-2's), or 'trained' on the corpus.
        detail: what the source says of itself.
        vocab_size: largest token id + 1, the end of text included; more than the number of entries where ids are left out.
        sha256: hash of the tokenizer's whole definition.
        eos_id: id of <|endoftext|>, which also serves as prefix and padding.
        bos_id: id that begins a text where the tokenizer has one of its own (Llama's), else None.
        checksums: whether its files are their publisher's; None for a trained one and for those of a model's folder.
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
        """Token ids of every text, int32 [tokens]; encoded in parallel unless TOKENIZERS_PARALLELISM=false."""
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encoding(self, workers: int = 1) -> EncoderPool:
        """For text of any length: the same ids, chunk by chunk, by so many processes. To be used in a `with`."""
        return EncoderPool(self._bpe, workers)

    def encode_split(self, lines: Sequence[str]) -> np.ndarray:
        """Token ids of a whole split, int32 [tokens]: its lines with their newlines, nothing added."""
        return np.concatenate([np.empty(0, np.int32), *self.encode(lines)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids: exactly the text that was encoded."""
        return self._bpe.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def library_tokenizer(self) -> tokenizers.Tokenizer:
        """A copy of it, for libraries that take one."""
        return tokenizers.Tokenizer.from_str(self.definition())

    def definition(self) -> str:
        """All of it, as JSON that the tokenizers library reads."""
        return self._bpe.to_str()


def load_tokenizer(source: str = "auto", corpus: TextCorpus | None = None, vocab_size: int | None = None) -> Tokenizer:
    """GPT-2's tokenizer, or a BPE trained on the corpus's train split.

    'auto' takes GPT-2's from the mirror, the cache or the hub and trains one where none has it. For a synthetic corpus
    'auto' trains at once: English merges would cut the made-up words into pieces.

    Args:
        source: 'auto', 'mirror', 'cache', 'download', or 'synthetic' for a trained one.
        corpus: needed wherever a tokenizer may have to be trained.
        vocab_size: size limit of a trained one; None means 640 for a synthetic corpus and 8192 for a real one.

    Raises:
        DataError: files of the wrong content, no source has one, or nothing to train on.
    """
    if source == "auto" and corpus is not None and corpus.source == "synthetic":
        source = "synthetic"
    suppliers = {
        "mirror": lambda: _gpt2(mirror_root() / FOLDER, "mirror", "the mirror"),
        "cache": cached_tokenizer,
        "download": _downloaded,
    }
    if corpus is not None or source == "synthetic":
        suppliers["synthetic"] = lambda: train_tokenizer(corpus, vocab_size)
    return take("tokenizer", source, suppliers)


def train_tokenizer(corpus: TextCorpus | None, vocab_size: int | None = None) -> Tokenizer:
    """A byte-level BPE trained on the corpus's train split; the same corpus and size give the same tokenizer.

    Raises:
        DataError: no corpus.
    """
    if corpus is None:
        raise DataError("no corpus to train a tokenizer on", next_step="call load_tokenizer(source, corpus=load_wikitext2())")
    if vocab_size is None:
        vocab_size = SYNTHETIC_VOCABULARY if corpus.source == "synthetic" else TRAINED_VOCABULARY
    bpe = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus.splits["train"], trainer)
    size = id_count(bpe)
    detail = f"byte-level BPE of {size} entries trained on the train split of {corpus.name}"
    definition = hashlib.sha256(bpe.to_str().encode()).hexdigest()
    name = f"bpe-{size}-{corpus.name}"
    return Tokenizer(name, "trained", detail, size, definition, bpe.token_to_id(END_OF_TEXT), bpe)


def stage_tokenizer() -> str:
    """Put GPT-2's tokenizer into the cache, from the mirror where one is named, else from the hub.

    Returns:
        'present' when the cache already had it, else where it came from.

    Raises:
        DataError: neither can be had, or what came is wrong; the cache is as it was.
    """
    target = cache_root() / FOLDER
    if target.is_dir():
        cached_tokenizer()
        return "present"
    try:
        folder = mirror_root() / FOLDER
        _gpt2(folder, "mirror", "the mirror")
    except DataUnavailable:
        _stage_from_hub(target)
        return "downloaded"
    with staged(target) as work:
        for name in GPT2_SHA256:
            (work / name).write_bytes(_content(folder / name, "copy GPT-2's files into the mirror again"))
    return "copied from the mirror"


def cached_tokenizer() -> Tokenizer:
    """GPT-2's tokenizer of the cache.

    Raises:
        DataError: it is not there, or wrong.
    """
    return _gpt2(cache_root() / FOLDER, "cache", "the cache")


def checksums(folder: Path) -> Checksums:
    """Compare GPT-2's files in `folder` with the hashes of the hub's files."""
    return compare_checksums({folder / name: expected for name, expected in GPT2_SHA256.items()}, "sha256")


def id_count(bpe: tokenizers.Tokenizer) -> int:
    """Largest id + 1: what a table of one row per id needs. The number of entries is smaller where ids are left out."""
    return max(bpe.get_vocab(with_added_tokens=True).values()) + 1


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
        probe = bpe.encode("Hello world").ids
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"no readable tokenizer: {error}", where=folder, next_step=remedy) from error
    entries, size = bpe.get_vocab_size(), id_count(bpe)
    if entries != GPT2_VOCABULARY or size != GPT2_VOCABULARY or probe != [15496, 995]:
        raise DataError(
            f"not GPT-2's tokenizer: {entries} entries with ids up to {size - 1} (expected {GPT2_VOCABULARY} and "
            f"{GPT2_VOCABULARY - 1}), 'Hello world' gives {probe} (expected [15496, 995])",
            where=folder,
            next_step=remedy,
        )
    found = checksums(folder)
    detail = f"GPT-2, {size} entries, {found}"
    hashed = hashlib.sha256(definition.encode()).hexdigest()
    return Tokenizer("gpt2", source, detail, size, hashed, bpe.token_to_id(END_OF_TEXT), bpe, checksums=found)


def _content(path: Path, remedy: str) -> bytes:
    try:
        return read_bounded(path, DataError, remedy)
    except FileNotFoundError as error:
        raise DataError(f"{path.name} is missing", where=path, next_step=remedy) from error
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, next_step=remedy) from error


def _parsed(contents: dict[str, bytes], folder: Path, remedy: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of GPT-2's two files.

    Raises:
        DataError: the vocabulary is no object of distinct ids below 2**31, or a line of the merges is no pair.
    """
    path = folder / "vocab.json"
    vocabulary = parse_json(contents[path.name], DataError, remedy, where=path)
    if not isinstance(vocabulary, dict):
        raise DataError("the vocabulary is no JSON object", where=path, next_step=remedy)
    owners: dict[int, str] = {}
    for token, number in vocabulary.items():
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
        pair = tuple(line.rstrip("\r").split(" "))
        if len(pair) != 2:
            fault = f"line {number} holds {len(pair)} parts, expected the two parts of a merge"
            raise DataError(fault, where=path, next_step=remedy)
        merges.append(pair)
    return vocabulary, merges


def _downloaded() -> Tokenizer:
    target = cache_root() / FOLDER
    if target.is_dir():
        return cached_tokenizer()  # no second download, and the record says so
    _stage_from_hub(target)
    return _gpt2(target, "download", "the cache")


def _stage_from_hub(target: Path) -> None:
    with staged(target) as work:
        for name, expected in GPT2_SHA256.items():
            download(f"{hub_endpoint()}/{HUB_FOLDER}/{name}", work / name, sha256=expected)


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
