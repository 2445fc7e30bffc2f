"""Time calls that are shorter than their launch: many calls in a row, captured in a graph on GPUs, in a loop on a CPU.

An eagerly launched kernel of one microsecond waits for the host longer than it runs. Replayed from a CUDA or HIP graph, kernels
follow each other without waiting, and a replay of some milliseconds is long compared with the resolution of the clock.
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
    """A function prepared to be called many times in a row.

    Construction calls the function, so poison its output after construction and before `time`.

    Args:
        function: does one unit of work on existing tensors. To be captured in a graph, it must not allocate or synchronise.
        calls: calls per sample; 0 means as many as fill 2 ms, at most 1000.

    Attributes:
        calls: calls per sample.
        graph: the captured graph; None on a CPU and if capturing failed.
        not_captured: why there is no graph, else "".
    """

    def __init__(self, function: Callable[[], object], device: Device, calls: int = 0):
        self.function, self.device = function, device
        self.calls = calls or _calls_in_a_block(function, device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.not_captured = NO_GRAPHS
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
        """Description of how the calls are made and timed."""
        if self.graph is not None:
            return f"{self.calls} calls captured in one graph, on the device's clock"
        loop = f"{self.calls} calls in a row, on the host's clock"
        return loop if self.device.kind == "cpu" else f"{loop}, launches included (a graph is {self.not_captured})"

    def time(self, time_limit_s: float) -> Timing:
        """Time one call with hot caches; each sample is the mean of `calls` calls in a row."""
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
    """Return how many calls of `call_s` seconds fill `seconds`: at least 1, at most 1000."""
    return max(1, min(_MOST_CALLS, int(seconds / max(call_s, 1e-9))))


def _captured(function: Callable, calls: int, device: Device) -> torch.cuda.CUDAGraph:
    with torch.cuda.device(device.torch_device):
        before = torch.cuda.current_stream()
        # Use a stream of this device: torch's default capture stream belongs to the device that captured first.
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            function()  # the set-up that libraries do on the first call on a stream cannot be captured
        before.wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    function()
        finally:
            torch.cuda.set_stream(before)  # torch.cuda.graph does not restore the stream if capturing fails
    return graph
