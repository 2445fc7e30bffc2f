"""Training steps of reference models: time, memory, operators, batch size."""
