"""Number formats in training: speed, memory, loss."""
