"""The harness's clock beside the loop anybody would write, on the same work, in turn."""

from collections.abc import Callable

import numpy as np

from hyperion.hardware import Device, Sampler
from hyperion.measure.clock.clocks import WallClock, device_clock
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing


def compare_with_plain_loop(
    function: Callable[[], object],
    device: Device,
    calls: int = 10,
    rounds: int = MINIMUM_SAMPLES,
    plain: Callable[[], object] | None = None,
) -> tuple[Timing, Timing]:
    """Time a function on the harness's clock, and by the plain loop: synchronize, host clock, `calls` calls, synchronize.

    Both run with warm caches, `calls` calls in turn, round after round; a round gives one sample of each.

    Args:
        plain: what the plain loop calls, the same function without any.

    Returns:
        Timings of one call by the harness (median of its calls) and by the plain loop (mean of its calls).
    """
    clock, plain_clock = device_clock(device), WallClock(device, calls)
    ours, theirs = [], []
    with Sampler(device) as sampler:
        for _ in range(rounds + 1):
            ours.append(float(np.median(clock.sample([function], None, calls)[0])))
            theirs.append(plain_clock.sample([plain or function], None, 1)[0][0])
    # The first round warms both up.
    return tuple(
        Timing(np.array(series[1:]), tuple(series[:1]), True, False, "rounds", sampler.telemetry) for series in (ours, theirs)
    )
