"""Collectives: buffers, exact verification, fits, overlap."""
