"""Measure two versions of a function over several process launches."""
