"""The number format of a training run, chosen with a reason that is printed and stored, and the loss scale that fp16 needs."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperion.checkpoints import CheckpointError
from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure import FORMATS, matmul_precision

TRAINING_DTYPES = ("fp32", "tf32", "bf16", "fp16")
FP8 = "fp8"
# fp8 is for linear layers that were replaced (hyperion.training.float8); the rest computes in bf16 then.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, FP8: torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """What matrix products and convolutions compute in; weights, optimizer state and losses are float32 in each case.

    Attributes:
        dtype: 'fp32' (no TF32 anywhere), 'tf32', 'bf16', 'fp16', or 'fp8' for a model that went through
            hyperion.training.float8.to_float8.
        reason: why this one.
    """

    dtype: str
    reason: str

    def __post_init__(self):
        if self.dtype not in (*TRAINING_DTYPES, FP8):
            raise HyperionError(
                f"dtype is {self.dtype!r}", where="Precision", next_step=f"choose one of {', '.join((*TRAINING_DTYPES, FP8))}"
            )

    def products(self) -> AbstractContextManager:
        """The context of a whole step, backward pass included: whether float32 products may use TF32 units.

        It is a switch of the process, so engines of different precision may take turns in one.
        """
        # The 16-bit formats leave hardly any float32 product, and keep the switches as they find them.
        return contextlib.nullcontext() if self.dtype in _AUTOCAST else matmul_precision(FORMATS[self.dtype])

    @contextlib.contextmanager
    def autocast(self, device: Device) -> Iterator[None]:
        """The context in which a forward pass runs."""
        where = torch.device(device.torch_device).type
        dtype = _AUTOCAST.get(self.dtype, torch.bfloat16)
        with self.products(), torch.autocast(where, dtype, enabled=self.dtype in _AUTOCAST):
            yield

    def loss_scaler(self, device: Device) -> "LossScaler":
        """What multiplies the loss: a scale that adapts itself for fp16, nothing for the others."""
        return LossScaler(device, enabled=self.dtype == "fp16")

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})"


class LossScaler:
    """Keeps fp16 gradients from vanishing: the loss is multiplied by a scale, the gradients are divided by it again.

    A gradient below 2^-24 is zero in fp16; times 65536 it is not. A scale that is too large makes gradients overflow
    instead: then the step is skipped and the scale halved; after 2000 steps without overflow it is doubled. Source:
    Micikevicius et al., Mixed Precision Training, 2018; torch.amp.GradScaler does the arithmetic, without waiting for the
    device.

    Args:
        enabled: False multiplies by nothing, skips nothing and has no state.
    """

    def __init__(self, device: Device, enabled: bool):
        self._scaler = torch.amp.GradScaler(torch.device(device.torch_device).type, enabled=enabled)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device.torch_device)

    @property
    def scale(self) -> float:
        """The factor of the next step, 1 when disabled; reading it waits for the device."""
        return self._scaler.get_scale()

    @property
    def skipped_steps(self) -> int:
        """Steps so far that changed no weight because a gradient overflowed; reading it waits for the device."""
        return int(self._skipped)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss times the scale."""
        self._scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale: before they are clipped or looked at."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, gradient_norm: Tensor) -> Tensor:
        """Update the weights, unless a gradient overflowed, and adapt the scale.

        Args:
            gradient_norm: L2 norm of the gradients after `unscale`, scalar.

        Returns:
            Whether the update was left out because the scale was too large (bool scalar on the device). With the scale
            below 1 it was not too large: then the gradients themselves are infinite or no numbers.
        """
        if not self._scaler.is_enabled():
            optimizer.step()
            return torch.zeros((), dtype=torch.bool, device=self._skipped.device)
        _begin_momentum(optimizer)
        self._scaler.step(optimizer)
        overflowed = ~torch.isfinite(gradient_norm) & (self._scaler.scale(torch.ones_like(gradient_norm)) >= 1)
        self._scaler.update()
        self._skipped += overflowed
        return overflowed

    def state_dict(self) -> dict:
        """For a checkpoint; empty when disabled."""
        return self._scaler.state_dict() | {"skipped_steps": self.skipped_steps} if self._scaler.is_enabled() else {}

    def load_state_dict(self, state: dict) -> None:
        """Go on with the scale that `state_dict` described.

        Raises:
            CheckpointError: the state is that of another precision.
        """
        if bool(state) != self._scaler.is_enabled():
            saved, here = ("fp16", "another precision") if state else ("another precision than fp16", "fp16")
            raise CheckpointError(
                f"the checkpoint was made in {saved}, this run trains in {here}",
                where="loss scale",
                next_step="resume in the precision of the checkpoint, or name another checkpoint folder",
            )
        if state:
            self._scaler.load_state_dict(state)
            self._skipped.fill_(state["skipped_steps"])


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Momentum of zero before the first step of an SGD, which leads to the very same first step.

    PyTorch's fused SGD (2.11, 2.13) allocates its momentum without writing to it and leaves the writing to the first
    update. When that is skipped, the next one takes what happened to lie in memory for momentum.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for parameter in group["params"] if group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def choose_precision(device: Device, requested: str = "auto") -> Precision:
    """The precision to train in on this device.

    Args:
        requested: 'auto', 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'. 'auto' is bf16 on a GPU with matrix units for it, else
            fp32.

    Raises:
        HyperionError: another name, or a type that the device does not multiply.
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
