"""What the host pays for a training step: for each operator, Python, autograd, dispatch and launch together, and for each part
that was compiled by itself.

A device that is asked to do next to nothing waits for the host all the time, so that a step of a network of tiny tensors
lasts as long as the host needs for it. Large models are held up in the same way wherever their kernels are shorter than that.

Operators are not alike. A convolution and a batch norm are done by a library (cuDNN, MIOpen) that looks up a plan for every
call, and each of them enqueues several kernels; so they have a cost of their own, beside that of all other operators.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.measure.compilation import measure_first_calls
from hyperion.measure.dispatch import Call, dispatched
from hyperion.measure.dtypes import FORMATS
from hyperion.measure.product_formulas import products_of
from hyperion.measure.timing import Timing, time_interleaved
from hyperion.measure.verify import Verification
from hyperion.results import Estimate, estimates_of_medians

_WIDTH = 16
_SEQUENCES, _IMAGES = (2, 16, _WIDTH), (2, _WIDTH, 2, _WIDTH)  # of one batch; images have their channels first
_IN_A_ROW = 5  # steps behind one sample
_FEW_BLOCKS, _MANY_BLOCKS = 2, 6
_PARITY_STEPS = 200
_PARITY_TOLERANCE = 0.05  # 16-bit kernels that round elsewhere


@dataclass(frozen=True)
class OperatorCost:
    """Two timed steps of tiny tensors, done in turn: of two transformer layers, and of convolutions with batch norms.

    Args:
        operators: of the layers' step, those that move memory; views ride along with them.
        plain, convolutions: of the other step: operators like those of the layers, and `is_convolution`'s.
        timing, convolving: of the two whole steps, by the host's clock, steps in a row.
        verification: both lowered their loss.
    """

    operators: int
    plain: int
    convolutions: int
    timing: Timing
    convolving: Timing
    verification: Verification

    @property
    def time_s(self) -> Estimate:
        """Host seconds for each operator that moves memory and is no convolution."""
        return self.timing.estimate.map(lambda seconds: seconds / self.operators)

    @property
    def convolution_time_s(self) -> Estimate:
        """Host seconds for each convolution or batch norm: what their step takes beyond its other operators."""

        def rest(medians) -> list[float]:
            layers, convolving = medians
            return [(convolving - self.plain * layers / self.operators) / self.convolutions]

        return estimates_of_medians([self.timing.samples_s, self.convolving.samples_s], rest)[0]


@dataclass(frozen=True)
class BlockCost:
    """Timed steps with a few and with many compiled blocks, done in turn. Each block is a tiny transformer layer.

    Args:
        kernels: two for each product of a block, forward and backward: what `predict_step` counts for it.
        blocks: of the many beyond the few.
        few, many: whole steps, by the host's clock, steps in a row.
        compile_time_s: the first calls beyond as many settled ones; the blocks share what was compiled.
        verification: the mean loss of the first 200 steps lies where that of the same steps lies uncompiled.
    """

    kernels: int
    blocks: int
    few: Timing
    many: Timing
    compile_time_s: float
    verification: Verification

    @property
    def time_s(self) -> Estimate:
        """Host seconds for one more compiled block, forward and backward, its kernels' launches included."""
        series = [self.few.samples_s, self.many.samples_s]
        return estimates_of_medians(series, lambda medians: [(medians[1] - medians[0]) / self.blocks])[0]


def is_convolution(call: Call) -> bool:
    """Whether an operator is a convolution or a batch norm, forward or backward."""
    return "convolution" in call.name or "batch_norm" in call.name


def measure_operator_cost(device: Device, *, time_limit_s: float = 2.0) -> OperatorCost:
    """Time eager training steps, forward, backward and update, of two networks whose tensors are tiny.

    Args:
        time_limit_s: of sampling both; warming each up takes at most half as long.
    """
    steps = [_TinyStep(device, _layers(2), _SEQUENCES), _TinyStep(device, _convolutions(), _IMAGES)]
    for step in steps:
        step()  # makes the optimizer's state, which no later step makes again
    operators, others = ([call for call in dispatched(step) if call.moves] for step in steps)
    convolutions = sum(map(is_convolution, others))
    timings = _timed(steps, device, time_limit_s)
    learned = Verification("last loss / first loss", max(float(s.losses[-1] / s.losses[0]) for s in steps), 1.0)
    return OperatorCost(len(operators), len(others) - convolutions, convolutions, *timings, learned)


def measure_block_cost(device: Device, dtype: str = "fp32", *, time_limit_s: float = 2.0) -> BlockCost:
    """Compile tiny transformer layers, each by itself, and time training steps with a few and with many of them.

    Args:
        dtype: fp32, or what autocast takes: bf16, fp16.
        time_limit_s: as in `measure_operator_cost`; the compilation, with cold caches, comes on top.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    eager = [_TinyStep(device, _layers(count), _SEQUENCES, dtype) for count in (1, _FEW_BLOCKS)]
    one, two = (sum(products_of(call) is not None for call in dispatched(step)) for step in eager)
    steps = [_TinyStep(device, _layers(n), _SEQUENCES, dtype, compiled=True) for n in (_FEW_BLOCKS, _MANY_BLOCKS)]
    compile_time_s = measure_first_calls(lambda: [step() for step in steps], device)
    beside = abs(steps[0].mean_loss(_PARITY_STEPS) / eager[1].mean_loss(_PARITY_STEPS) - 1)
    parity = Verification(f"loss beside eager, mean of {_PARITY_STEPS} steps", beside, _PARITY_TOLERANCE)
    few, many = _timed(steps, device, time_limit_s)
    torch._dynamo.reset()  # what was compiled refers to the networks
    kernels = 2 * (two - one) // (_FEW_BLOCKS - 1)
    return BlockCost(kernels, _MANY_BLOCKS - _FEW_BLOCKS, few, many, compile_time_s, parity)


def _timed(steps: list, device: Device, time_limit_s: float) -> list[Timing]:
    return time_interleaved(steps, device, cold=False, back_to_back=_IN_A_ROW, time_limit_s=time_limit_s)


def _layers(count: int) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.TransformerEncoderLayer(_WIDTH, 2, _WIDTH, dropout=0.0, batch_first=True) for _ in range(count)]


def _convolutions(count: int = 4) -> Callable[[], list[nn.Module]]:
    def part() -> nn.Module:
        return nn.Sequential(nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1), nn.BatchNorm2d(_WIDTH), nn.ReLU())

    return lambda: [part() for _ in range(count)]


class _TinyStep:
    """A training step of a network of tiny tensors on one batch, the same weights and batch each time one is made.

    Args:
        parts: makes the network's parts. Before them stands a linear layer: as in a model, their input has a gradient.
        shape: of the batch.
        compiled: each part by itself, forward and backward.

    Attributes:
        losses: of every step, scalars on the device.
    """

    def __init__(
        self, device: Device, parts: Callable[[], list[nn.Module]], shape: tuple[int, ...], dtype: str = "fp32",
        compiled: bool = False,
    ):  # fmt: skip
        # Drawn on the host: its random numbers alone go on as if nothing had been drawn here.
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            blocks, inputs = parts(), torch.randn(shape)
            self._network = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *blocks).to(device.torch_device)
        self._inputs = inputs.to(device.torch_device)
        for block in blocks if compiled else ():
            block.forward = torch.compile(block.forward, dynamic=False)
        half = None if dtype == "fp32" else FORMATS[dtype].storage
        self._autocast = torch.autocast(self._inputs.device.type, half, enabled=half is not None)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=1e-3, fused=True)
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        with self._autocast:
            loss = self._network(self._inputs).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())

    def mean_loss(self, count: int) -> float:
        """Of the first `count` steps; those that are still to be done are done now."""
        while len(self.losses) < count:
            self()
        return float(torch.stack(self.losses[:count]).double().mean())
