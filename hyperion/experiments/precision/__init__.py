"""Experiments on number formats: their effect on training speed, memory and loss."""
