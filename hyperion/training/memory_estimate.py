"""Estimate the memory of a training step before it runs.

There are two methods. `estimate_memory` runs the whole step with fake tensors. `language_activations` and `image_activations`
compute the memory of activations with formulas.

The fake tensors of PyTorch have a shape, but no memory, and no values are computed. They pass through the same Python code as
real tensors: autograd, autocast, checkpointing, chunked loss and optimizer. The order of allocations determines the peak, and is
the same as in a real step. For a GPU the estimate also includes the rounding of block sizes by the allocator, and the workspaces
of kernels and libraries.

The formulas compute from shapes how many bytes each layer saves for its backward pass. They do not include scalars and the means
and variances of norms. The tests compare the formulas with the bytes that autograd saves, with a tolerance of 2 %.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.api.arguments import device_of
from hyperion.measure.memory_use.tensor_memory import MemoryHistory, MemoryTimeline, state_of
from hyperion.models.resnet import IMAGE_SIZE, block_shapes
from hyperion.models.transformer import TransformerConfig
from hyperion.training.engine import TorchEngine
from hyperion.units import MIB

BLOCK_BYTES = 512  # PyTorch's caching allocator rounds sizes up to multiples of this number of bytes
_IS_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__
Make = Callable[[Device], tuple[TorchEngine, Any]]
_FLOAT32, _SIXTEEN_BIT = 4, 2  # bytes


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one training step in the steady state, on one device.

    Attributes:
        history: all allocations of the step.
        library_bytes: bytes of the workspaces that matrix libraries allocate at the first matrix product and never free.
    """

    history: MemoryHistory
    library_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak of the allocated memory in bytes."""
        return self.history.peak_bytes + self.library_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Peak memory of each kind of tensor in bytes. Different kinds of tensors can reach their peaks at different times."""
        return self.history.parts

    @property
    def phase(self) -> str:
        """Phase of the step in which the overall peak occurs."""
        return self.history.phase_of(self.history.fullest())

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {count / MIB:,.3g} MiB" for kind, count in self.parts.items())
        library = f", workspaces of libraries {self.library_bytes / MIB:,.3g} MiB" if self.library_bytes else ""
        return f"peak {self.peak_bytes / MIB:,.3g} MiB, in the phase {self.phase}; peak of each kind: {parts}{library}"


def estimate_memory(make: Make, device: Device | str, ask: bool = False) -> MemoryEstimate:
    """Estimate the memory of a training step.

    Args:
        make: function that returns the engine and one batch on the given device. It is called with fake tensors and a
            device whose `torch_device` is "cpu". Fake tensors cannot be deep-copied, so a model that copies its layers, such as
            nn.TransformerEncoder, cannot be estimated. Neither can a step that reads the value of a tensor, for example with
            item(), nonzero() or a boolean mask as index.
        device: device on which the step will run, or its PyTorch name. A `Device` need not be present, unless `ask` is True.
        ask: if True, measure the workspaces of libraries on the device. This runs two small layers, and each distinct
            convolution of the step.

    Raises:
        HyperionError: `make` does not return a pair, or `make` or the step reads the value of a tensor.
    """
    device = device_of(device)
    try:
        return _estimate(make, device, ask)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise HyperionError(
            f"this step reads the value of a tensor ({error.func}), but fake tensors have no values",
            where="estimate_memory",
            next_step="run the step and measure it with hyperion.measure.memory(lambda: engine.train_step(batch)), or compute "
            "the step without item(), nonzero(), boolean masks as indices and branches on values",
        ) from error


def _estimate(make: Make, device: Device, ask: bool) -> MemoryEstimate:
    accelerator = device.kind != "cpu"
    kernels = _KernelBytes(device if ask else None) if accelerator else None
    with FakeTensorMode() as fake, _PretendCuda() if accelerator else contextlib.nullcontext():
        # `make` gets a device whose tensors are on the CPU. _PretendCuda makes the code take the branches of a GPU anyway.
        with _WithoutMemo(fake):
            made = make(replace(device, torch_device="cpu"))
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise HyperionError(
                f"make returned a {type(made).__name__}, and not a pair (engine, batch)",
                where="estimate_memory",
                next_step="let make(device) end with return engine, batch",
            )
        engine, batch = made
        engine.uncaptured = "fake tensors cannot be captured"
        engine.unchecked = False  # fake tensors have no values to check
        # The estimate is for the steady state and not for the first step. So the state that the first step creates must already
        # exist.
        _create_optimizer_state(engine)
        persistent: dict[str, Iterable[Tensor]] = {**state_of(engine.model, engine.optimizer), "batch": tree_leaves(batch)}
        timeline = MemoryTimeline(engine.model, persistent, BLOCK_BYTES if accelerator else 1, kernels, in_place=True)
        with timeline, _cuda_autocast(engine) if accelerator else contextlib.nullcontext():
            engine.train_step(batch)
        history = timeline.history()
    return MemoryEstimate(history, library_bytes(device) if ask else 0)


def _create_optimizer_state(engine: TorchEngine) -> None:
    """Allocate the optimizer state that the optimizer allocates in its first step."""
    for parameter in (parameter for group in engine.optimizer.param_groups for parameter in group["params"]):
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def library_bytes(device: Device) -> int:
    """Return the bytes of the workspaces that matrix libraries allocate on a device and never free; 0 on a CPU.

    They are measured with two small layers. PyTorch allocates one workspace for each thread that computes matrix products: the
    thread of the caller, and the thread of the backward pass.
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
    """Return the largest batch size at which a step fits into a given memory, or 0 if a single item does not fit.

    Args:
        peak: function that returns the peak memory of a step for a number of items in the batch. A larger batch must not have a
            smaller peak.
        memory: available memory, in the unit of `peak`.
        at_most: upper bound on the result.
    """
    fits, used = 1, peak(1)
    if used > memory:
        return 0
    fails, per_item, halve = at_most + 1, 0, False
    while fails - fits > 1:
        # Memory is nearly linear in the batch size, so a few linear interpolations find the limit. Bisection alone would need
        # more steps.
        guess = fits + int((memory - used) / per_item) if per_item else 2 * fits
        guess = (fits + fails) // 2 if halve else min(max(guess, fits + 1), fails - 1)
        needed = peak(guess)
        per_item = (needed - used) / (guess - fits)
        if needed <= memory:
            fits, used, halve = guess, needed, False
        else:
            # The first guess that does not fit bounds the search from above. If another guess does not fit either, the linear
            # interpolation underestimates the memory, so bisect until a guess fits.
            halve, fails = fails <= at_most, guess
    return fits


def fewest_checkpointed(peak_bytes: Callable[[int], int], blocks: int, memory_bytes: int) -> int:
    """Return the minimum number of checkpointed blocks with which a step fits into a given memory.

    Use it for the checkpointing policy 'budget' of ParallelPlan.

    Args:
        peak_bytes: function that returns the peak memory of a step for a number of checkpointed blocks. More checkpointed
            blocks must not have a larger peak.
        blocks: number of blocks of the model.
        memory_bytes: available memory.

    Raises:
        HyperionError: the step does not fit into the memory even if all blocks are checkpointed.
    """
    if (most := peak_bytes(0)) <= memory_bytes:
        return 0
    if (least := peak_bytes(blocks)) > memory_bytes:
        raise HyperionError(
            f"the step needs {least} bytes with all {blocks} blocks checkpointed, but only {memory_bytes} are available",
            where="fewest_checkpointed",
            next_step="use a smaller batch (largest_batch computes one that fits), or more memory",
        )
    fails, fits = 0, blocks
    guess = math.ceil(blocks * (most - memory_bytes) / (most - least))  # exact if all blocks save the same number of bytes
    while fits - fails > 1:
        guess = min(max(guess, fails + 1), fits - 1)
        if peak_bytes(guess) <= memory_bytes:
            fits, guess = guess, guess - 1
        else:
            fails, guess = guess, guess + 1
    return fits


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one repeated block.

    Attributes:
        input: bytes of the input of the block. With activation checkpointing only the input is saved.
        saved: bytes of activations that the forward pass saves in addition to the input.
        recomputed: bytes that the recomputation allocates in the backward pass.
        transient: largest number of activation-gradient bytes that exist at once in the backward pass.
        gradients: bytes of the gradients of the parameters.
    """

    input: int
    saved: int
    recomputed: int
    transient: int
    gradients: int


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations and gradients of a whole model, for one batch.

    The stem is the part of the model before the blocks. The head is the part after the blocks.

    Attributes:
        stem, head: bytes that the forward pass of the stem and of the head saves.
        blocks: bytes of the repeated blocks, in the order of the forward pass.
        head_transient: largest number of bytes that the backward pass of the head allocates in addition to saved activations.
        head_gradients: bytes of the gradients of the parameters of the head.
        stem_transient: bytes that the backward pass of the stem allocates in addition to all parameter gradients.
    """

    stem: int
    blocks: tuple[BlockBytes, ...]
    head: int
    head_transient: int
    head_gradients: int
    stem_transient: int

    def saved(self, checkpointed: bool = False) -> int:
        """Return the number of bytes that the forward pass saves.

        Args:
            checkpointed: if True, every block is checkpointed and saves only its input.
        """
        inside = 0 if checkpointed else sum(block.saved for block in self.blocks)
        return self.stem + sum(block.input for block in self.blocks) + inside + self.head

    def peak(self, checkpointed: bool = False) -> int:
        """Return the peak of the backward pass in bytes. It includes the parameter gradients that exist at that time.

        Args:
            checkpointed: if True, every block is checkpointed.
        """
        held, gradients = self.saved(checkpointed), self.head_gradients
        moments = [held + self.head_transient]  # the parameter gradients of the head are allocated later
        held -= self.head
        for block in reversed(self.blocks):
            recomputed = block.recomputed if checkpointed else 0
            moments.append(held + recomputed + block.transient + gradients)
            gradients += block.gradients
            # After the backward pass of a block, its activations are freed, and the gradients of its parameters remain.
            held -= block.input + (0 if checkpointed else block.saved)
        return max(*moments, self.stem + gradients + self.stem_transient)


def language_activations(config: TransformerConfig, batch: int, length: int, sixteen_bit: bool) -> ActivationBytes:
    """Return the activation bytes of a TransformerLM that is given targets, in float32 or under autocast to bfloat16.

    The bytes are counted in units of one [B, T, D] tensor. A block saves 16 units: its input and the sum after attention
    (1 + 1), the outputs of both norms (1 + 1), query, key and value (3), the output of attention (1), and the activations of
    the MLP before and after GELU (4 + 4). Autocast to bfloat16 halves all these bytes, but also saves a 16-bit copy of each
    weight matrix. With float16 more bytes are saved, because its residual stream remains float32; the formula does not apply
    to float16. The loss is that of PyTorch. The Triton kernel of `token_loss` would save 16-bit logits instead.

    Args:
        config: shape of the model.
        batch, length: B and T.
        sixteen_bit: if True, under autocast to bfloat16.
    """
    B, T, D, V = batch, length, config.width, config.vocab_size
    each = _SIXTEEN_BIT if sixteen_bit else _FLOAT32
    unit, logits = each * B * T * D, _FLOAT32 * B * T * V  # logits are float32 in every precision
    parameters, matrices = 12 * D * D + 13 * D, 12 * D * D
    log_sum_exp = _FLOAT32 * B * T * config.heads  # attention saves a log-sum-exp for each query
    saved = 15 * unit + log_sum_exp + (_SIXTEEN_BIT * matrices if sixteen_bit else 0)
    block = BlockBytes(input=unit, saved=saved, recomputed=saved, transient=5 * unit, gradients=_FLOAT32 * parameters)
    head = 2 * unit + logits + (_SIXTEEN_BIT * V * D if sixteen_bit else 0)
    return ActivationBytes(
        stem=0,
        blocks=(block,) * config.layers,
        head=head,
        head_transient=2 * logits,  # the gradients of log-probabilities and of logits
        head_gradients=_FLOAT32 * V * D,
        stem_transient=_FLOAT32
        * V
        * D,  # gradient of the embedding; it is added to the head's gradient, because they share one weight
    )


def image_activations(width: int, batch: int, sixteen_bit: bool) -> ActivationBytes:
    """Return the activation bytes of a ResNet-18, in float32 or under autocast to a 16-bit format.

    A norm saves its input, which is the output of a convolution. A ReLU saves its result, and the next convolution saves the
    same tensor. Therefore a block saves its input and three tensors of the size of its output. If the shortcut has a
    projection, it saves a fourth tensor of this size.
    """
    each = _SIXTEEN_BIT if sixteen_bit else _FLOAT32
    side, blocks = IMAGE_SIZE, []
    for channels_in, channels_out, stride in block_shapes(width):
        before = each * batch * channels_in * side**2
        side = -(-side // stride)
        out = each * batch * channels_out * side**2
        projection = channels_in * channels_out if channels_in != channels_out else 0
        weights = 9 * channels_out * (channels_in + channels_out) + projection
        copies = _SIXTEEN_BIT * weights if sixteen_bit else 0
        saved = (4 if projection else 3) * out + copies
        blocks.append(BlockBytes(before, saved, saved + out, 3 * out, _FLOAT32 * weights))
    stem = each * batch * width * IMAGE_SIZE**2
    # The 16-bit copy of the batch. The float32 batch always exists and is not counted.
    images = _SIXTEEN_BIT * batch * 3 * IMAGE_SIZE**2 if sixteen_bit else 0
    return ActivationBytes(stem + images, tuple(blocks), head=0, head_transient=0, head_gradients=0, stem_transient=0)


class _WithoutMemo(TorchDispatchMode):
    """Context manager that clears the memo (a cache of tensors) of the fake tensor mode after each operator.

    `Module.to` cannot swap parameters while the memo contains references to them.
    """

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self._memo = fake.fake_tensor_converter.meta_converter.tensor_memo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **kwargs or {})
        self._memo.clear()
        return returned


class _PretendCuda(TorchFunctionMode):
    """Context manager in which `Tensor.is_cuda` is True for all tensors, so that code takes the same branches as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == _IS_CUDA else func(*args, **kwargs or {})


@contextlib.contextmanager
def _cuda_autocast(engine: TorchEngine) -> Iterator[None]:
    """Context manager that copies the autocast options, which the engine sets for the CPU, to CUDA.

    Fake tensors are on the CPU. Some code of the models reads the autocast options of CUDA, so these must be equal to those of
    the CPU.
    """
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with engine.precision.autocast(engine.device):
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


class _KernelBytes:
    """Callable that returns the workspace bytes of the GPU kernel for an operator and its arguments.

    Args:
        ask: device on which each distinct convolution is measured once. With None, convolution workspaces count as 0 bytes.
    """

    def __init__(self, ask: Device | None):
        self._ask = ask
        self._known: dict[tuple, int] = {}

    def __call__(self, operator: Any, arguments: tuple) -> int:
        name = operator._schema.name
        if "scaled_dot_product" in name and name.endswith("_backward"):
            # Flash attention allocates the gradient of the queries in float32, and one more float32 value per query.
            # The first argument of the backward operator is the gradient of the output.
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
    """Measure the workspace of a library kernel. It depends on the algorithm that the library chooses for the shapes."""
    where = device.torch_device
    with unset_fake_temporarily():
        real = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=where).zero_() if isinstance(a, Tensor) else a
            for a in arguments
        ]
        operator(*real)  # the first call may try several algorithms, so only the second is measured
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        outputs = operator(*real)
        torch.cuda.synchronize(where)
        # Subtract the outputs, which are already counted as tensors. The workspace is the memory that the kernel needs in
        # addition.
        returned = torch.cuda.memory_allocated(where) - before
        peak = torch.cuda.max_memory_allocated(where) - before
        del outputs, real
    return max(0, peak - returned)
