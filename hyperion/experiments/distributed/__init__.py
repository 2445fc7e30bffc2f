"""Training on several ranks: parity, resharding, rank failure."""
