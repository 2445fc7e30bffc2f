"""Create the optimizer, the learning-rate schedule and the number format with loss scaling, and set random seeds.

The optimizers apply weight decay to weights, but not to biases and norm parameters.
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
from hyperion.hardware.device import has_matrix_units
from hyperion.measure import FORMATS, matmul_precision
from hyperion.measure.api.arguments import device_of
from hyperion.parallel import is_sharded

TRAINING_DTYPES = ("fp32", "tf32", "bf16", "fp16")
FP8 = "fp8"
# fp8 is used only in the linear layers that hyperion.training.float8 replaces. All other layers then compute in bf16.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, FP8: torch.bfloat16}
_NUMPY_WORDS = 624  # number of words in the state of the Mersenne twister, NumPy's generator


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> torch.optim.AdamW:
    """Return the AdamW optimizer (Loshchilov & Hutter 2019) in its fused form.

    The default betas are those of GPT-3 (Brown et al. 2020).

    Raises:
        HyperionError: the learning rate, the weight decay or eps is negative or not finite, a beta is not in [0, 1), or no
            parameter is trainable.
    """
    require_number("learning_rate", learning_rate, "adamw", at_least=0)
    require_number("eps", eps, "adamw", at_least=0)
    for beta in betas:
        require_number("beta", beta, "adamw", at_least=0, below=1)
    return torch.optim.AdamW(decay_groups(model, weight_decay), lr=learning_rate, betas=betas, eps=eps, fused=True)


def sgd_nesterov(model: nn.Module, learning_rate: float, weight_decay: float = 5e-4, momentum: float = 0.9) -> torch.optim.SGD:
    """Return the SGD optimizer with Nesterov momentum, in its fused form if the model is not sharded.

    Weight decay is added to the gradient (L2 form), as in the training of ResNets.

    Raises:
        HyperionError: the learning rate or the weight decay is negative or not finite, the momentum is not in (0, 1), or no
            parameter is trainable.
    """
    require_number("learning_rate", learning_rate, "sgd_nesterov", at_least=0)
    require_number("momentum", momentum, "sgd_nesterov", above=0, below=1)
    # torch has no fused SGD for sharded parameters. "foreach" launches only a few kernels per step. Each of them updates all
    # parameters.
    kernel: dict[str, Any] = {"foreach" if is_sharded(model) else "fused": True}
    return torch.optim.SGD(decay_groups(model, weight_decay), lr=learning_rate, momentum=momentum, nesterov=True, **kernel)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups: the first with weight decay, the second without.

    The first group contains the parameters with at least two dimensions: matrices, embeddings and convolution kernels. The second
    contains biases and norm parameters.

    Raises:
        HyperionError: the weight decay is negative or not finite, or no parameter requires a gradient.
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
    """Learning-rate schedule: linear warm-up to a peak, then decay along half a cosine, then a constant rate.

    The learning rate depends only on the step, so a checkpoint contains no state of the schedule. Steps are counted from 1.

    Attributes:
        peak: peak learning rate, reached at step `warmup_steps`.
        warmup_steps: number of warm-up steps. With 0 the schedule starts at the peak.
        total_steps: step at which the learning rate reaches peak * final_fraction.
        final_fraction: final learning rate divided by the peak. With 1 the rate is constant after the warm-up.
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
                f"warmup_steps is {self.warmup_steps}, but must be at least 0 and below total_steps, which is {self.total_steps}",
                where="WarmupCosine",
                next_step="shorten the warm-up or train longer",
            )

    def __call__(self, step: int) -> float:
        """Return the learning rate of an optimizer step. Steps are counted from 1.

        Raises:
            HyperionError: the step is below 1.
        """
        if step < 1:
            raise HyperionError(
                f"step is {step}, but the first step has the number 1", where="WarmupCosine", next_step="count steps from 1"
            )
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        # From peak to peak·final_fraction along (1 + cos(π·done)) / 2, which falls from 1 to 0.
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Precision:
    """Number format of matrix products and convolutions. Weights, optimizer state and losses are always float32.

    Attributes:
        dtype: 'fp32' (without TF32), 'tf32', 'bf16', 'fp16' or 'fp8'. With 'fp8' the model must have been converted by
            hyperion.training.float8.to_float8.
        reason: the reason for this format.
    """

    dtype: str
    reason: str

    def __post_init__(self) -> None:
        if self.dtype not in (*TRAINING_DTYPES, FP8):
            raise HyperionError(
                f"dtype is {self.dtype!r}, which is not a number format for training",
                where="Precision",
                next_step=f"choose one of {', '.join((*TRAINING_DTYPES, FP8))}",
            )

    def products(self) -> AbstractContextManager:
        """Return a context manager for a whole step, including the backward pass.

        It sets whether float32 matrix products may use TF32, and restores the previous setting on exit. The setting is global in
        the process; restoring it allows engines with different precisions to alternate in one process.
        """
        # With a 16-bit format almost no matrix product is float32, so the setting is not changed.
        return contextlib.nullcontext() if self.dtype in AUTOCAST else matmul_precision(FORMATS[self.dtype])

    @contextlib.contextmanager
    def autocast(self, device: Device) -> Iterator[None]:
        """Return a context manager that applies the autocast of this number format to a forward pass."""
        where = torch.device(device.torch_device).type
        dtype = AUTOCAST.get(self.dtype, torch.bfloat16)
        with self.products(), torch.autocast(where, dtype, enabled=self.dtype in AUTOCAST):
            yield

    def loss_scaler(self, device: Device) -> "LossScaler":
        """Return the loss scaler. It is enabled for fp16 and disabled for other formats."""
        return LossScaler(device, enabled=self.dtype == "fp16")

    def __str__(self) -> str:
        return f"{self.dtype} ({self.reason})"


class LossScaler:
    """Loss scaler that prevents the underflow of fp16 gradients.

    The loss is multiplied by a scale, and the gradients are divided by the same scale. Without a scale, gradients below 2^-24
    are zero in fp16. With a scale of 65536 many of them are not zero. If the scale is too large, gradients overflow. In this
    case the step is skipped and the scale is halved. After 2000 steps without overflow the scale is doubled. The class uses
    torch.amp.GradScaler, which does not wait for the device.

    Source: Micikevicius et al., Mixed Precision Training, 2018.

    Args:
        device: the device that trains.
        enabled: if False, no scale is used, no step is skipped, and there is no state.
    """

    def __init__(self, device: Device, enabled: bool):
        self._scaler = torch.amp.GradScaler(torch.device(device.torch_device).type, enabled=enabled)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device.torch_device)

    @property
    def scale(self) -> float:
        """Scale of the next step; 1 if disabled. Reading this property waits for the device."""
        return self._scaler.get_scale()

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient overflowed. Reading this property waits for the device."""
        return int(self._skipped)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss multiplied by the scale."""
        self._scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. Call this method before gradients are clipped or read."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, gradient_norm: Tensor) -> Tensor:
        """Update the weights unless a gradient overflowed, then adapt the scale.

        Args:
            optimizer: optimizer that updates the weights.
            gradient_norm: L2 norm of the gradients after `unscale`, as a scalar.

        Returns:
            A bool scalar on the device: True if the update was skipped because the scale was too large. It is False if the scale
            is below 1, because the scale then cannot be the cause of infinite or NaN gradients.
        """
        if not self._scaler.is_enabled():
            optimizer.step()
            return torch.zeros((), dtype=torch.bool, device=self._skipped.device)
        _initialize_momentum(optimizer)
        self._scaler.step(optimizer)
        # Scale the number 1 to get the scale as a tensor on the device. get_scale() would wait for the device.
        overflowed = ~torch.isfinite(gradient_norm) & (self._scaler.scale(torch.ones_like(gradient_norm)) >= 1)
        self._scaler.update()
        self._skipped += overflowed
        return overflowed

    def state_dict(self) -> dict:
        """Return the state for a checkpoint. It is empty if the scaler is disabled."""
        return self._scaler.state_dict() | {"skipped_steps": self.skipped_steps} if self._scaler.is_enabled() else {}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            CheckpointError: the state was saved with fp16 and this run does not use fp16, or vice versa.
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
    """Create the momentum buffers of SGD before the first step, filled with zeros. The result of the first step is the same.

    The fused SGD of PyTorch (2.11, 2.13) allocates momentum buffers without values and writes them in the first update. If this
    update is skipped, the next update would read uninitialized memory.
    """
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for parameter in group["params"] if group["momentum"] else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def choose_precision(device: Device | str, requested: str = "auto") -> Precision:
    """Return the precision for training on this device.

    Args:
        device: device on which the model is trained, or its PyTorch name.
        requested: 'auto', 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'. 'auto' selects bf16 on a GPU with matrix units for bf16,
            else fp32.

    Raises:
        HyperionError: the name is unknown, or the device does not support the format.
    """
    device = device_of(device)
    if requested == "auto":
        return _automatic(device)
    if requested not in (*TRAINING_DTYPES, FP8):
        raise HyperionError(
            f"no training precision is named {requested!r}",
            where="precision",
            next_step=f"choose auto or {', '.join((*TRAINING_DTYPES, FP8))}",
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
    if not possible or not has_matrix_units(device, "bf16"):
        return Precision("fp32", f"bf16 would not be faster: {how}")
    return Precision("bf16", how)


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Set the seeds of the random generators of Python, NumPy and torch, including those of all GPUs.

    Args:
        seed: whole number from 0 to 2^32 - 1.
        deterministic: if True, torch also raises an error for nondeterministic operations. On a GPU losses are bitwise
            reproducible only with this option, which makes some operations slower. On a CPU with a fixed number of threads
            they are bitwise reproducible without it.

    Raises:
        HyperionError: the seed is not a whole number in this range.
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
    """Set the seeds of all random generators from the seed of the run, the current step and the rank.

    As a result, ranks draw different random numbers, and a resumed run does not repeat those of an earlier start.

    Raises:
        HyperionError: an argument is negative or not a whole number.
    """
    for name, value in (("seed", seed), ("step", step), ("rank", rank)):
        require_number(name, value, "seed_rank", whole=True, at_least=0)
    # SeedSequence hashes its input. A sum such as seed + rank would give the same seed to rank 1 of run 0 and to rank 0 of run
    # 1.
    seed_everything(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))


def rng_state() -> dict[str, Any]:
    """Return the state of all random generators, as tensors and JSON values."""
    python = random.getstate()
    _, numpy_keys, numpy_position, has_gauss, cached_gauss = cast(tuple, np.random.get_state())
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [torch.from_numpy(numpy_keys.astype(np.int64)), int(numpy_position), int(has_gauss), float(cached_gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def require_rng_state(state: dict[str, Any]) -> None:
    """Check a state that was read from a file by setting it in new generators. `set_rng_state` cannot fail afterwards.

    Raises:
        Exception: the state is malformed. The type depends on the generator that refuses the state.
    """
    version, internal, gauss = state["python"]
    random.Random().setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    if not 0 <= position <= _NUMPY_WORDS:  # NumPy does not check the position, and would read outside of the state
        raise ValueError(f"the position of NumPy's generator is {position}")
    np.random.RandomState().set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.Generator().set_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.Generator(f"cuda:{index}").set_state(device_state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that rng_state returned.

    GPUs without a stored state are not changed. Stored states of GPUs that do not exist here are ignored.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached_gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)
