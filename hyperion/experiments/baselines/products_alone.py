"""The products of a training step at its own sizes, each timed alone or all together: what its arithmetic takes on this device.

The fastest product of any shape says what the arithmetic units can do. These say what they do for the shapes that this model
has, with operands that lie in memory as they do in the step. Whoever wants to get below their sum needs faster products, not a
better loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import mul

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.chapter.rows import sample_frame
from hyperion.hardware import Device
from hyperion.kernels.token_loss import padded_classes
from hyperion.measure import FORMATS, Timing, time_function
from hyperion.models import TransformerConfig
from hyperion.models.resnet import IMAGE_SIZE, block_shapes
from hyperion.results.statistics import Estimate, estimates_of_medians
from hyperion.training import Precision
from hyperion.workloads.workloads import CLASSES, Workload

Call = Callable[[], object]


@dataclass(frozen=True)
class ProductAlone:
    """One product of a step.

    Attributes:
        part: what its seconds are added to where each is timed alone.
        name: its sizes, and which of the three products it is.
        count: how often the step does it.
        make: allocates its operands; the call that is timed.
    """

    part: str
    name: str
    count: int
    make: Callable[[torch.dtype, torch.device], Call]


@dataclass(frozen=True)
class ProductsAlone:
    """All products of a step and how long each takes alone, in the same order."""

    products: list[ProductAlone]
    timings: list[Timing]

    @property
    def seconds(self) -> dict[str, float]:
        """Of each part, each product as often as the step does it."""
        seconds = dict[str, float]()
        for product, timing in zip(self.products, self.timings, strict=True):
            seconds[product.part] = seconds.get(product.part, 0.0) + product.count * timing.estimate.value
        return seconds

    def share(self, step: Timing) -> Estimate:
        """How much of a step's time they take. Each was timed by itself, so each is resampled by itself; where the times of a
        product or of the steps drift, the interval reaches as much further as theirs do."""
        counts = [product.count for product in self.products]

        def shares(medians) -> list[float]:
            return [sum(map(mul, counts, medians[:-1])) / medians[-1]]

        (share,) = estimates_of_medians([timing.samples_s for timing in (*self.timings, step)], shares)
        # A drift of products that were timed one after the other has one cause: the reaches of all add up.
        reaches = [(count / step.estimate.value, timing) for count, timing in zip(counts, self.timings, strict=True)]
        reaches.append((share.value / step.estimate.value, step))
        further = [(scale, timing.estimate) for scale, timing in reaches if timing.drift.present]
        reach = sum(scale * max(one.value - one.ci_low, one.ci_high - one.value) for scale, one in further)
        return Estimate(share.value, share.ci_low - reach, share.ci_high + reach, share.n)

    def frame(self, variant: str, dtype: str, params: dict) -> pd.DataFrame:
        """Raw samples, one a line, each product's under its name."""
        frames = [
            sample_frame(timing, variant, dtype, params | {"product": product.name})
            for product, timing in zip(self.products, self.timings, strict=True)
        ]
        return pd.concat(frames, ignore_index=True).assign(kind="a product alone")


def language_products(config: TransformerConfig, batch: int, compiled: bool) -> list[ProductAlone]:
    """Of a TransformerLM at its whole context: "products" of its layers and its head, and "attention".

    Args:
        compiled: query, key and value are one product, and the head has aligned columns.
    """
    D, M, L = config.width, batch * config.context, config.layers
    projections = [(D, 3 * D, L)] if compiled else [(D, D, 3 * L)]
    classes = padded_classes(config.vocab_size) if compiled else config.vocab_size
    layers = [*projections, (D, D, L), (D, 4 * D, L), (4 * D, D, L), (D, classes, 1)]
    found = [
        ProductAlone("products", f"{given} to {made}, {way}", count, partial(_linear, M, given, made, way))
        for given, made, count in layers
        for way in ("forward", "of input", "of weight")
    ]
    shape = batch, config.context, config.heads, config.head_width
    return found + [
        ProductAlone("attention", f"attention, {way}", L, partial(_attention, shape, way)) for way in ("forward", "backward")
    ]


def image_products(width: int, batch: int) -> list[ProductAlone]:
    """Of a ResNet-18: its "convolutions" and the classifier. No gradient of the images is made."""
    side, sizes = IMAGE_SIZE, [(3, width, 3, 1, IMAGE_SIZE)]
    for channels_in, channels_out, stride in block_shapes(width):
        sizes.append((channels_in, channels_out, 3, stride, side))
        if stride != 1 or channels_in != channels_out:
            sizes.append((channels_in, channels_out, 1, stride, side))
        side = -(-side // stride)
        sizes.append((channels_out, channels_out, 3, 1, side))
    found = [
        ProductAlone("convolutions", _named(*size, way), sizes.count(size), partial(_convolution, batch, *size, way))
        for size in dict.fromkeys(sizes)
        for way in ("forward", "of input", "of weight")
        if way != "of input" or size[0] != 3
    ]
    ways = ("forward", "of input", "of weight")
    return found + [
        ProductAlone("classifier", f"classifier, {way}", 1, partial(_linear, batch, 8 * width, CLASSES, way)) for way in ways
    ]


def _named(channels_in: int, channels_out: int, kernel: int, stride: int, side: int, way: str) -> str:
    strided = f", stride {stride}" if stride != 1 else ""
    return f"{kernel}x{kernel} {channels_in} to {channels_out} at {side}x{side}{strided}, {way}"


def products_of(work: Workload, compiled: bool) -> list[ProductAlone]:
    """Of either baseline."""
    if work.config is None:
        return image_products(work.sizes["width"], work.items)
    return language_products(work.config, work.items // work.config.context, compiled)


def time_alone(products: list[ProductAlone], precision: Precision, device: Device, time_limit_s: float) -> ProductsAlone:
    """Time each product by itself. Caches are left as the call before left them: most operands are larger than any, and in a
    step too the kernel before has just written what a small product reads.

    Args:
        precision: the step's, whose switches the products are made under.
        time_limit_s: of all together, warm-up left out.
    """
    timings, storage = [], FORMATS[precision.dtype].storage
    for product in products:
        with precision.products():
            call = product.make(storage, torch.device(device.torch_device))
            timings.append(time_function(call, device, cold=False, time_limit_s=time_limit_s / len(products)))
        del call  # the next one's operands need not fit beside it
    return ProductsAlone(products, timings)


def one_pass(products: list[ProductAlone], precision: Precision, device: Device) -> Call:
    """A function that does all products of a step, layer by layer, and nothing between them; it did so once.

    To be timed in turn with whole steps: at its power limit a device lowers its clock, and attention, which needs little power,
    finds a higher one when it is timed by itself. (Products with nothing between them may need more power than a step, and be
    a little slower than they are in one.) Layers share their operands, random numbers.

    Args:
        precision: the step's, whose switches the products are made under.

    Raises:
        torch.OutOfMemoryError: operands or results of all do not fit beside what lies in memory.
    """
    storage = FORMATS[precision.dtype].storage
    with precision.products():
        calls = [(product.make(storage, torch.device(device.torch_device)), product.count) for product in products]
    in_order = [call for layer in range(max(count for _, count in calls)) for call, count in calls if layer < count]

    def run() -> None:
        with precision.products():
            for call in in_order:
                call()

    run()
    return run


def _linear(rows: int, columns_in: int, columns_out: int, way: str, dtype: torch.dtype, device: torch.device) -> Call:
    x_MK, weight_NK, of_y_MN = (
        torch.randn(size, dtype=dtype, device=device)
        for size in ((rows, columns_in), (columns_out, columns_in), (rows, columns_out))
    )
    if way == "forward":
        return lambda: x_MK @ weight_NK.T
    return (lambda: of_y_MN @ weight_NK) if way == "of input" else (lambda: of_y_MN.T @ x_MK)


def _attention(shape: tuple[int, int, int, int], way: str, dtype: torch.dtype, device: torch.device) -> Call:
    B, T, N, H = shape
    projected_BTE = torch.randn(B, T, 3 * N * H, dtype=dtype, device=device)
    heads = [part.unflatten(-1, (N, H)).transpose(1, 2).requires_grad_() for part in projected_BTE.chunk(3, -1)]
    if way == "forward":
        return torch.no_grad()(lambda: F.scaled_dot_product_attention(*heads, is_causal=True))
    y_BNTH = F.scaled_dot_product_attention(*heads, is_causal=True)
    of_y_BNTH: Tensor = torch.randn_like(y_BNTH)
    return lambda: torch.autograd.grad(y_BNTH, heads, of_y_BNTH, retain_graph=True)


def _convolution(
    batch: int,
    channels_in: int,
    channels_out: int,
    kernel: int,
    stride: int,
    side: int,
    way: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Call:
    sizes = (batch, channels_in, side, side), (channels_out, channels_in, kernel, kernel)
    x_BCYX, weight = (torch.randn(size, dtype=dtype, device=device).to(memory_format=torch.channels_last) for size in sizes)
    padding = kernel // 2
    if way == "forward":
        return lambda: F.conv2d(x_BCYX, weight, stride=stride, padding=padding)
    of_y_BCYX = torch.randn_like(F.conv2d(x_BCYX, weight, stride=stride, padding=padding))
    wanted = [way == "of input", way == "of weight", False]
    how = None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, wanted
    return lambda: torch.ops.aten.convolution_backward(of_y_BCYX, x_BCYX, weight, *how)
