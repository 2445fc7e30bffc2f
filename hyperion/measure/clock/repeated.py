"""One of many calls in a row, so short that launching it would hide it: captured in a graph on GPUs, in a loop on a CPU.

A kernel of a microsecond, launched eagerly, waits for the host longer than it runs. Replayed from a CUDA or HIP graph it
follows the one before it at the device's own pace, and a replay of some milliseconds is long beside the clock's resolution.
"""

import dataclasses
from collections.abc import Callable

import torch

from hyperion.hardware import Device
from hyperion.measure.clock.clocks import device_clock
from hyperion.measure.clock.timing import Timing, time_function

_BLOCK_S = 2e-3
_MOST_CALLS = 1000
NO_GRAPHS = "unavailable: a CPU has no graphs"


class RepeatedCalls:
    """A function made ready to be called many times in a row.

    What the function writes may be poisoned after this and before `time`: getting ready calls it, too.

    Args:
        function: enqueues or does one unit of work into tensors that it was given; it allocates nothing and asks nothing of
            the host, otherwise it cannot be captured.
        calls: in a row for one sample; 0 takes as many as fill 2 ms, up to 1000.

    Attributes:
        calls: in a row for one sample.
        graph: what replays them, None on a CPU and where capturing failed.
        not_captured: why there is no graph, else "".
    """

    def __init__(self, function: Callable[[], object], device: Device, calls: int = 0):
        self.function, self.device = function, device
        self.calls = calls or _calls_in_a_block(function, device)
        self.graph, self.not_captured = None, NO_GRAPHS
        if device.kind == "cpu":
            return
        try:
            self.graph, self.not_captured = _captured(function, self.calls, device), ""
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.not_captured = f"unavailable: capturing it failed: {str(error).splitlines()[0]}"

    @property
    def how(self) -> str:
        """How the calls are made and timed, in words."""
        if self.graph is not None:
            return f"{self.calls} calls captured in one graph, on the device's clock"
        loop = f"{self.calls} calls in a row, on the host's clock"
        return loop if self.device.kind == "cpu" else f"{loop}, launches included (a graph is {self.not_captured})"

    def time(self, time_limit_s: float) -> Timing:
        """Seconds of one call, the mean of those in a row: warm caches, every sample `calls` calls."""
        if self.graph is None:
            return time_function(self.function, self.device, cold=False, back_to_back=self.calls, time_limit_s=time_limit_s)
        replays = time_function(self.graph.replay, self.device, cold=False, time_limit_s=time_limit_s)
        return dataclasses.replace(
            replays,
            samples_s=replays.samples_s / self.calls,
            warmup_s=tuple(seconds / self.calls for seconds in replays.warmup_s),
        )


def _calls_in_a_block(function: Callable, device: Device) -> int:
    _, *seconds = device_clock(device).sample([function], None, 4)[0]
    return calls_that_fill(_BLOCK_S, min(seconds))


def calls_that_fill(seconds: float, call_s: float) -> int:
    """How many calls of so many seconds in a row fill a time, up to 1000: a sample long beside the clock's own cost."""
    return max(1, min(_MOST_CALLS, int(seconds / max(call_s, 1e-9))))


def _captured(function: Callable, calls: int, device: Device) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(device.torch_device):
        before = torch.cuda.current_stream()
        # A stream of this device: the one that torch keeps for captures belongs to the device that captured first.
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            function()  # what a library sets up on a stream's first call cannot be captured
        before.wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    function()
        finally:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its own behind where capturing fails
    return graph
