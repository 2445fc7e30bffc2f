"""torch.compile: time, memory, break-even."""
