"""Collectives: their times, verification of their outputs, latency and bandwidth, and overlap with a computation."""
