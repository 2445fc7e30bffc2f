"""Training steps of reference models: host costs, phases of a step, and throughput and memory by batch size."""
