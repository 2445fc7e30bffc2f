"""Collectives between ranks: correctness, bandwidth, latency, and overlap with computation."""
