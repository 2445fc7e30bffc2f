"""What the host pays for a training step: for each operator, Python, autograd, dispatch and launch together, for each part
that was compiled by itself, and once a step.

A device that is asked to do next to nothing waits for the host all the time, so that a step of a network of tiny tensors
lasts as long as the host needs for it. Large models are held up in the same way wherever their kernels are shorter than that.

Operators are not alike. A convolution and a batch norm are done by a library (cuDNN, MIOpen) that looks up a plan for every
call, and each of them enqueues several kernels; so they have a cost of their own, beside that of all other operators.

Every step also pays for what it does once, whatever its size: the optimizer's Python, the start of autograd, the clearing of
gradients. Shared out among the operators of one tiny step that would make each of them far too dear, most of all in a step of
few. So each cost is what a longer step takes beyond a shorter one of the same kind.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperion.hardware import Device
from hyperion.measure.clock.dtypes import FORMATS
from hyperion.measure.clock.timing import Timing, time_interleaved
from hyperion.measure.clock.verify import Verification
from hyperion.measure.products.dispatch import Call, dispatched
from hyperion.measure.products.product_formulas import products_of
from hyperion.measure.steps.compilation import measure_first_calls
from hyperion.results import Estimate, estimates_of_medians

_WIDTH = 16
_SEQUENCES, _IMAGES = (2, 16, _WIDTH), (2, _WIDTH, 2, _WIDTH)  # of one batch; images have their channels first
# A compiler fuses by shape, so that the blocks it gets are like those of a model: two heads of 64, an MLP four times as wide,
# and above all many rows. Each sum over rows, of which a backward pass has one for every bias and for every weight and bias
# of a norm, is one kernel for up to 32 rows and two beyond (`Reduction.num_splits` of PyTorch 2.13's Inductor). Counted in
# what it schedules for a GPU of 132 units, a layer of 32 rows has 17 kernels forward and 26 backward, that of 512 rows 17 and
# 34, 128 wide as well as 512 wide.
_COMPILED_WIDTH, _COMPILED_HEADS = 128, 2
_COMPILED_SEQUENCES = (32, 16, _COMPILED_WIDTH)
_IN_A_ROW = 3  # steps behind one sample
_FEW_LAYERS, _MANY_LAYERS = 1, 3
_FEW_CONVOLUTIONS, _MANY_CONVOLUTIONS = 2, 6
_FEW_BLOCKS, _MANY_BLOCKS = 2, 6
_PARITY_STEPS = 200
# 16-bit kernels round elsewhere. Trainings of these layers with other rounding scatter by 7e-4 on an H200 (standard deviation
# of 8, bf16), so a false alarm is rarer than 1 in 1,000,000.
_PARITY_TOLERANCE = 0.05


@dataclass(frozen=True)
class TinyTiming:
    """A timed step of tiny tensors, and what it dispatches that moves memory; views ride along.

    Args:
        parts: layers, or convolutions with batch norm and activation.
        plain, convolutions: operators that are none of `is_convolution`'s, and those that are.
        timing: of the whole step, by the host's clock, steps in a row.
    """

    parts: int
    plain: int
    convolutions: int
    timing: Timing


@dataclass(frozen=True)
class OperatorCost:
    """Four timed steps of tiny tensors, done in turn: of few and of many transformer layers, and of convolutions.

    Args:
        layers, convolving: (few, many).
        verification: all four lowered their loss.
    """

    layers: tuple[TinyTiming, TinyTiming]
    convolving: tuple[TinyTiming, TinyTiming]
    verification: Verification

    @property
    def operators(self) -> int:
        """Of the layers that the longer step has more."""
        few, many = self.layers
        return many.plain - few.plain

    @property
    def beside(self) -> int:
        """Operators that are no convolution of the parts that the longer step of convolutions has more."""
        few, many = self.convolving
        return many.plain - few.plain

    @property
    def convolutions(self) -> int:
        """Convolutions and batch norms of these parts."""
        few, many = self.convolving
        return many.convolutions - few.convolutions

    @property
    def time_s(self) -> Estimate:
        """Host seconds for each operator that moves memory and is no convolution."""
        return self._estimates()[0]

    @property
    def convolution_time_s(self) -> Estimate:
        """Host seconds for each convolution or batch norm: what more of them take beyond the operators beside them."""
        return self._estimates()[1]

    @property
    def once_s(self) -> Estimate:
        """Host seconds that a step takes beyond all its operators; below zero where that is less than the noise."""
        return self._estimates()[2]

    def _estimates(self) -> list[Estimate]:
        def costs(medians) -> list[float]:
            few, many, few_convolving, many_convolving = medians
            operator = (many - few) / self.operators
            convolution = (many_convolving - few_convolving - self.beside * operator) / self.convolutions
            return [operator, convolution, few - self.layers[0].plain * operator]

        return estimates_of_medians([step.timing.samples_s for step in (*self.layers, *self.convolving)], costs)


@dataclass(frozen=True)
class BlockCost:
    """Timed steps with a few and with many compiled blocks, done in turn. Each block is a small transformer layer.

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
    """Time eager training steps, forward, backward and update, of networks whose tensors are tiny.

    Args:
        time_limit_s: of sampling all four; warming each up takes at most half as long.
    """
    layers, convolving = (_FEW_LAYERS, _MANY_LAYERS), (_FEW_CONVOLUTIONS, _MANY_CONVOLUTIONS)
    steps = [_TinyStep(device, _layers(count), _SEQUENCES) for count in layers]
    steps += [_TinyStep(device, _convolutions(count), _IMAGES) for count in convolving]
    for step in steps:
        step()  # makes the optimizer's state, which no later step makes again
    calls = [[call for call in dispatched(step) if call.moves] for step in steps]
    apart = [sum(map(is_convolution, some)) for some in calls]
    timings = _timed(steps, device, time_limit_s)
    found = [
        TinyTiming(parts, len(some) - convolutions, convolutions, timing)
        for parts, some, convolutions, timing in zip((*layers, *convolving), calls, apart, timings, strict=True)
    ]
    learned = Verification("last loss / first loss", max(float(s.losses[-1] / s.losses[0]) for s in steps), 1.0)
    return OperatorCost((found[0], found[1]), (found[2], found[3]), learned)


def measure_block_cost(device: Device, dtype: str = "fp32", *, time_limit_s: float = 2.0) -> BlockCost:
    """Compile small transformer layers, each by itself, and time training steps with a few and with many of them.

    Args:
        dtype: fp32, or what autocast takes: bf16, fp16.
        time_limit_s: as in `measure_operator_cost`; the compilation, with cold caches, comes on top.

    Raises:
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    eager = [_block_step(device, count, dtype) for count in (1, _FEW_BLOCKS)]
    one, two = (sum(products_of(call) is not None for call in dispatched(step)) for step in eager)
    steps = [_block_step(device, count, dtype, compiled=True) for count in (_FEW_BLOCKS, _MANY_BLOCKS)]
    compile_time_s = measure_first_calls(lambda: [step() for step in steps], device)
    beside = abs(steps[0].mean_loss(_PARITY_STEPS) / eager[1].mean_loss(_PARITY_STEPS) - 1)
    parity = Verification(f"loss beside eager, mean of {_PARITY_STEPS} steps", beside, _PARITY_TOLERANCE)
    few, many = _timed(steps, device, time_limit_s)
    torch._dynamo.reset()  # what was compiled refers to the networks
    kernels = 2 * (two - one) // (_FEW_BLOCKS - 1)
    return BlockCost(kernels, _MANY_BLOCKS - _FEW_BLOCKS, few, many, compile_time_s, parity)


def _timed(steps: list, device: Device, time_limit_s: float) -> list[Timing]:
    return time_interleaved(steps, device, cold=False, back_to_back=_IN_A_ROW, time_limit_s=time_limit_s)


def _block_step(device: Device, count: int, dtype: str, compiled: bool = False) -> "_TinyStep":
    parts = _layers(count, _COMPILED_WIDTH, _COMPILED_HEADS, 4 * _COMPILED_WIDTH)
    return _TinyStep(device, parts, _COMPILED_SEQUENCES, dtype, compiled)


def _layers(count: int, width: int = _WIDTH, heads: int = 2, hidden: int = _WIDTH) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True) for _ in range(count)]


def _convolutions(count: int) -> Callable[[], list[nn.Module]]:
    def part() -> nn.Module:
        # No bias before a batch norm, as in any network of these: a library adds one, and sums up its gradient, in kernels
        # of their own.
        convolution = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(_WIDTH), nn.ReLU())

    return lambda: [part() for _ in range(count)]


class _TinyStep:
    """A training step of a network of small tensors on one batch, the same weights and batch each time one is made.

    Args:
        parts: makes the network's parts. Before them stands a linear layer: as in a model, their input has a gradient.
        shape: of the batch.
        compiled: each part by itself, forward and backward.

    Attributes:
        losses: of every step, scalars on the device.
    """

    def __init__(
        self,
        device: Device,
        parts: Callable[[], list[nn.Module]],
        shape: tuple[int, ...],
        dtype: str = "fp32",
        compiled: bool = False,
    ):
        # Drawn on the host: its random numbers alone go on as if nothing had been drawn here.
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)
            blocks, inputs = parts(), torch.randn(shape)
            self._network = nn.Sequential(nn.Linear(shape[-1], shape[-1]), *blocks).to(device.torch_device)
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
