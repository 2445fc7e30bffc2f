"""Memory of a training step: phases, estimates, activation checkpointing, and one step traced."""
