"""Timing: clocks, warm-up, statistics, checks of the measurement itself."""
