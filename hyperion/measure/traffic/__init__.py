"""Data movement: memory bandwidth, caches, and copies between host and devices."""
