"""Memory that tensors and processes use: peak, caps and the largest allocation, tensors of a step and their history."""
