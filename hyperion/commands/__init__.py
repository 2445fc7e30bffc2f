"""The commands, with their options: those that `hyperion.cli` assembles, and the programs of phase2_development.

Modules that `hyperion.cli` imports must start fast, so they import PyTorch and other slow packages inside functions only.
"""
