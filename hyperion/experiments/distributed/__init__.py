"""Experiments on training on several ranks: parity with one device, resharding of checkpoints, and failure of a rank."""
