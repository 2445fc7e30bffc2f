"""Planted faults: each known way to measure wrongly, and the check that catches it."""
