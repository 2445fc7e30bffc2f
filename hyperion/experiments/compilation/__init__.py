"""torch.compile: time, memory, and the number of calls after which compilation pays."""
