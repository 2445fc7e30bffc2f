"""The golden pack: what the cases give in float64 on a CPU, made once and kept in git.

    python -m hyperion.doctor.numerics_pack            compares: makes it anew and says how far it is from the one in git
    python -m hyperion.doctor.numerics_pack --write    replaces the one in git

It is made by a loop of its own, of PyTorch's plainest operations: none of the library's engines, precisions or fused kernels.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from hyperion.doctor.numerics_cases import CASES, CLIP_NORM, STEPS, Case, integers
from hyperion.training import decay_groups

PACK = Path(__file__).with_name("numerics.safetensors")
SAMPLED = 128  # numbers kept of each gradient, beside its norm
_SMALLEST = 1e-3


def read_pack() -> dict[str, np.ndarray]:
    """The pack in git: "<case>/logits", "<case>/losses" [STEPS], "<case>/gradients/<parameter>" [SAMPLED or fewer], and
    "<case>/norms/<parameter>" [1], all float64.
    """
    return load_file(PACK)


def make_pack() -> dict[str, np.ndarray]:
    """The same, computed anew in float64 on this CPU; a few seconds."""
    pack = {}
    for case in CASES:
        for name, numbers in _reference(case).items():
            pack[f"{case.name}/{name}"] = np.ascontiguousarray(numbers)
    return pack


def sampled(name: str, gradient: Tensor) -> np.ndarray:
    """The numbers of a parameter's gradient that the pack keeps, float64: all of a small one."""
    flat = gradient.detach().double().cpu().contiguous().view(-1).numpy()
    return flat.copy() if flat.size <= SAMPLED else flat[integers(f"places in {name}", (SAMPLED,), flat.size)]


def _reference(case: Case) -> dict[str, np.ndarray]:
    model = case.model().double().train()
    optimizer, losses, found = _optimizer(case, model), [], {}
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
            found["logits"] = logits.detach().numpy()
            for name, gradient in gradients.items():
                found[f"gradients/{name}"] = sampled(name, gradient)
                found[f"norms/{name}"] = np.array([gradient.norm().item()])
        for gradient in gradients.values():
            gradient.mul_(min(1.0, CLIP_NORM / (norm.item() + 1e-6)))
        optimizer.step()
    return found | {"losses": np.array(losses)}


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """The library's settings, without its fused kernels."""
    plain = case.optimizer(case.model(), case.learning_rate)
    settings = {name: plain.defaults[name] for name in ("lr", "betas", "eps", "momentum", "nesterov") if name in plain.defaults}
    groups = decay_groups(model, plain.param_groups[0]["weight_decay"])
    kind = torch.optim.AdamW if isinstance(plain, torch.optim.AdamW) else torch.optim.SGD
    return kind(groups, **settings, foreach=False, fused=False)


def main(arguments: list[str]) -> int:
    """Compare or replace; 1 when the pack made here is not the one in git."""
    made = make_pack()
    if arguments == ["--write"]:
        save_file(made, PACK, metadata={"made by": "python -m hyperion.doctor.numerics_pack --write", "torch": torch.__version__})
        print(f"{PACK}: {PACK.stat().st_size / 1e3:.0f} kB")
        return 0
    kept = read_pack()
    worst = max((difference(made[name], kept[name]), name) for name in kept) if made.keys() == kept.keys() else (np.inf, "names")
    print(f"largest difference from the pack in git: {worst[0]:.2g} of {worst[1]}")
    return 0 if worst[0] <= 1e-9 else 1


def difference(found: np.ndarray, kept: np.ndarray) -> float:
    """Largest difference over the largest number (of a gradient that should be zero, over _SMALLEST)."""
    if found.shape != kept.shape:
        return float("inf")
    return float(np.abs(found - kept).max() / max(float(np.abs(kept).max()), _SMALLEST))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
