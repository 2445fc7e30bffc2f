"""Inference and quantisation: runtimes, operators, quantised weights, the speed of decoding."""
