"""Experiments on data: preparing, tokenizing and loading text and images."""
