"""Number formats in training: their speed, memory and loss."""
