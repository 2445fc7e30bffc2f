"""What tests of processes wait for, since none of it happens at once."""

import time


def wait_for(condition, seconds: float = 60) -> bool:
    """True once the condition holds; one that does not come to hold in that time fails the test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return True
