"""Text data: corpora, tokenizers, fast encoding, and n-gram models."""
