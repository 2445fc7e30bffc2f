"""Collectives between ranks: bandwidth, latency, overlap."""
