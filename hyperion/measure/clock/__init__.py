"""Timing of functions: clocks, warm-up, sampling, and checks of timings and outputs."""
