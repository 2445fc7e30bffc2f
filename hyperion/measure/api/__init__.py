"""The functions of `hyperion.measure` for a reader's own code, and their answers."""
