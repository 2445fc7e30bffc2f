"""Choices of a training run: optimizer and learning-rate schedule, number format with its loss scale, and seeds.

Optimizers decay weights, but neither biases nor norm parameters.
"""

import contextlib
import math
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hyperion.checkpoints import CheckpointError
from hyperion.errors import HyperionError, require_number, require_seed
from hyperion.hardware import Device
from hyperion.measure import FORMATS, matmul_precision
from hyperion.parallel import is_sharded

TRAINING_DTYPES = ("fp32", "tf32", "bf16", "fp16")
FP8 = "fp8"
# fp8 applies to linear layers replaced by hyperion.training.float8; everything else then computes in bf16.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, FP8: torch.bfloat16}
_NUMPY_WORDS = 624  # of the Mersenne twister


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019) as one fused kernel per step; betas as in GPT-3 (Brown et al. 2020).

    Raises:
        HyperionError: a rate, decay or eps is negative or not finite, a beta is outside 0 .. 1, or no parameter is trainable.
    """
    require_number("learning_rate", learning_rate, "adamw", at_least=0)
    require_number("eps", eps, "adamw", at_least=0)
    for beta in betas:
        require_number("beta", beta, "adamw", at_least=0, below=1)
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=learning_rate, betas=betas, eps=eps, fused=True)


def sgd_nesterov(model: nn.Module, learning_rate: float, weight_decay: float = 5e-4, momentum: float = 0.9) -> torch.optim.SGD:
    """Return SGD with Nesterov momentum as one fused kernel per step; weight decay is the L2 form of ResNet training.

    Raises:
        HyperionError: a rate or decay is negative or not finite, momentum is outside 0 .. 1, or no parameter is trainable.
    """
    require_number("learning_rate", learning_rate, "sgd_nesterov", at_least=0)
    require_number("momentum", momentum, "sgd_nesterov", above=0, below=1)
    # torch has no fused SGD for sharded parameters; "foreach" needs a few kernels per step over all parameters at once.
    kernel: dict[str, Any] = {"foreach" if is_sharded(model) else "fused": True}
    return torch.optim.SGD(decay_groups(model, weight_decay), lr=learning_rate, momentum=momentum, nesterov=True, **kernel)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups: matrices, embeddings and convolution kernels with decay, 1-d parameters without.

    Raises:
        HyperionError: the decay is negative or not finite, or no parameter requires a gradient.
    """
    require_number("weight_decay", weight_decay, "optimizer", at_least=0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise HyperionError(
            f"no parameter of {type(model).__name__} requires a gradient",
            where="optimizer",
            next_step="set requires_grad of the trainable parameters before building the optimizer",
        )
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class WarmupCosine:
    """Learning rate: linear warm-up to the peak, half a cosine down to a fraction of it, then constant.

    A pure function of the step, so a resumed run needs no scheduler state.

    Attributes:
        peak: highest learning rate, reached at step warmup_steps (steps count from 1).
        warmup_steps: 0 starts at the peak.
        total_steps: step at which the rate reaches peak * final_fraction.
        final_fraction: 1 keeps the rate constant after the warm-up.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "total_steps"):
            require_number(name, getattr(self, name), "WarmupCosine", whole=True)
        require_number("peak", self.peak, "WarmupCosine", at_least=0)
        require_number("final_fraction", self.final_fraction, "WarmupCosine", at_least=0, at_most=1)
        if not 0 <= self.warmup_steps < self.total_steps:
            raise HyperionError(
                f"warmup_steps {self.warmup_steps} is not from 0 to total_steps {self.total_steps} - 1",
                where="WarmupCosine",
                next_step="shorten the warm-up or train longer",
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1.

        Raises:
            HyperionError: the step is below 1.
        """
        if step < 1:
            raise HyperionError(f"step is {step}", where="WarmupCosine", next_step="count steps from 1")
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Precision:
    """Number format of matrix products and convolutions; weights, optimizer state and losses are always float32.

    Attributes:
        dtype: 'fp32' (without TF32), 'tf32', 'bf16', 'fp16', or 'fp8' for a model converted by
            hyperion.training.float8.to_float8.
        reason: why this format was chosen.
    """

    dtype: str
    reason: str

    def __post_init__(self) -> None:
        if self.dtype not in (*TRAINING_DTYPES, FP8):
            raise HyperionError(
                f"dtype is {self.dtype!r}", where="Precision", next_step=f"choose one of {', '.join((*TRAINING_DTYPES, FP8))}"
            )

    def products(self) -> AbstractContextManager:
        """Return the context of a whole step, including the backward pass: sets whether float32 products may use TF32.

        The setting belongs to the process, so engines of different precision can alternate in one process.
        """
        # With a 16-bit format hardly any product is float32, so the setting is left unchanged.
        return contextlib.nullcontext() if self.dtype in _AUTOCAST else matmul_precision(FORMATS[self.dtype])

    @contextlib.contextmanager
    def autocast(self, device: Device) -> Iterator[None]:
        """Return the context of a forward pass."""
        where = torch.device(device.torch_device).type
        dtype = _AUTOCAST.get(self.dtype, torch.bfloat16)
        with self.products(), torch.autocast(where, dtype, enabled=self.dtype in _AUTOCAST):
            yield

    def loss_scaler(self, device: Device) -> "LossScaler":
        """Return the loss scaler: an adaptive scale for fp16, disabled for other formats."""
        return LossScaler(device, enabled=self.dtype == "fp16")

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})"


class LossScaler:
    """Loss scale that keeps fp16 gradients from underflow: multiply the loss by a scale, divide the gradients by it.

    A gradient below 2^-24 is zero in fp16; multiplied by 65536 it is not. If the scale is too large, gradients overflow:
    then the step is skipped and the scale halved. After 2000 steps without overflow the scale is doubled. torch's GradScaler
    does the arithmetic without waiting for the device.

    Source: Micikevicius et al., Mixed Precision Training, 2018.

    Args:
        enabled: False uses no scale, skips no step and has no state.
    """

    def __init__(self, device: Device, enabled: bool):
        self._scaler = torch.amp.GradScaler(torch.device(device.torch_device).type, enabled=enabled)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device.torch_device)

    @property
    def scale(self) -> float:
        """Scale of the next step, 1 if disabled; reading it waits for the device."""
        return self._scaler.get_scale()

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient overflowed; reading it waits for the device."""
        return int(self._skipped)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss multiplied by the scale."""
        self._scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. Call it before clipping or reading them."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, gradient_norm: Tensor) -> Tensor:
        """Update the weights unless a gradient overflowed, and adapt the scale.

        Args:
            gradient_norm: L2 norm of the gradients after `unscale`, scalar.

        Returns:
            True if the update was skipped because the scale was too large (bool scalar on the device). A scale below 1 is
            not too large: then the gradients themselves are infinite or NaN.
        """
        if not self._scaler.is_enabled():
            optimizer.step()
            return torch.zeros((), dtype=torch.bool, device=self._skipped.device)
        _initialize_momentum(optimizer)
        self._scaler.step(optimizer)
        overflowed = ~torch.isfinite(gradient_norm) & (self._scaler.scale(torch.ones_like(gradient_norm)) >= 1)
        self._scaler.update()
        self._skipped += overflowed
        return overflowed

    def state_dict(self) -> dict:
        """Return the state for a checkpoint; empty if disabled."""
        return self._scaler.state_dict() | {"skipped_steps": self.skipped_steps} if self._scaler.is_enabled() else {}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state of `state_dict`.

        Raises:
            CheckpointError: the state is from another precision.
        """
        if bool(state) != self._scaler.is_enabled():
            saved, here = ("fp16", "another precision") if state else ("another precision than fp16", "fp16")
            raise CheckpointError(
                f"the checkpoint was saved in {saved}, but this run trains in {here}",
                where="loss scale",
                next_step="resume in the precision of the checkpoint, or choose another checkpoint folder",
            )
        if state:
            self._scaler.load_state_dict(state)
            self._skipped.fill_(state["skipped_steps"])


def _initialize_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give SGD a momentum of zero before its first step, which leads to the same first step.

    PyTorch's fused SGD (2.11, 2.13) allocates its momentum uninitialised and relies on the first update to write it. If that
    update is skipped, the next one uses uninitialised memory.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for parameter in group["params"] if group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def choose_precision(device: Device, requested: str = "auto") -> Precision:
    """Return the precision to train in on this device.

    Args:
        requested: 'auto', 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'. 'auto' is bf16 on a GPU with matrix units for it, else
            fp32.

    Raises:
        HyperionError: an unknown name, or a format that the device does not support.
    """
    if requested == "auto":
        return _automatic(device)
    if requested not in (*TRAINING_DTYPES, FP8):
        raise HyperionError(
            f"no training precision is named {requested!r}",
            where="precision",
            next_step=f"choose auto or {', '.join(TRAINING_DTYPES)}",
        )
    possible, how = device.supports(requested)
    if not possible:
        raise HyperionError(
            f"{device.name} cannot train in {requested}: {how}", where="precision", next_step="choose auto or fp32"
        )
    if requested == FP8:
        how = f"linear layers of the blocks in e4m3, their gradients in e5m2, a scale a tensor; the rest in bf16; {how}"
    return Precision(requested, "as requested" if requested == "fp32" else f"as requested; {how}")


def _automatic(device: Device) -> Precision:
    possible, how = device.supports("bf16")
    if device.kind == "cpu":
        return Precision("fp32", "the reference precision of a CPU")
    if not possible or how.startswith(("without", "no ")):
        return Precision("fp32", f"bf16 would not be faster: {how}")
    return Precision("bf16", how)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch (including those of all GPUs).

    Args:
        seed: 0 to 2^32 - 1.
        deterministic: also make torch refuse nondeterministic operations. On a CPU with a fixed number of threads losses
            repeat bit for bit without it; on a GPU only with it, at some cost in speed.

    Raises:
        HyperionError: the seed is out of range.
    """
    seed = require_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads this at its first call
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed everything from the run's seed, the current step and the rank.

    So ranks have different random numbers, and a resumed run does not repeat those of an earlier start.

    Raises:
        HyperionError: an argument is negative or not a whole number.
    """
    for name, value in (("seed", seed), ("step", step), ("rank", rank)):
        require_number(name, value, "seed_rank", whole=True, at_least=0)
    seed_everything(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))


def rng_state() -> dict[str, Any]:
    """Return the state of all generators, as tensors and JSON values."""
    python = random.getstate()
    _, numpy_keys, numpy_position, has_gauss, cached_gauss = cast(tuple, np.random.get_state())
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [torch.from_numpy(numpy_keys.astype(np.int64)), int(numpy_position), int(has_gauss), float(cached_gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def require_rng_state(state: dict[str, Any]) -> None:
    """Check a state from a file by setting it in new generators, so that `set_rng_state` cannot fail later.

    Raises:
        Exception: whatever a generator raises if the state is malformed.
    """
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    if not 0 <= position <= _NUMPY_WORDS:  # NumPy would read out of bounds
        raise ValueError(f"the position of NumPy's generator is {position}")
    np.random.RandomState().set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.Generator().set_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.Generator(f"cuda:{index}").set_state(device_state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the result of rng_state; GPUs without a stored state are unchanged, and states without a GPU are ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)
