"""The functions of `hyperion.measure` that measure your own code, and the objects that they return."""
