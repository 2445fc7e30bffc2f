"""Capture training steps as CUDA (HIP) graphs, and choose the torch.compile options for whole training steps.

A step of a small model has hundreds of kernels, which the host launches one by one. If the kernels are short, the device waits
for the host. A graph contains all kernels of the forward pass, the backward pass, clipping and the update, and the host launches
it once. A graph reads and writes the same tensors in every replay. Therefore the batch and the learning rate, which change from
step to step, are copied into these tensors before each replay. PyTorch has the same interface for CUDA and HIP graphs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.training.recipe import rng_state, set_rng_state

# Number of warm-up steps before a capture. These steps load libraries, choose convolution algorithms, compile code and allocate
# optimizer state. None of this is possible during a capture.
WARM_UP_STEPS = 3


def compile_options(device: Device) -> dict[str, Any] | None:
    """Return the torch.compile options for whole training steps.

    On an NVIDIA GPU the compiler combines small independent kernels into one, for example casts of weights to 16 bits and the
    batch counters of norms. In a graph each kernel has an overhead of about one microsecond. On an AMD GPU kernels are not
    combined, because PyTorch 2.9 could store wrong scalars from a combined kernel (pytorch/pytorch issue 168937).
    """
    return {"combo_kernels": True} if device.kind == "cuda" else None


def why_not_captured(device: Device, ranks: int, dtype: str) -> str:
    """Return the reason why a step cannot be captured as a graph, or "" if it can."""
    if device.kind == "cpu":
        return "a CPU has no graphs"
    if ranks > 1:
        return f"the collectives of {ranks} ranks inside the step are not captured"
    if dtype == "fp16":
        return "in fp16 the loss scale decides in every step whether to update the weights"
    return ""


class CapturedStep:
    """A training step on one device, captured as a graph. Call `captured(batch, learning_rate)` to replay the step.

    The capture does not change weights, running statistics, optimizer state or random generators. The graph has its own memory
    pool for the tensors of the step. After the capture, weights, buffers and optimizer state must remain the same tensors. To
    change their values, copy new values into them (see `same_tensors`).

    Args:
        step: function that runs a step on a batch and returns scalars on the device. It must set all gradients to None, must not
            wait for the device, and must run the same operations whatever the values in the batch are.
        batch: tensors with the shapes of all batches to replay.
        model, optimizer: the model and the optimizer that the step modifies.
        counters: other tensors that the step modifies.
        device: a GPU.

    Attributes:
        time_s: duration of the capture in seconds, including compilation and the selection of algorithms.
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
        # A replay uses the Python numbers of the capture. So the learning rate is a tensor, whose value can change between
        # replays.
        self._learning_rate = torch.zeros((), device=where)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(where), _convolution_search():
            side = torch.cuda.Stream()  # PyTorch cannot capture on the default stream
            with restored(model, optimizer, counters), _learning_rate_from(optimizer, self._learning_rate):
                # The copies of the batch were started on the current stream. The side stream must not read them before they have
                # finished.
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP_STEPS):
                        step(self._inputs)
                # The tensors are restored on the current stream, after the last warm-up step has written them.
                torch.cuda.current_stream().wait_stream(side)
            # With "thread_local", a driver call that is illegal during a capture raises an error in this thread, but not in other
            # threads.
            recording = torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local")
            # During a capture, kernels are recorded and do not run, so no tensor has to be restored afterwards.
            with _learning_rate_from(optimizer, self._learning_rate, capturable=True), recording:
                self._numbers = step(self._inputs)
            torch.cuda.synchronize()
        self.time_s = time.perf_counter() - started

    def fits(self, batch: Sequence[Tensor]) -> bool:
        """Return True if the batch has the same shapes and dtypes as the captured batch."""
        return [(part.shape, part.dtype) for part in batch] == [(part.shape, part.dtype) for part in self._inputs]

    def __call__(self, batch: Sequence[Tensor], learning_rate: float) -> tuple[Tensor, ...]:
        """Replay the step and return copies of its scalars. The next replay overwrites the original scalars."""
        for own, part in zip(self._inputs, batch, strict=True):
            own.copy_(part)
        self._learning_rate.fill_(learning_rate)
        self._graph.replay()
        # Copy each tensor only once, because some scalars are the same tensor, for example the loss and the loss of the rank.
        copies = {id(number): number.clone() for number in self._numbers}
        return tuple(copies[id(number)] for number in self._numbers)


@contextmanager
def restored(model: nn.Module, optimizer: torch.optim.Optimizer, counters: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that undoes training steps: it restores all tensors in place, and the random generators.

    Optimizer state that the steps created remains allocated and is set to zero. The next step has the same result as with new
    optimizer state.
    """
    tensors = [*model.parameters(), *model.buffers(), *counters, *_state_tensors(optimizer)]
    before, random = [tensor.detach().clone() for tensor in tensors], rng_state()
    try:
        yield
    finally:
        known = {id(tensor) for tensor in tensors}
        with torch.no_grad():
            for tensor, values in zip(tensors, before, strict=True):
                # Restore the tensors in place, because the graph uses their addresses.
                tensor.copy_(values)
            for tensor in _state_tensors(optimizer):
                if id(tensor) not in known:
                    tensor.zero_()
        set_rng_state(random)


@contextmanager
def same_tensors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager for loading optimizer state: copy the loaded values into the tensors that a captured graph uses."""
    before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    yield
    for parameter, known in before.items():
        state = optimizer.state[parameter]
        for name, tensor in known.items():
            if isinstance(tensor, Tensor) and isinstance(state.get(name), Tensor):
                state[name] = tensor.copy_(state[name])


@contextmanager
def _learning_rate_from(optimizer: torch.optim.Optimizer, rate: Tensor, capturable: bool = False) -> Iterator[None]:
    """Context manager in which the optimizer reads the learning rate from a tensor on the device, not from a Python number.

    Args:
        capturable: also set the optimizer option `capturable`, which AdamW needs during a capture.
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
    """Context manager in which cuDNN or MIOpen benchmarks convolution algorithms and uses the fastest one.

    It has no effect if deterministic results are requested.
    """
    cudnn = torch.backends.cudnn  # these settings also control MIOpen
    before = cudnn.benchmark
    cudnn.benchmark = not (cudnn.deterministic or torch.are_deterministic_algorithms_enabled())
    try:
        yield
    finally:
        cudnn.benchmark = before


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
