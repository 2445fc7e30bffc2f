"""Batches: packing, loaders, prefetch."""
