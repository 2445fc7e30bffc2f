"""Training steps: launches, operators, compilation, traces, predictions."""
