"""Two small trainings whose numbers are known: weights, data and recipe, the same on every platform and in every version.

All numbers come from the raw 64-bit output of NumPy's PCG64, whose stream is fixed (NEP 19: that of distributions is not,
and torch promises neither), by exact arithmetic, and are rounded to float32: a machine that computes in float32 begins with
the very numbers of the float64 reference.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import ImageEngine, LanguageEngine, Precision, TorchEngine, adamw, sgd_nesterov

STEPS = 50
CLIP_NORM = 1.0
_VOCABULARY, _LENGTH, _WINDOWS = 64, 16, 4
_IMAGES, _SIDE, _CLASSES = 16, 16, 10
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        shell: the model, whatever its weights are.
        batch: of a step counted from 0, on the CPU; floating-point inputs are float32.
        learning_rate: of every step.
        optimizer: of the library, over a model.
        engine: of the library.
    """

    name: str
    shell: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    learning_rate: float
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    engine: type[TorchEngine]

    def model(self) -> nn.Module:
        """The model with its known weights, float32 on the CPU."""
        model = self.shell()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(_weights(f"{self.name}/{name}", tuple(parameter.shape))))
        return model

    def start(self, dtype: str, device: Device) -> TorchEngine:
        """The library's engine over the model on this device."""
        model = self.model().to(device.torch_device)
        precision = Precision(dtype, "a check of the machine's numbers")
        optimizer = self.optimizer(model, self.learning_rate)
        return self.engine(model, optimizer, lambda step: self.learning_rate, precision, device, clip_norm=CLIP_NORM)


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers from -1 to 1 that belong to this name, float32 values as float64."""
    raw = _raw(name, math.prod(shape))
    return (
        (2.0 * ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53) - 1.0).astype(np.float32).astype(np.float64).reshape(shape)
    )


def integers(name: str, shape: tuple[int, ...], below: int) -> np.ndarray:
    """Integers from 0 to below - 1 that belong to this name, int64."""
    return (_raw(name, math.prod(shape)) % np.uint64(below)).astype(np.int64).reshape(shape)


def _raw(name: str, count: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.PCG64(seed).random_raw(count)


def _weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices and kernels with a variance of 1/fan-in, embeddings of 0.1, gains near 1, biases near 0: none of them zero.

    Biases of a ReLU's norm are near 2, so that few units lie at its kink: there a rounding switches a unit on or off, and
    changes the gradient by as much as the unit contributes, whatever the precision.
    """
    numbers = uniform(name, shape)
    if len(shape) == 1:
        before_relu = name.startswith("resnet18") and "norm" in name
        middle = 1.0 if name.endswith("weight") else 2.0 if before_relu else 0.0
        numbers = (0.5 if before_relu else 0.1) * numbers + middle
    else:
        numbers = numbers * math.sqrt(0.3 if "embedding" in name else 3.0 / math.prod(shape[1:]))
    return numbers.astype(np.float32)


def _tokens(step: int) -> Batch:
    windows = torch.from_numpy(integers(f"tokens {step}", (_WINDOWS, _LENGTH + 1), _VOCABULARY))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _pictures(step: int) -> Batch:
    images = torch.from_numpy(uniform(f"images {step}", (_IMAGES, 3, _SIDE, _SIDE)) * 1.75).float()
    return images, torch.from_numpy(integers(f"labels {step}", (_IMAGES,), _CLASSES))


CASES = (
    Case(
        "language",
        lambda: TransformerLM(TransformerConfig(_VOCABULARY, _LENGTH, width=32, heads=2, layers=2)),
        _tokens,
        1e-3,
        adamw,
        LanguageEngine,
    ),
    Case("resnet18", lambda: resnet18(_CLASSES, width=4), _pictures, 2e-3, sgd_nesterov, ImageEngine),
)
