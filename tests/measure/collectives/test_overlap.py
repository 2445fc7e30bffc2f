"""What is made of three times, and that a rank's wrong sum is seen. (Real ranks: test_collectives.py.)"""

import numpy as np
import pytest

from hyperion.hardware.telemetry import unreadable
from hyperion.measure import Timing, Verification
from hyperion.measure.collectives.collectives import CollectiveOverlap


def overlap(compute: float, collective: float, both: float, noise: float = 0.0) -> CollectiveOverlap:
    random = np.random.default_rng(0)
    timings = (
        Timing(seconds * random.lognormal(0, noise, 40), (seconds,), True, False, "interval", unreadable("made up"))
        for seconds in (compute, collective, both)
    )
    return CollectiveOverlap(1 << 20, "bf16", 4, *timings, Verification("exact", 0.0, 0.0))


@pytest.mark.parametrize(
    ("compute", "collective", "both", "share", "exposed"),
    [
        (10e-3, 4e-3, 10e-3, 1.0, 0.0),  # hidden wholly
        (10e-3, 4e-3, 14e-3, 0.0, 1.0),  # in turns
        (4e-3, 10e-3, 12e-3, 0.5, 0.8),  # the computation is the shorter one
        (10e-3, 4e-3, 16e-3, -0.5, 1.5),  # worse than in turns
    ],
)
def test_shares_are_those_of_the_three_times(compute, collective, both, share, exposed):
    measured = overlap(compute, collective, both)
    assert measured.share.value == pytest.approx(share)
    assert measured.exposed_share.value == pytest.approx(exposed)


def test_noise_is_in_the_interval():
    measured = overlap(10e-3, 4e-3, 12e-3, noise=0.02)
    assert measured.share.ci_low < 0.5 < measured.share.ci_high and measured.share.n == 40
    assert measured.share.ci_high - measured.share.ci_low > 0.01


def test_it_says_all_three_times():
    told = str(overlap(10e-3, 4e-3, 12e-3))
    assert "all_reduce of 1,048,576 bytes, bf16, 4 ranks: 4 ms alone; computing: 10 ms alone, 12 ms together" in told
    assert "overlapped 50% of the shorter one (95 % CI 50% to 50%)" in told
