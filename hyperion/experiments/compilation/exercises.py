"""Self-marking exercises for the chapter on compilation."""

from collections.abc import Callable

import pandas as pd
import torch

from hyperion.chapter.exercises import Question, explains_errors
from hyperion.measure.steps.compilation import count_graph_breaks

CALLS_UNTIL_IT_PAYS = Question(20 / (2.547e-3 - 1.512e-3), "seconds of compiling, divided by the seconds that each call saves")

_MODELS = {"resnet18": (0.0209, 0.0095), "language model": (0.4264, 0.1500)}  # GiB of weights, of activations


class ToyMemory:
    """Simulated device memory, measured in GiB, with the counters of PyTorch's allocator.

    `load(model)` loads the weights of a model and `unload(model)` removes them. `loaded` lists the models whose weights are in
    memory. `call(model)` runs a loaded model once and needs memory for its activations during the call. `allocated` is the
    memory in use, and `peak` is the largest value of `allocated` since `reset_peak()`.
    """

    def __init__(self):
        self.loaded: list[str] = []
        self.allocated = self.peak = 0.0

    def load(self, model: str) -> None:
        """Load the weights of a model, if they are not in memory yet."""
        if model not in self.loaded:
            self.loaded.append(model)
            self._change(_MODELS[model][0])

    def unload(self, model: str) -> None:
        """Remove the weights of a model from memory."""
        self.loaded.remove(model)
        self._change(-_MODELS[model][0])

    def call(self, model: str) -> None:
        """Call a loaded model once."""
        if model not in self.loaded:
            raise ValueError(f"{model!r} is not loaded; loaded models: {self.loaded}; call load({model!r}) first")
        self._change(_MODELS[model][1])
        self._change(-_MODELS[model][1])

    def reset_peak(self) -> None:
        """Set `peak` to the memory that is in use now."""
        self.peak = self.allocated

    def _change(self, gib: float) -> None:
        self.allocated += gib
        self.peak = max(self.peak, self.allocated)


@explains_errors
def judge_memory_probe(my_probe: Callable[[ToyMemory, str], float]) -> pd.DataFrame:
    """Test a function that measures the peak memory of a call.

    The tests call it in a simulated new process, and in simulated processes that have already used memory.

    Args:
        my_probe: function that takes a ToyMemory and the name of a model. It returns the peak memory in GiB of one call of this
            model, including the weights of the model.

    Returns:
        A table with one line for each situation: the result of the probe, the true value, and whether the result is correct.
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


@explains_errors
def judge_without_breaks(my_function: Callable[[torch.Tensor], torch.Tensor]) -> pd.DataFrame:
    """Test a function that must be captured in one graph and still return the correct results.

    Args:
        my_function: function that takes a tensor. It returns the tensor times two if the sum of the tensor is above zero, and the
            tensor minus one otherwise.

    Returns:
        A table with one line for each requirement: whether it is met, and what was observed.
    """
    lines = []
    for name, sign in (("a sum above zero", 1.0), ("a sum below zero", -1.0)):
        x = sign * torch.arange(1.0, 5.0)
        wanted, got = (2 * x if x.sum() > 0 else x - 1), my_function(x)
        lines.append({"requirement": f"right for {name}", "right": bool(torch.equal(got, wanted)), "seen": str(got.tolist())})
    breaks, reasons = count_graph_breaks(my_function, (torch.arange(1.0, 5.0),))
    seen = f"{breaks} graph breaks" + "".join(f"; {reason}" for reason in reasons)
    return pd.DataFrame([*lines, {"requirement": "captured in one graph", "right": breaks == 0, "seen": seen}])
