"""Experiments on number formats: their effect on the speed, the memory and the loss of a training."""
