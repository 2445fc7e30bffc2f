"""Whole training steps as one unit of the device: compile options, and steps captured as CUDA (HIP) graphs.

A step of a small model has hundreds of kernels, which the host launches one by one; if they are short, the device waits for
the host. A graph contains all of them, forward and backward pass, clipping and update, and is launched once. It reads and
writes the same tensors every time, so what changes from step to step, the batch and the learning rate, is copied into these
tensors first. PyTorch has one interface for CUDA and HIP graphs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.training.recipe import rng_state, set_rng_state

# Before the capture, libraries must be loaded, convolution algorithms chosen, code compiled and optimizer state allocated:
# none of these can happen during a capture.
WARM_UP_STEPS = 3


def compile_options(device: Device) -> dict[str, Any] | None:
    """Return the torch.compile options for whole training steps.

    On an NVIDIA GPU independent small kernels are combined into one, such as casts of weights to 16 bits or the batch
    counters of norms; in a graph each costs a microsecond more than its work. Not on AMD: there PyTorch 2.9 could store
    wrong scalars from a combined kernel (pytorch/pytorch issue 168937).
    """
    return {"combo_kernels": True} if device.kind == "cuda" else None


def why_not_captured(device: Device, ranks: int, dtype: str) -> str:
    """Return the reason why a step cannot be captured as a graph, "" if it can."""
    if device.kind == "cpu":
        return "a CPU has no graphs"
    if ranks > 1:
        return f"the collectives of {ranks} ranks inside the step are not captured"
    if dtype == "fp16":
        return "in fp16 the loss scale decides in every step whether to update the weights"
    return ""


class CapturedStep:
    """A step of one device captured as a graph: `captured(batch, learning_rate)` replays it.

    The capture leaves weights, statistics, optimizer state and random generators unchanged. It uses memory for the step's
    tensors, in the graph's own pool. Afterwards weights, buffers and optimizer state must stay the same tensors: copy new
    values into them (see `same_tensors`).

    Args:
        step: runs a step on a batch and returns scalars on the device. It must leave no gradients behind, must not wait for
            the device, and must run the same operations for all values.
        batch: tensors; every replayed batch has their shapes.
        model, optimizer: modified by the step.
        counters: other tensors modified by the step.
        device: an accelerator.

    Attributes:
        time_s: duration of the capture, including compilation and algorithm selection at first calls.
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
        with torch.cuda.device(where), _convolution_search():
            side = torch.cuda.Stream()  # PyTorch cannot capture on the default stream
            with restored(model, optimizer, counters), _learning_rate_from(optimizer, self._learning_rate):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP_STEPS):
                        step(self._inputs)
                torch.cuda.current_stream().wait_stream(side)
            # thread_local: other threads may still make driver calls that are illegal during a capture, this one may not.
            recording = torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local")
            with _learning_rate_from(optimizer, self._learning_rate, capturable=True), recording:
                self._numbers = step(self._inputs)
            torch.cuda.synchronize()
        self.time_s = time.perf_counter() - started

    def fits(self, batch: Sequence[Tensor]) -> bool:
        """Return True if a batch has the captured shapes and dtypes."""
        return [(part.shape, part.dtype) for part in batch] == [(part.shape, part.dtype) for part in self._inputs]

    def __call__(self, batch: Sequence[Tensor], learning_rate: float) -> tuple[Tensor, ...]:
        """Replay the step; return copies of its scalars, because the next replay overwrites the graph's own tensors."""
        for own, part in zip(self._inputs, batch, strict=True):
            own.copy_(part)
        self._learning_rate.fill_(learning_rate)
        self._graph.replay()
        copies = {id(number): number.clone() for number in self._numbers}
        return tuple(copies[id(number)] for number in self._numbers)


@contextmanager
def restored(model: nn.Module, optimizer: torch.optim.Optimizer, counters: Sequence[Tensor]) -> Iterator[None]:
    """Undo the effects of training steps inside: restore all tensors in place, and the random generators.

    Optimizer state that the steps created stays allocated with value zero, which leads to the same next step.
    """
    tensors = [*model.parameters(), *model.buffers(), *counters, *_state_tensors(optimizer)]
    before, random = [tensor.detach().clone() for tensor in tensors], rng_state()
    try:
        yield
    finally:
        known = {id(tensor) for tensor in tensors}
        with torch.no_grad():
            for tensor, values in zip(tensors, before, strict=True):
                tensor.copy_(values)
            for tensor in _state_tensors(optimizer):
                if id(tensor) not in known:
                    tensor.zero_()
        set_rng_state(random)


@contextmanager
def same_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Copy optimizer state that is loaded inside into the tensors that a graph uses, which stay in place."""
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    yield
    for parameter, known in before.items():
        state = optimizer.state[parameter]
        for name, tensor in known.items():
            if isinstance(tensor, Tensor) and isinstance(state.get(name), Tensor):
                state[name] = tensor.copy_(state[name])


@contextmanager
def _learning_rate_from(optimizer: torch.optim.Optimizer, rate: Tensor, capturable: bool = False) -> Iterator[None]:
    """Make the optimizer read the learning rate from a tensor on the device instead of passing a number to each launch.

    Args:
        capturable: set the option of the same name that AdamW needs in a capture.
    """
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
def _convolution_search() -> Iterator[None]:
    """Benchmark convolution algorithms and use the fastest, unless deterministic results are requested."""
    cudnn = torch.backends.cudnn  # also controls MIOpen
    before = cudnn.benchmark
    cudnn.benchmark = not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    try:
        yield
    finally:
        cudnn.benchmark = before


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
