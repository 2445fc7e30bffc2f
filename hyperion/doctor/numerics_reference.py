"""Two small trainings with fixed weights and data, and their float64 results (the pack), which are stored in git.

Weights and data must be the same on every platform and with every version. So they come from the raw 64-bit output of NumPy's
PCG64, which NEP 19 keeps stable (the output of NumPy's distributions and of torch's generators may change), by exact
arithmetic. They are rounded to float32, so that float32 and float64 computations start from the same numbers.

    python -m hyperion.doctor.numerics_reference            recompute the pack and compare it with the one in git
    python -m hyperion.doctor.numerics_reference --write    replace the pack in git

The pack is computed by a separate loop of plain PyTorch operations, without the library's engines, precisions or fused kernels.
"""

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import ImageEngine, LanguageEngine, Precision, TorchEngine, adamw, decay_groups, sgd_nesterov

STEPS = 50
CLIP_NORM = 1.0
_VOCABULARY, _LENGTH, _WINDOWS = 64, 16, 4
_IMAGES, _SIDE, _CLASSES = 16, 16, 10
Batch = tuple[Tensor, Tensor]
PACK = Path(__file__).with_name("numerics.safetensors")
SAMPLED = 128  # numbers of each gradient in the pack, in addition to its norm
_SMALLEST = 1e-3


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        shell: makes the model with any weights.
        batch: returns the batch of a step (from 0) on the CPU; floating-point inputs are float32.
        learning_rate: learning rate of every step.
        optimizer: makes the library's optimizer of a model.
        engine: the library's engine class.
    """

    name: str
    shell: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    learning_rate: float
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    engine: type[TorchEngine]

    def model(self) -> nn.Module:
        """Return the model with its fixed weights, float32 on the CPU."""
        model = self.shell()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(_weights(f"{self.name}/{name}", tuple(parameter.shape))))
        return model

    def start(self, dtype: str, device: Device) -> TorchEngine:
        """Return the library's engine for the model on this device."""
        model = self.model().to(device.torch_device)
        precision = Precision(dtype, "a check of the machine's numbers")
        optimizer = self.optimizer(model, self.learning_rate)
        return self.engine(model, optimizer, lambda step: self.learning_rate, precision, device, clip_norm=CLIP_NORM)


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers from -1 to 1 that belong to this name: float32 values as float64."""
    raw = _raw(name, math.prod(shape))
    return (
        (2.0 * ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53) - 1.0).astype(np.float32).astype(np.float64).reshape(shape)
    )


def integers(name: str, shape: tuple[int, ...], below: int) -> np.ndarray:
    """Return the integers from 0 to below - 1 that belong to this name, int64."""
    return (_raw(name, math.prod(shape)) % np.uint64(below)).astype(np.int64).reshape(shape)


def _raw(name: str, count: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.PCG64(seed).random_raw(count)


def _weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return weights: matrices and kernels with a variance of 1/fan-in, embeddings of 0.1, gains near 1, biases near 0.

    Biases of the norms before a ReLU are near 2, so that few units lie at its kink. There a rounding error switches a unit on or
    off and changes the gradient by the whole contribution of the unit, in any precision.
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


def read_pack() -> dict[str, np.ndarray]:
    """Return the pack in git: "<case>/logits", "<case>/losses" [STEPS], "<case>/gradients/<parameter>" [SAMPLED or fewer], and
    "<case>/norms/<parameter>" [1], all float64.
    """
    return load_file(PACK)


def make_pack() -> dict[str, np.ndarray]:
    """Recompute the pack in float64 on this CPU; takes a few seconds."""
    pack = {}
    for case in CASES:
        for name, numbers in _reference(case).items():
            pack[f"{case.name}/{name}"] = np.ascontiguousarray(numbers)
    return pack


def sampled(name: str, gradient: Tensor) -> np.ndarray:
    """Return the numbers of a parameter's gradient that are in the pack (float64): all of them if they are few."""
    flat = gradient.detach().double().cpu().contiguous().view(-1).numpy()
    return flat.copy() if flat.size <= SAMPLED else flat[integers(f"places in {name}", (SAMPLED,), flat.size)]


def _reference(case: Case) -> dict[str, np.ndarray]:
    model = case.model().double().train()
    optimizer, losses, pack = _optimizer(case, model), [], {}
    for step in range(STEPS):
        inputs, targets = case.batch(step)
        logits = model(inputs.double() if inputs.is_floating_point() else inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        if step == 0:
            pack["logits"] = logits.detach().numpy()
            for name, gradient in gradients.items():
                pack[f"gradients/{name}"] = sampled(name, gradient)
                pack[f"norms/{name}"] = np.array([gradient.norm().item()])
        for gradient in gradients.values():
            gradient.mul_(min(1.0, CLIP_NORM / (norm.item() + 1e-6)))
        optimizer.step()
    return pack | {"losses": np.array(losses)}


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return a plain PyTorch optimizer with the settings of the library's, without fused kernels."""
    plain = case.optimizer(case.model(), case.learning_rate)
    settings = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "momentum", "nesterov") if name in plain.defaults}
    groups = decay_groups(model, plain.param_groups[0]["weight_decay"])
    kind = torch.optim.AdamW if isinstance(plain, torch.optim.AdamW) else torch.optim.SGD
    return kind(groups, **settings, foreach=False, fused=False)


def main(arguments: list[str]) -> int:
    """Compare the recomputed pack with the one in git, or replace it; return 1 if they differ."""
    pack = make_pack()
    if arguments == ["--write"]:
        save_file(
            pack, PACK, metadata={"made by": "python -m hyperion.doctor.numerics_reference --write", "torch": torch.__version__}
        )
        print(f"{PACK}: {PACK.stat().st_size / 1e3:.0f} kB")
        return 0
    stored = read_pack()
    same_names = pack.keys() == stored.keys()
    worst = max((difference(pack[name], stored[name]), name) for name in stored) if same_names else (np.inf, "names")
    print(f"largest difference from the pack in git: {worst[0]:.2g} of {worst[1]}")
    return 0 if worst[0] <= 1e-9 else 1


def difference(computed: np.ndarray, stored: np.ndarray) -> float:
    """Return the largest difference over the largest stored number, or over `_SMALLEST` for a gradient that should be zero."""
    if computed.shape != stored.shape:
        return float("inf")
    return float(np.abs(computed - stored).max() / max(float(np.abs(stored).max()), _SMALLEST))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
