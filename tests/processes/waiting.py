"""Waiting for what other processes do."""

import time


def wait_for(condition, seconds: float = 180) -> bool:
    """Return True when the condition holds; fail the test if it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.05)
    return True
