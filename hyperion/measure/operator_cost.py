"""What one operator of an eager training step costs the host: Python, autograd, dispatch and launch together.

A device that is asked to do next to nothing waits for the host all the time, so that a step of a network of tiny tensors
lasts as long as the host needs for its operators. Large models are held up in the same way wherever their kernels are
shorter than that.
"""

from dataclasses import dataclass

import torch
from torch import nn

from hyperion.hardware import Device
from hyperion.measure.dispatch import dispatched
from hyperion.measure.timing import Timing, time_function
from hyperion.results import Estimate

_WIDTH, _POSITIONS, _BATCH = 16, 16, 2


@dataclass(frozen=True)
class OperatorCost:
    """A timed step of tiny tensors.

    Args:
        operators: of the step, those that move memory; views ride along with them.
        timing: of the whole step, by the host's clock, steps in a row.
    """

    operators: int
    timing: Timing

    @property
    def time_s(self) -> Estimate:
        """Host seconds for each operator that moves memory."""
        return self.timing.estimate.map(lambda seconds: seconds / self.operators)


def measure_operator_cost(device: Device, *, time_limit_s: float = 2.0) -> OperatorCost:
    """Time training steps, forward, backward and update, of a network whose tensors are tiny.

    Its operators are those of the field: a convolution with batch norm and activation, and two transformer layers.
    """
    step = _tiny_step(device)
    step()  # makes the optimizer's state, which no later step makes again
    operators = sum(call.moves for call in dispatched(step))
    return OperatorCost(operators, time_function(step, device, cold=False, back_to_back=5, time_limit_s=time_limit_s))


def _tiny_step(device: Device):
    gpus = [] if device.kind == "cpu" else [device.index]
    # The caller's random numbers go on as if nothing had been drawn here.
    with torch.random.fork_rng(gpus), torch.device(device.torch_device):
        convolution = nn.Sequential(nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1), nn.BatchNorm1d(_WIDTH), nn.ReLU())
        layers = [nn.TransformerEncoderLayer(_WIDTH, 2, _WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
        network = nn.Sequential(convolution, *layers)
        inputs = torch.randn(_BATCH, _WIDTH, _POSITIONS)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        network(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
