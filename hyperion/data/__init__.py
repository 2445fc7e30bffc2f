"""Data: sources, WikiText-2, CIFAR-10, instruction rows, synthetic sets of known difficulty, tokenizers, packing, counting
baselines.

The loaders import torch and stand in `hyperion.data.batches.loaders`; everything here works without it.
"""

from hyperion.data.batches.packing import IGNORE_INDEX, Padding, packed_windows
from hyperion.data.images.cifar10 import load_cifar10
from hyperion.data.images.imageset import ImageSet, channel_statistics
from hyperion.data.instructions.completions import Completions, tokenize_completions
from hyperion.data.instructions.instructions import Instruction, InstructionSet, load_instructions
from hyperion.data.prepare.fetch import Report, fetch_all
from hyperion.data.prepare.prepare import PreparedImages, PreparedText, open_prepared, prepare_images, prepare_text
from hyperion.data.prepare.verify import Finding, Verdict, verify
from hyperion.data.store.faults import DataError, DataUnavailable
from hyperion.data.store.manifest import DataManifest
from hyperion.data.store.sources import SOURCES
from hyperion.data.text.corpus import TextCorpus, corpus_of_files, count_non_empty, count_words_with_eos
from hyperion.data.text.ngram import Baseline, bigram_baseline, unigram_baseline
from hyperion.data.text.synthetic_text import EchoLanguage
from hyperion.data.text.tokenizer import Tokenizer, load_tokenizer
from hyperion.data.text.tokenizer_files import read_tokenizer
from hyperion.data.text.wikitext2 import load_wikitext2

__all__ = [
    "IGNORE_INDEX",
    "SOURCES",
    "Baseline",
    "Completions",
    "DataError",
    "DataManifest",
    "DataUnavailable",
    "EchoLanguage",
    "Finding",
    "ImageSet",
    "Instruction",
    "InstructionSet",
    "Padding",
    "PreparedImages",
    "PreparedText",
    "Report",
    "TextCorpus",
    "Tokenizer",
    "Verdict",
    "bigram_baseline",
    "channel_statistics",
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
]
