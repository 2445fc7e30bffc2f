"""Training steps of reference models: costs of the host, phases of a step, and throughput and memory by batch size."""
