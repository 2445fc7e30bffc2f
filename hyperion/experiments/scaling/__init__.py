"""Experiment on scaling: training speed on 1, 2, 4 and more devices, in weak and strong scaling."""
