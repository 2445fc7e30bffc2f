"""Experiments on data: how text and images are prepared, tokenized and loaded."""
