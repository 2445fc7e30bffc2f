"""Text: corpora, tokenizers, encoding, n-gram models."""
