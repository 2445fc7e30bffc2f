"""Exercises of the compilation chapter that mark themselves."""

from collections.abc import Callable

import pandas as pd
import torch

from hyperion.measure.steps.compilation import count_graph_breaks

_MODELS = {"resnet18": (0.0209, 0.0095), "language model": (0.4264, 0.1500)}  # GiB of weights, of activations


class ToyMemory:
    """Device memory that counts as PyTorch's allocator does, in GiB.

    `load(model)` and `unload(model)` move weights, `loaded` lists whose are there, `call(model)` runs it once and needs
    memory for its activations meanwhile; `allocated` is what is in use now, `peak` the most since `reset_peak()`.
    """

    def __init__(self):
        self.loaded: list[str] = []
        self.allocated = self.peak = 0.0

    def load(self, model: str) -> None:
        """Put a model's weights into memory, if they are not there yet."""
        if model not in self.loaded:
            self.loaded.append(model)
            self._change(_MODELS[model][0])

    def unload(self, model: str) -> None:
        """Take a model's weights out again."""
        self.loaded.remove(model)
        self._change(-_MODELS[model][0])

    def call(self, model: str) -> None:
        """One call of a loaded model."""
        if model not in self.loaded:
            raise ValueError(f"{model!r} is not loaded: {self.loaded} are")
        self._change(_MODELS[model][1])
        self._change(-_MODELS[model][1])

    def reset_peak(self) -> None:
        """Start the search for the peak anew, from what is in use now."""
        self.peak = self.allocated

    def _change(self, gib: float) -> None:
        self.allocated += gib
        self.peak = max(self.peak, self.allocated)


def judge_memory_probe(my_probe: Callable[[ToyMemory, str], float]) -> pd.DataFrame:
    """Judge a benchmark of memory where it has to hold: in a fresh process, and in one that did other things before.

    Args:
        my_probe: takes a ToyMemory and a model's name, returns the most GiB that a call of this model takes, its weights
            included.

    Returns:
        One line a situation: what the probe said, what is true, and whether that was right.
    """
    fresh, crowded, used = ToyMemory(), ToyMemory(), ToyMemory()
    crowded.load("language model")
    used.load("language model")
    used.call("language model")
    used.unload("language model")
    situations = {"a fresh process": fresh, "another model still there": crowded, "a higher peak from before": used}
    true = sum(_MODELS["resnet18"])
    lines = []
    for name, memory in situations.items():
        said = float(my_probe(memory, "resnet18"))
        lines.append({"situation": name, "you say [GiB]": said, "true [GiB]": true, "right": abs(said - true) < 1e-9})
    return pd.DataFrame(lines)


def judge_without_breaks(my_function: Callable[[torch.Tensor], torch.Tensor]) -> pd.DataFrame:
    """Judge a function that is to be captured in one graph: is it still the same function?

    Args:
        my_function: doubles a tensor whose sum is above zero, and takes one from each element of any other.

    Returns:
        One line a demand: whether it is met, and what was seen.
    """
    lines = []
    for name, sign in (("a sum above zero", 1.0), ("a sum below zero", -1.0)):
        x = sign * torch.arange(1.0, 5.0)
        wanted, got = (2 * x if x.sum() > 0 else x - 1), my_function(x)
        lines.append({"demand": f"right for {name}", "right": bool(torch.equal(got, wanted)), "seen": str(got.tolist())})
    breaks, reasons = count_graph_breaks(my_function, (torch.arange(1.0, 5.0),))
    seen = f"{breaks} graph breaks" + "".join(f"; {reason}" for reason in reasons)
    return pd.DataFrame([*lines, {"demand": "captured in one graph", "right": breaks == 0, "seen": seen}])
