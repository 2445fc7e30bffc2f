"""The memory of a training step before it is run: the engine's own step, on tensors that have a shape and no memory.

PyTorch's fake tensors go through the same Python, autograd, autocast, checkpointing, loss in chunks and optimizer as real
ones, operator by operator, and nothing is computed. So the order of events, which makes the peak, is that of the code that
will run, not that of a formula. What a GPU adds is named beside: blocks of its allocator, and what kernels and libraries
keep for themselves.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.memory_use.tensor_memory import state_of
from hyperion.measure.memory_use.timeline import MemoryHistory, MemoryTimeline
from hyperion.training.engine import TorchEngine

BLOCK_BYTES = 512  # PyTorch's caching allocator rounds up to these
_IS_CUDA = torch.Tensor.is_cuda.__get__
Make = Callable[[Device], tuple[TorchEngine, Any]]


@dataclass(frozen=True)
class MemoryEstimate:
    """Of one training step in the steady state, on one device.

    Args:
        history: every piece of memory of the step.
        library_bytes: what matrix libraries keep for themselves from the first product on.
    """

    history: MemoryHistory
    library_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at once."""
        return self.history.peak_bytes + self.library_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Most bytes of each kind of tensor at any moment; not all kinds are at their most in the same one."""
        return self.history.parts

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind in the fullest moment."""
        return self.history.at(self.history.fullest())

    @property
    def phase(self) -> str:
        """In which the fullest moment is."""
        return self.history.phase_of(self.history.fullest())


def estimate_memory(make: Make, device: Device, ask: bool = False) -> MemoryEstimate:
    """Foretell the memory of a training step.

    Args:
        make: builds the engine and one batch on the device that it is given; it is called with fake tensors, which live on
            `torch_device` "cpu" whatever the device is.
        device: that the step will run on. It need not be there.
        ask: it is there: ask its libraries what they keep (two small layers) and need (each distinct convolution, once).
    """
    accelerator = device.kind != "cpu"
    kernels = _KernelBytes(device if ask else None) if accelerator else None
    with FakeTensorMode() as fake, _AsOnGpu() if accelerator else contextlib.nullcontext():
        with _Forgetful(fake):
            engine, batch = make(replace(device, torch_device="cpu"))
        engine.uncaptured = "tensors without memory are not recorded"
        engine.unchecked = False  # nor have they values
        _make_state(engine)
        standing = state_of(engine.model, engine.optimizer) | {"batch": batch}
        timeline = MemoryTimeline(engine.model, standing, BLOCK_BYTES if accelerator else 1, kernels, in_place=True)
        with timeline, _autocast_told(engine) if accelerator else contextlib.nullcontext():
            engine.train_step(batch)
        history = timeline.history()
    return MemoryEstimate(history, library_bytes(device) if ask else 0)


def _make_state(engine: TorchEngine) -> None:
    """What the optimizer makes in its first step, without the rest of that step."""
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def library_bytes(device: Device) -> int:
    """What matrix libraries keep on a device for good, seen by two small layers and their backward passes: 0 on a CPU.

    PyTorch gives each thread that multiplies, the caller's and that of the backward pass, a workspace of its own.
    """
    if device.kind == "cpu":
        return 0
    where = device.torch_device
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(where)
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, device=where, dtype=dtype)
        layer(torch.ones(64, 64, device=where, dtype=dtype)).sum().backward()
        del layer
    torch.cuda.synchronize(where)
    return torch.cuda.memory_allocated(where) - before


def largest_batch(peak: Callable[[int], float], memory: float, at_most: int = 2**20) -> int:
    """The largest batch whose step fits into a memory; 0 when not even one item does.

    Args:
        peak: of a step with a batch of that many items; must not fall as the batch grows.
        memory: that there is, in the unit of the peak.
        at_most: where to stop looking.
    """
    fits, held = 1, peak(1)
    if held > memory:
        return 0
    fails, an_item, halve = at_most + 1, 0, False
    while fails - fits > 1:
        # Memory grows nearly in proportion to the batch: a few estimates find it, where halving would take many.
        guess = fits + int((memory - held) / an_item) if an_item else 2 * fits
        guess = (fits + fails) // 2 if halve else min(max(guess, fits + 1), fails - 1)
        needed = peak(guess)
        an_item = (needed - held) / (guess - fits)
        if needed <= memory:
            fits, held, halve = guess, needed, False
        else:
            halve, fails = fails <= at_most, guess
    return fits


def fewest_checkpointed(peak_bytes: Callable[[int], int], blocks: int, memory_bytes: int) -> int:
    """The fewest blocks to checkpoint so that a step fits into a memory, see ParallelPlan's 'budget'.

    Args:
        peak_bytes: of a step with that many blocks checkpointed; must not rise with their number.
        blocks: how many the model has.

    Raises:
        HyperionError: it does not fit with all of them.
    """
    if (most := peak_bytes(0)) <= memory_bytes:
        return 0
    if (least := peak_bytes(blocks)) > memory_bytes:
        raise HyperionError(
            f"the step needs {least} bytes with every one of {blocks} blocks checkpointed, and {memory_bytes} there are",
            where="fewest_checkpointed",
            next_step="take a smaller batch (largest_batch says which fits), or a larger memory",
        )
    fails, fits = 0, blocks
    guess = math.ceil(blocks * (most - memory_bytes) / (most - least))  # blocks that are alike save alike
    while fits - fails > 1:
        guess = min(max(guess, fails + 1), fits - 1)
        if peak_bytes(guess) <= memory_bytes:
            fits, guess = guess, guess - 1
        else:
            fails, guess = guess, guess + 1
    return fits


class _Forgetful(TorchDispatchMode):
    """Lets parameters change their memory layout: `Module.to` refuses while the fake mode's memo refers to them."""

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self._memo = fake.fake_tensor_converter.meta_converter.tensor_memo

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        returned = func(*args, **kwargs or {})
        self._memo.clear()
        return returned


class _AsOnGpu(TorchFunctionMode):
    """Lets code that asks a tensor whether it is on a GPU take the way that it will take there."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        return True if func == _IS_CUDA else func(*args, **kwargs or {})


@contextlib.contextmanager
def _autocast_told(engine: TorchEngine) -> Iterator[None]:
    """Lets code that asks what autocast does on a GPU hear it; no tensor here is on one, so that nothing else changes."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with engine.precision.autocast(engine.device):
        told = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cuda", told[0])
    torch.set_autocast_dtype("cuda", told[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


class _KernelBytes:
    """What kernels of a GPU need for themselves while they run, by operator and shapes.

    Args:
        ask: the device whose convolutions are asked, each distinct one once; None where it is not there, and they count as 0.
    """

    def __init__(self, ask: Device | None):
        self._ask = ask
        self._known: dict[tuple, int] = {}

    def __call__(self, operator: Any, arguments: tuple) -> int:
        name = operator._schema.name
        if "scaled_dot_product" in name and name.endswith(("_backward", "_backward_for_cpu")):
            # Flash attention adds up the gradient of the queries in float32, beside one sum for each query.
            query = arguments[1]
            return 4 * query.numel() + 4 * query.numel() // query.shape[-1]
        if self._ask is None or not name.startswith("aten::convolution"):
            return 0
        key = (name, *map(_signature, arguments))
        if key not in self._known:
            self._known[key] = _workspace_bytes(operator, arguments, self._ask)
        return self._known[key]


def _signature(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, tuple(argument.shape), argument.stride()
    return str(argument)


def _workspace_bytes(operator: Any, arguments: tuple, device: Device) -> int:
    """Bytes beside input and output while a library's kernel runs; only the library knows, and it chooses by shape."""
    where = device.torch_device
    with unset_fake_temporarily():
        real = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=where).zero_() if isinstance(a, Tensor) else a
            for a in arguments
        ]
        operator(*real)  # the first call may search for a kernel
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        outputs = operator(*real)
        torch.cuda.synchronize(where)
        returned = torch.cuda.memory_allocated(where) - before
        peak = torch.cuda.max_memory_allocated(where) - before
        del outputs, real
    return max(0, peak - returned)
