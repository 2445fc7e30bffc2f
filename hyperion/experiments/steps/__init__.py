"""Training steps of reference models: the host's costs, the phases of a step, and throughput and memory by batch size."""
