"""Timing of functions: clocks, warm-up, sampling, and checks of the timings and of the outputs."""
