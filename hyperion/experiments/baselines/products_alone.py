"""Time the matrix products of a training step without the rest of the step: each alone, or all one after the other.

The operands have the same dimensions as in the step. Convolutions and attention count as matrix products. The fastest matrix
product of any shape shows the peak rate of the arithmetic units. The matrix products of a step show the rate that the units reach
at this model's shapes and memory layouts. Even a step that computes nothing else takes the sum of their times, which no training
loop can reduce.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import mul

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.chapter.rows import sample_frame
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.errors import not_none
from hyperion.hardware import Device
from hyperion.kernels.token_loss import padded_classes
from hyperion.measure import FORMATS, Timing, time_function
from hyperion.models import TransformerConfig
from hyperion.models.resnet import IMAGE_SIZE, block_shapes
from hyperion.parallel import convolution_memory_format
from hyperion.results.statistics import Estimate, estimates_of_medians
from hyperion.training import Precision
from hyperion.workloads.workloads import ImageSizes, Workload

Call = Callable[[], object]


@dataclass(frozen=True)
class ProductAlone:
    """One matrix product of a step.

    Attributes:
        part: part of the step to which the product's time is added, for example "attention".
        name: label with the dimensions of the product, and whether it computes the output of the forward pass, the gradient of
            the input, or the gradient of the weight.
        count: number of times that a step computes the product.
        make: function that allocates the operands and returns the function to time.
    """

    part: str
    name: str
    count: int
    make: Callable[[torch.dtype, torch.device], Call]


@dataclass(frozen=True)
class ProductsAlone:
    """All matrix products of a step with their timings. Each product was timed alone, without the rest of the step.

    Attributes:
        products: the matrix products.
        timings: timing of each product, in the order of `products`.
    """

    products: list[ProductAlone]
    timings: list[Timing]

    @property
    def seconds(self) -> dict[str, float]:
        """A dict that maps each part of the step to the total time of its matrix products in seconds."""
        seconds = dict[str, float]()
        for product, timing in zip(self.products, self.timings, strict=True):
            seconds[product.part] = seconds.get(product.part, 0.0) + product.count * timing.estimate.value
        return seconds

    def share(self, step: Timing) -> Estimate:
        """Return the share of the step time that all products take together.

        Args:
            step: timing of the whole step.

        Returns:
            The share with a bootstrap interval. The products and the step were timed separately, so their samples are drawn
            independently. If a timing drifts, the interval is widened by the interval of this timing.
        """
        counts = [product.count for product in self.products]

        def shares(medians: np.ndarray) -> list[float]:
            # Sum of count x median time over all products, divided by the median time of the step, which is the last median.
            return [sum(map(mul, counts, medians[:-1])) / medians[-1]]

        (share,) = estimates_of_medians([timing.samples_s for timing in (*self.timings, step)], shares)
        # The products were timed one after the other, so their drifts may have the same cause. Therefore the widths are added.
        reaches = [(count / step.estimate.value, timing) for count, timing in zip(counts, self.timings, strict=True)]
        reaches.append((share.value / step.estimate.value, step))
        further = [(scale, timing.estimate) for scale, timing in reaches if timing.drift.present]
        reach = sum(scale * max(one.value - one.ci_low, one.ci_high - one.value) for scale, one in further)
        return Estimate(share.value, share.ci_low - reach, share.ci_high + reach, share.n)

    def frame(self, variant: str, dtype: str, params: dict) -> pd.DataFrame:
        """Return a table of the raw samples, one line per sample. The column `product` names the product."""
        frames = [
            sample_frame(timing, variant, dtype, params | {"product": product.name})
            for product, timing in zip(self.products, self.timings, strict=True)
        ]
        return pd.concat(frames, ignore_index=True).assign(kind="a product alone")


def language_products(config: TransformerConfig, batch: int, compiled: bool) -> list[ProductAlone]:
    """Return the matrix products of a training step of a TransformerLM.

    Linear layers and the head belong to the part "products", attention to the part "attention".

    Args:
        config: configuration of the model. Sequences have the length of its context.
        batch: number of sequences.
        compiled: whether to return the products of the compiled model. In this model, a single product computes query, key and
            value, and the columns of the head are padded for alignment.
    """
    # D: width of the model. M: rows of all products, batch x context. L: number of layers.
    D, M, L = config.width, batch * config.context, config.layers
    # Compiled code computes query, key and value with one product of D to 3 D instead of three products of D to D.
    projections = [(D, 3 * D, L)] if compiled else [(D, D, 3 * L)]
    classes = padded_classes(config.vocab_size) if compiled else config.vocab_size
    layers = [*projections, (D, D, L), (D, 4 * D, L), (4 * D, D, L), (D, classes, 1)]
    linear = [
        ProductAlone("products", f"{inputs} to {outputs}, {way}", count, partial(_linear, M, inputs, outputs, way))
        for inputs, outputs, count in layers
        for way in ("forward", "of input", "of weight")
    ]
    shape = batch, config.context, config.heads, config.head_width
    return linear + [
        ProductAlone("attention", f"attention, {way}", L, partial(_attention, shape, way)) for way in ("forward", "backward")
    ]


def image_products(width: int, batch: int) -> list[ProductAlone]:
    """Return the matrix products of a training step of a ResNet-18, with the parts "convolutions" and "classifier".

    The first convolution has no product for the gradient of its input, because images need no gradient.

    Args:
        width: number of channels of the first stage.
        batch: number of images.
    """
    side, sizes = IMAGE_SIZE, [(3, width, 3, 1, IMAGE_SIZE)]
    for channels_in, channels_out, stride in block_shapes(width):
        sizes.append((channels_in, channels_out, 3, stride, side))
        if stride != 1 or channels_in != channels_out:
            sizes.append((channels_in, channels_out, 1, stride, side))
        side = -(-side // stride)
        sizes.append((channels_out, channels_out, 3, 1, side))
    convolutions = [
        # Equal convolutions are timed once, and `count` is how often they occur.
        ProductAlone("convolutions", _named(*size, way), sizes.count(size), partial(_convolution, batch, *size, way))
        for size in dict.fromkeys(sizes)
        for way in ("forward", "of input", "of weight")
        if way != "of input" or size[0] != 3
    ]
    ways = ("forward", "of input", "of weight")
    return convolutions + [
        ProductAlone("classifier", f"classifier, {way}", 1, partial(_linear, batch, 8 * width, CLASS_COUNT, way)) for way in ways
    ]


def _named(channels_in: int, channels_out: int, kernel: int, stride: int, side: int, way: str) -> str:
    strided = f", stride {stride}" if stride != 1 else ""
    return f"{kernel}x{kernel} {channels_in} to {channels_out} at {side}x{side}{strided}, {way}"


def products_of(work: Workload, compiled: bool) -> list[ProductAlone]:
    """Return the matrix products of a step of the language model or of the ResNet-18."""
    if isinstance(work.sizes, ImageSizes):
        return image_products(work.sizes.width, work.items)
    config = not_none(work.config)
    return language_products(config, work.items // config.context, compiled)


def time_alone(products: list[ProductAlone], precision: Precision, device: Device, time_limit_s: float) -> ProductsAlone:
    """Time each matrix product alone, without flushing the caches between calls.

    This approximates the caches in a step: most operands are larger than any cache, and the preceding kernel has just written the
    operands of a small product.

    Args:
        products: the matrix products.
        precision: precision of the step. It decides, for example, whether TF32 is allowed.
        device: device on which the products run.
        time_limit_s: total timing budget in seconds for all products, without warm-up.
    """
    timings, storage = [], FORMATS[precision.dtype].storage
    for product in products:
        with precision.products():
            call = product.make(storage, torch.device(device.torch_device))
            timings.append(time_function(call, device, cold=False, time_limit_s=time_limit_s / len(products)))
        del call  # free the operands before the next product allocates its operands
    return ProductsAlone(products, timings)


def one_pass(products: list[ProductAlone], precision: Precision, device: Device) -> Call:
    """Return a function that computes only the matrix products of a step, layer by layer.

    Its calls should be timed in alternation with whole steps. A device at its power limit lowers its clock. If attention were
    timed alone, it would run at a higher clock than in the step, because it needs little power. Conversely, matrix products
    without other kernels between them may need more power than a step and run slightly slower than in the step.

    All layers share the same random operands. The function has been called once before it is returned.

    Args:
        precision: precision of the step. It decides, for example, whether TF32 is allowed.

    Raises:
        torch.OutOfMemoryError: the operands and results do not fit into the free memory.
    """
    storage = FORMATS[precision.dtype].storage
    with precision.products():
        calls = [(product.make(storage, torch.device(device.torch_device)), product.count) for product in products]
    # Layer by layer: a product with `count` calls is called in the first `count` layers.
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
        # Forward y = x W^T, gradient of the input dx = dy W, gradient of the weight dW = dy^T x.
        return lambda: x_MK @ weight_NK.T
    return (lambda: of_y_MN @ weight_NK) if way == "of input" else (lambda: of_y_MN.T @ x_MK)


def _attention(shape: tuple[int, int, int, int], way: str, dtype: torch.dtype, device: torch.device) -> Call:
    B, T, N, H = shape
    projected_BTE = torch.randn(B, T, 3 * N * H, dtype=dtype, device=device)
    # Query, key and value are views of one projection, as in the model, so that they have the same strides.
    heads = [part.unflatten(-1, (N, H)).transpose(1, 2).requires_grad_() for part in projected_BTE.chunk(3, -1)]
    q, k, v = heads
    if way == "forward":
        return torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    y_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
    layout = convolution_memory_format(channels_in, kernel, stride)
    x_BCYX, weight = (torch.randn(size, dtype=dtype, device=device).to(memory_format=layout) for size in sizes)
    padding = kernel // 2
    if way == "forward":
        return lambda: F.conv2d(x_BCYX, weight, stride=stride, padding=padding)
    of_y_BCYX = torch.randn_like(F.conv2d(x_BCYX, weight, stride=stride, padding=padding))
    output_mask = [way == "of input", way == "of weight", False]
    how = None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, output_mask
    return lambda: torch.ops.aten.convolution_backward(of_y_BCYX, x_BCYX, weight, *how)
