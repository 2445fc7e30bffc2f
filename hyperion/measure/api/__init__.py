"""The functions of `hyperion.measure` that measure your own code, and the answers that they return."""
