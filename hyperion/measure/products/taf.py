"""Capture the matrix products (GEMMs) of a model, and measure the mean rate that a device reaches on them.

The mean rate, called TAF, is the sum of the FLOPs of all products divided by the sum of their times. So it is the harmonic mean
of the rates of the individual products, weighted by their FLOPs. TAF is lower than the peak of the device, and lower than the
highest rate of any matrix product (MAF). In this module, "product" always means a matrix product.

Source of the terms: AMD, Measuring max-achievable FLOPS, ROCm blogs, 2025 and 2026.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import hypot

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import FORMATS, Verification, matmul_precision, verify_product
from hyperion.measure.products.dispatch import Call, Product, products_of
from hyperion.measure.products.gemm import Gemm, RefusedProduct, blas_backend, made_up
from hyperion.results import Estimate
from hyperion.results.rows import OUT_OF_MEMORY

# Names of operators that multiply matrices. `upsample_bilinear2d` is excluded, because it contains "linear" but interpolates.
_MULTIPLIES = re.compile(
    r"^(?!upsample).*(mm|mv|dot|matmul|linear|linalg|conv|convolution|attention|einsum|lstm|gru|rnn|transformer)"
    r"(?![a-z])|conv\d"
)


@dataclass(frozen=True)
class CapturedGemms:
    """The matrix products of one call of a function.

    Args:
        counts: a dict that maps each product to the number of times that it is computed, in the order of first occurrence.
        others: a dict that maps the name of each other operator that reads or writes memory to its number of calls.
    """

    counts: dict[Product, int]
    others: dict[str, int]

    @property
    def flops(self) -> int:
        """Sum of the FLOPs of all products. A multiply-add counts as 2."""
        return sum(product.flops * count for product, count in self.counts.items())

    @property
    def without_formula(self) -> dict[str, int]:
        """The entries of `others` whose names indicate a matrix product. Their FLOPs are missing from `flops`."""
        return {name: count for name, count in self.others.items() if _MULTIPLIES.search(name)}

    def by_flops(self) -> list[tuple[Product, int]]:
        """Return pairs of product and count, sorted by total FLOPs in descending order."""
        return sorted(self.counts.items(), key=lambda item: -item[0].flops * item[1])

    def __str__(self) -> str:
        lines = [f"{self.flops / 1e9:.4g} GFLOP in {sum(self.counts.values())} products of {len(self.counts)} kinds"]
        lines += [f"{100 * p.flops * n / self.flops:5.1f} %  {n} x {p}" for p, n in self.by_flops()]
        if self.without_formula:
            lines.append(f"without a formula, not counted: {', '.join(self.without_formula)}")
        return "\n".join(lines)


def gemms_of(calls: list[Call]) -> CapturedGemms:
    """Return the matrix products of operators that `dispatched` has recorded.

    Args:
        calls: the operators of a forward pass or of a training step, with the products of its backward pass.
    """
    counts: Counter[Product] = Counter()
    others: Counter[str] = Counter()
    for call in calls:
        products = products_of(call)
        if products is not None:
            counts.update(products)
        elif call.moves:
            others[call.name] += 1
    return CapturedGemms(dict(counts), dict(others))


_LEAST_TIME_S = 0.05


@dataclass(frozen=True)
class Taf:
    """The mean rate of the matrix products of a model, weighted by FLOPs.

    Args:
        tflops: mean rate of all products whose rate is known, in 10¹² FLOP/s. It assumes that products do not overlap.
        coverage: FLOPs of the products whose rate is known, divided by the FLOPs of all products, 0 to 1.
        rates: a dict that maps a product to its rate in 10¹² FLOP/s. Products whose rate is unknown are omitted.
        shares: for the same products, the FLOPs of the product divided by the FLOPs of all products. The shares add up to
            `coverage`.
    """

    tflops: Estimate
    coverage: float
    rates: dict[Product, Estimate]
    shares: dict[Product, float]

    def __str__(self) -> str:
        return f"TAF {self.tflops} TFLOPS over {100 * self.coverage:.1f} % of the FLOPs, {len(self.rates)} products timed"


def taf(captured: CapturedGemms, rate: Callable[[Product], Estimate | None] | Mapping[Product, Estimate]) -> Taf:
    """Return the mean rate of products from their individual rates.

    The mean rate is the sum of FLOPs divided by the sum of times. The time of a product is count x FLOPs / rate. Products without
    a known rate are omitted. For the interval, the errors of the products are assumed to be independent, so they are added in
    quadrature.

    Args:
        captured: products of a model.
        rate: mapping or function from a product to its rate in 10¹² FLOP/s. A function returns None if the rate is unknown.

    Raises:
        HyperionError: no product has a rate.
    """
    known = rate.get if isinstance(rate, Mapping) else rate
    rates = {product: estimate for product in captured.counts if (estimate := known(product)) is not None}
    if not rates:
        raise HyperionError(
            f"none of {len(captured.counts)} products has a rate", where="taf", next_step="time some of them, or allow more time"
        )
    work = {product: product.flops * captured.counts[product] / 1e12 for product in rates}
    total, seconds = sum(work.values()), sum(work[p] / rates[p].value for p in rates)
    # The lower end of a rate gives the upper end of a time. Independent errors of times add in quadrature.
    slower = hypot(*(work[p] / rates[p].ci_low - work[p] / rates[p].value for p in rates))
    faster = hypot(*(work[p] / rates[p].value - work[p] / rates[p].ci_high for p in rates))
    tflops = Estimate(
        total / seconds, total / (seconds + slower), total / (seconds - faster), min(estimate.n for estimate in rates.values())
    )
    covered = {product: product.flops * captured.counts[product] for product in rates}
    shares = {product: flops / captured.flops for product, flops in covered.items()}
    return Taf(tflops, sum(covered.values()) / captured.flops, rates, shares)


@dataclass(frozen=True)
class TimedProduct:
    """The timing of a captured product. The caches were flushed before each sample.

    Args:
        tflops: rate in 10¹² FLOP/s, computed from `timing`.
        timing: the samples in seconds.
        verification: check of the output.
        backend: name of the BLAS library that PyTorch prefers for this product.
    """

    tflops: Estimate
    timing: Timing
    verification: Verification
    backend: str


def measure_products(captured: CapturedGemms, device: Device, time_limit_s: float = 30.0) -> dict[Product, TimedProduct | str]:
    """Time the captured products with flushed caches, and verify their outputs.

    Products with more total FLOPs are timed first. The captured memory layout is ignored: the second operand always has the
    layout of a transposed weight. A convolution is timed as a product over unfolded patches, and attention as its batched
    products.

    Args:
        time_limit_s: limit in seconds. After this time, no further product is timed.

    Returns:
        For each product, its timing, or the reason why it was not timed.

    Raises:
        HyperionError: the output of a product is wrong.
    """
    measured: dict[tuple, TimedProduct | str] = {_key(p): _refusal(p, device) for p in captured.counts}
    waiting = [product for product, _ in captured.by_flops() if not measured[_key(product)]]
    deadline, begun = time.monotonic() + time_limit_s, False
    for place, product in enumerate(waiting):
        left_s = deadline - time.monotonic()
        if measured[_key(product)]:
            continue  # a product of the same size has been timed
        if begun and left_s <= 0:
            measured[_key(product)] = f"the {time_limit_s:g} s were over"
            continue
        # Divide the remaining time evenly, so that later products get the time that fast products did not use.
        share_s = max(_LEAST_TIME_S, left_s / (len(waiting) - place))
        measured[_key(product)], begun = _timed(product, device, share_s), True
    return {product: measured[_key(product)] for product in captured.counts}


def _key(product: Product) -> tuple:
    return product.batch, product.m, product.n, product.k, product.dtype


def _refusal(product: Product, device: Device) -> str:
    """Return the reason why the product cannot be timed on the device, or "" if it can be timed."""
    if product.dtype not in FORMATS or product.batch > 1 and FORMATS[product.dtype].scaled:
        return f"{product.dtype} has no {'batched ' * (product.batch > 1)}product to time"
    supported, how = device.supports(product.dtype)
    return "" if supported else f"unsupported: {how}"


def _timed(product: Product, device: Device, time_limit_s: float) -> TimedProduct | str:
    """Time a product. Return its timing, or the reason why it could not be timed."""
    size = product.m, product.n, product.k, product.dtype, device
    try:
        subject = Gemm(*size) if product.batch == 1 else BatchedGemm(product.batch, *size)
        timing, verification = subject.measure(time_limit_s=time_limit_s)
    except torch.OutOfMemoryError as error:
        return f"{OUT_OF_MEMORY}{str(error).splitlines()[0]}"
    except RefusedProduct as error:
        return f"refused: {error.what}"
    if not verification.passed:
        raise HyperionError(
            f"the output of {product} is wrong: error {verification.error:.2g}, tolerance {verification.tolerance:.2g}",
            where=f"measure_products on {device.name}",
            next_step="run hyperion doctor, and do not use this device until hyperion doctor reports no error",
        )
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    return TimedProduct(rate, timing, verification, blas_backend(device, FORMATS[product.dtype]))


class BatchedGemm:
    """A batch of matrix products of one size in a single call: C[b,M,N] = A[b,M,K]·B[b,K,N].

    The operands have the same memory layout as in `Gemm`.

    Args:
        batch: number of products in a call.
    """

    def __init__(self, batch: int, m: int, n: int, k: int, dtype: str, device: Device, seed: int = 0):
        self.format, self.device = FORMATS[dtype], device
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        a, b = (made_up("normal", (batch, *sides), self.format, device, generator) for sides in ((m, k), (n, k)))
        self.a_BMK, self.b_BKN = a.values, b.values.transpose(1, 2)
        self.c_BMN = torch.empty(batch, m, n, dtype=self.format.storage, device=device.torch_device)
        self.flops = 2 * batch * m * n * k

    def __call__(self) -> torch.Tensor:
        return torch.bmm(self.a_BMK, self.b_BKN, out=self.c_BMN)

    def measure(self, *, cold: bool = True, time_limit_s: float = 5.0) -> tuple[Timing, Verification]:
        """Time the call, then verify the first, the middle and the last output of the batch."""
        # An element that no call writes stays NaN.
        self.c_BMN.fill_(float("nan"))
        with matmul_precision(self.format):
            timing = time_function(self, self.device, cold=cold, time_limit_s=time_limit_s)
        last = len(self.c_BMN) - 1
        checks = [
            verify_product(self.a_BMK[b], self.b_BKN[b], self.c_BMN[b], self.format.gemm_tolerance)
            for b in sorted({0, last // 2, last})
        ]
        unwritten = bool(torch.isnan(self.c_BMN).any())
        worst = max(checks, key=lambda check: check.error)
        return timing, Verification(worst.name, float("nan") if unwritten else worst.error, worst.tolerance)
