"""Memory of a training step: its phases, estimates, activation checkpointing, and a trace of one step."""
