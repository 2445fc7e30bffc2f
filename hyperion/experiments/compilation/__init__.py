"""Experiment on torch.compile: time and memory of a call, and the number of calls after which compilation saves time."""
