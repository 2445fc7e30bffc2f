"""The number format of a training run, chosen with a printed and stored reason, and the loss scale of fp16."""

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
# fp8 applies to linear layers replaced by hyperion.training.float8; everything else then computes in bf16.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, FP8: torch.bfloat16}


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
