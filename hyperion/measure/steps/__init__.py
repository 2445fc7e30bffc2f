"""Training steps: host time of launches and operators, compilation, profiler traces, and prediction of step times."""
