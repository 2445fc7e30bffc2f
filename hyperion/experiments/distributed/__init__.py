"""Experiments on training with several ranks: parity with one device, checkpoint resharding, and failure of a rank."""
