"""Memory of a training step: phases, estimates, activation checkpointing, traces."""
