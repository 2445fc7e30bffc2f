"""Memory: bandwidth, caches, transfers, allocation, peaks."""
