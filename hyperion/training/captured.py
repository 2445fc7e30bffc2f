"""A whole training step recorded once as a graph of the device, and replayed for every batch after it.

A step of a small model is hundreds of kernels that the host launches one by one; where they are short the device waits for
the host. A graph holds them all, forward and backward pass, clipping and update, and is launched once. It reads and writes
the very same tensors each time, so that whatever changes from step to step is copied into them first: the batch and the
learning rate. CUDA and HIP graphs are one interface in PyTorch.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.training.seeds import rng_state, set_rng_state

# Before a graph can be recorded, libraries must be loaded, convolutions chosen, code compiled, and moments allocated.
WARM_UP_STEPS = 3


def why_not_captured(device: Device, ranks: int, dtype: str) -> str:
    """Why a step cannot be recorded as a graph, "" where it can."""
    if device.kind == "cpu":
        return "a CPU has no graphs"
    if ranks > 1:
        return f"{ranks} ranks meet within the step, and what they tell each other is not recorded"
    if dtype == "fp16":
        return "in fp16 the loss scale decides anew in every step whether there is an update"
    return ""


class CapturedStep:
    """A step of one device as a graph: `captured(batch, learning_rate)` replays it.

    Recording it changes nothing: neither weights, statistics, moments nor random numbers. Only the memory that its
    tensors need stays taken, in a pool of the graph's own. Nobody may put other tensors in the place of weights, buffers
    or moments afterwards; new values are copied into them (see `same_tensors`).

    Args:
        step: does it on a batch and returns scalars on the device. It must leave no gradients behind, wait for nothing,
            and do the same operations whatever the values are.
        batch: tensors; every later batch has their shapes.
        model, optimizer: what the step changes.
        counters: what else it changes.

    Attributes:
        time_s: that recording took, with everything that is compiled and chosen at first calls.
    """

    def __init__(
        self,
        step: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
        batch: Sequence[Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        counters: Sequence[Tensor],
        device: Device,
    ):
        started, where = time.perf_counter(), torch.device(device.torch_device)
        self._inputs = tuple(part.clone() for part in batch)
        self._learning_rate = torch.zeros((), device=where)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(where), _chosen_convolutions():
            side = torch.cuda.Stream()  # PyTorch records no graph on the default stream
            with undone(model, optimizer, counters), _learning_rate_from(optimizer, self._learning_rate):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP_STEPS):
                        step(self._inputs)
                torch.cuda.current_stream().wait_stream(side)
            # Other threads of this process may go on asking the driver for things; only this one must not.
            recording = torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local")
            with _learning_rate_from(optimizer, self._learning_rate, capturable=True), recording:
                self._numbers = step(self._inputs)
            torch.cuda.synchronize()
        self.time_s = time.perf_counter() - started

    def fits(self, batch: Sequence[Tensor]) -> bool:
        """Whether a batch has the recorded shapes and types."""
        return [(part.shape, part.dtype) for part in batch] == [(part.shape, part.dtype) for part in self._inputs]

    def __call__(self, batch: Sequence[Tensor], learning_rate: float) -> tuple[Tensor, ...]:
        """The step's scalars, copied, since the next replay writes over the graph's own."""
        for own, part in zip(self._inputs, batch, strict=True):
            own.copy_(part)
        self._learning_rate.fill_(learning_rate)
        self._graph.replay()
        copies = {id(number): number.clone() for number in self._numbers}
        return tuple(copies[id(number)] for number in self._numbers)


@contextmanager
def undone(model: nn.Module, optimizer: torch.optim.Optimizer, counters: Sequence[Tensor]) -> Iterator[None]:
    """Training steps inside leave no trace but moments of zero where there were none, which lead to the very same next
    step: values are put back into the tensors they came from, and random generators where they stood.
    """
    tensors = [*model.parameters(), *model.buffers(), *counters, *_moments(optimizer)]
    before, random = [tensor.detach().clone() for tensor in tensors], rng_state()
    try:
        yield
    finally:
        known = {id(tensor) for tensor in tensors}
        with torch.no_grad():
            for tensor, values in zip(tensors, before, strict=True):
                tensor.copy_(values)
            for tensor in _moments(optimizer):
                if id(tensor) not in known:
                    tensor.zero_()
        set_rng_state(random)


@contextmanager
def same_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What is loaded into the optimizer inside is copied into the moments that a graph knows, which stay in their place."""
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    yield
    for parameter, known in before.items():
        state = optimizer.state[parameter]
        for name, tensor in known.items():
            if isinstance(tensor, Tensor) and isinstance(state.get(name), Tensor):
                state[name] = tensor.copy_(state[name])


@contextmanager
def _learning_rate_from(optimizer: torch.optim.Optimizer, rate: Tensor, capturable: bool = False) -> Iterator[None]:
    """The learning rate is read on the device, instead of being part of the launch; AdamW must be told that it is recorded."""
    before = [dict(group) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = rate
            if capturable and "capturable" in group:
                group["capturable"] = True
        yield
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.update(old)


@contextmanager
def _chosen_convolutions() -> Iterator[None]:
    """Of the ways to do a convolution the fastest is tried out and kept, unless results are to repeat bit for bit."""
    cudnn = torch.backends.cudnn  # MIOpen's switch as well
    before = cudnn.benchmark
    cudnn.benchmark = not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    try:
        yield
    finally:
        cudnn.benchmark = before


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
