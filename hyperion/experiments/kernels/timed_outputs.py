"""Time functions in turn, and keep the outputs of their last timed calls for verification."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from hyperion.hardware import Device
from hyperion.measure import Timing, time_interleaved

Outputs = tuple[Tensor, ...]


def time_and_keep(
    calls: Mapping[str, Callable[[], Outputs]], device: Device, time_limit_s: float
) -> tuple[dict[str, Timing], dict[str, Outputs]]:
    """Time functions in turn. Return their timings, and the outputs of each function's last timed call.

    Before the timing, each function is called once, and its outputs are filled with NaN. Before each call, the function's last
    outputs are freed, so on a GPU the allocator reuses their memory for the new ones. An element that the function does not write
    stays NaN.
    """
    outputs_by_name: dict[str, Outputs] = {}

    def call(name: str) -> None:
        # Free the last outputs first, so that the allocator can reuse their memory for the new ones.
        outputs_by_name.pop(name, None)
        outputs_by_name[name] = calls[name]()

    functions = {name: partial(call, name) for name in calls}
    for name, function in functions.items():
        function()
        for output in outputs_by_name[name]:
            output.detach().fill_(math.nan)
    timings = time_interleaved(list(functions.values()), device, time_limit_s=time_limit_s)
    return dict(zip(calls, timings, strict=True)), outputs_by_name
