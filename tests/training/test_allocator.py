"""Run in a child, because the setting holds for a whole process."""

import subprocess
import sys

import pytest

CHILD = """
import resource
import numpy as np
from hyperion.training.engine import keep_freed_memory

print(keep_freed_memory())
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(64 * 2**20, np.uint8).fill(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.process
def test_a_large_buffer_is_reused_without_page_faults():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    took_effect, first, _, third = child.stdout.split()
    if took_effect == "False":
        pytest.skip("this C library has no mallopt")
    assert int(third) < int(first) / 10
