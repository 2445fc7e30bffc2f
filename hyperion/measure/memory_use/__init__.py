"""Memory use: peak memory, memory limits, the largest possible allocation, and the lifetimes of the tensors of a step."""
