"""Moving bytes: memory bandwidth, caches, and copies between host and devices."""
