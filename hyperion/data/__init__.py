"""Data sets: download, verification, tokenization, preparation, and n-gram models as baselines.

This module does not import torch. The loaders, which need torch, are in `hyperion.data.batches` and
`hyperion.data.images.device_images`.
"""

from hyperion.data.images.cifar10 import load_cifar10
from hyperion.data.images.imageset import ImageSet, channel_statistics
from hyperion.data.packing import IGNORE_INDEX, Padding, packed_windows
from hyperion.data.prepare.catalog import FetchReport, fetch_all
from hyperion.data.prepare.prepare import PreparedImages, PreparedText, open_prepared, prepare_images, prepare_text
from hyperion.data.prepare.token_files import TokenFiles, check_token_files, write_corpus_tokens, write_jsonl_tokens
from hyperion.data.prepare.verify import DataFinding, FolderVerdict, verify
from hyperion.data.store.folders import DataError, DataManifest, DataUnavailable
from hyperion.data.store.sources import SOURCES
from hyperion.data.text.corpus import EchoLanguage, TextCorpus, corpus_of_files, count_non_empty, count_words_with_eos
from hyperion.data.text.instructions import Completions, Instruction, InstructionSet, load_instructions, tokenize_completions
from hyperion.data.text.ngram import Baseline, bigram_baseline, unigram_baseline
from hyperion.data.text.tokenizer import Tokenizer, load_tokenizer, read_tokenizer
from hyperion.data.text.wikitext2 import load_wikitext2

__all__ = [
    "IGNORE_INDEX",
    "SOURCES",
    "Baseline",
    "Completions",
    "DataError",
    "DataFinding",
    "DataManifest",
    "DataUnavailable",
    "EchoLanguage",
    "FetchReport",
    "FolderVerdict",
    "ImageSet",
    "Instruction",
    "InstructionSet",
    "Padding",
    "PreparedImages",
    "PreparedText",
    "TextCorpus",
    "TokenFiles",
    "Tokenizer",
    "bigram_baseline",
    "channel_statistics",
    "check_token_files",
    "corpus_of_files",
    "count_non_empty",
    "count_words_with_eos",
    "fetch_all",
    "load_cifar10",
    "load_instructions",
    "load_tokenizer",
    "load_wikitext2",
    "open_prepared",
    "packed_windows",
    "prepare_images",
    "prepare_text",
    "read_tokenizer",
    "tokenize_completions",
    "unigram_baseline",
    "verify",
    "write_corpus_tokens",
    "write_jsonl_tokens",
]
