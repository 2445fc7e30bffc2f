"""Training steps of reference models: the work of the host, the phases of a step, and throughput and memory by batch size."""
