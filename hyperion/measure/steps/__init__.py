"""Training steps: the host time of launches and operators, compilation, profiler traces, and the prediction of step times."""
