"""The commands: each module holds one command, or one group of commands, with its options. `hyperion.cli` assembles them.

`hyperion.cli` imports all of these modules, so they import PyTorch and other slow packages inside functions only.
"""
