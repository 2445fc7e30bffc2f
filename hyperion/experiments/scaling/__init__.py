"""Experiment on scaling: the speed of a training on 1, 2, 4 and more devices, in weak and in strong scaling."""
