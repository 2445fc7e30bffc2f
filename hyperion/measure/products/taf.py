"""Capture the matrix products of a model, and measure TAF: the rate that a device reaches on these products.

TAF lies below the peak and below MAF, the best rate of any product. It is the FLOP-weighted harmonic mean of the rates, which is
the mean that preserves the total time.

Source of the terms: AMD, Measuring max-achievable FLOPS, ROCm blogs, 2025 and 2026.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import hypot

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.timing import Timing, time_function
from hyperion.measure.clock.verify import FORMATS, Verification, matmul_precision, verify_product
from hyperion.measure.products.dispatch import Call, Product, dispatched, products_of
from hyperion.measure.products.gemm import Gemm, RefusedProduct, blas_backend, made_up
from hyperion.results import Estimate

# Operators that multiply matrices, by name. `upsample_bilinear2d` matches too, but only interpolates.
_MULTIPLIES = re.compile(
    r"^(?!upsample).*(mm|mv|dot|matmul|linear|linalg|conv|convolution|attention|einsum|lstm|gru|rnn|transformer)"
    r"(?![a-z])|conv\d"
)


@dataclass(frozen=True)
class CapturedGemms:
    """The products of one call.

    Args:
        counts: number of times of each product, in the order of the first.
        others: number of calls, by name, of the other operators that move memory.
    """

    counts: dict[Product, int]
    others: dict[str, int]

    @property
    def flops(self) -> int:
        """FLOPs of all products; a multiply-add counts as 2."""
        return sum(product.flops * count for product, count in self.counts.items())

    @property
    def without_formula(self) -> dict[str, int]:
        """The operators of `others` that multiply matrices, judged by name; their FLOPs are missing in `flops`."""
        return {name: count for name, count in self.others.items() if _MULTIPLIES.search(name)}

    def by_flops(self) -> list[tuple[Product, int]]:
        """Return (product, count), sorted by total FLOPs in descending order."""
        return sorted(self.counts.items(), key=lambda item: -item[0].flops * item[1])

    def __str__(self) -> str:
        lines = [f"{self.flops / 1e9:.4g} GFLOP in {sum(self.counts.values())} products of {len(self.counts)} kinds"]
        lines += [f"{100 * p.flops * n / self.flops:5.1f} %  {n} x {p}" for p, n in self.by_flops()]
        if self.without_formula:
            lines.append(f"without a formula, not counted: {', '.join(self.without_formula)}")
        return "\n".join(lines)


def capture_gemms(function: Callable[[], object]) -> CapturedGemms:
    """Call a function once and return the matrix products that it dispatches, including those of a backward pass.

    Args:
        function: a forward pass or a training step. Within `shapes_only` it computes nothing.
    """
    return gemms_of(dispatched(function))


def gemms_of(calls: list[Call]) -> CapturedGemms:
    """Return the products of the operators recorded by `dispatched`."""
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
    """The FLOP-weighted rate of a model's products.

    Args:
        tflops: rate of the products with a known rate, in 10¹² FLOP/s, if each runs alone.
        coverage: share of these products in the model's FLOPs, 0 to 1.
        rates: rate of each of these products in 10¹² FLOP/s.
        shares: share of each of these products in the model's FLOPs; the shares add up to `coverage`.
        left_out: the other products with the reason.
    """

    tflops: Estimate
    coverage: float
    rates: dict[Product, Estimate]
    shares: dict[Product, float]
    left_out: dict[Product, str]

    def __str__(self) -> str:
        return f"TAF {self.tflops} TFLOPS over {100 * self.coverage:.1f} % of the FLOPs, {len(self.rates)} products timed"


def taf(captured: CapturedGemms, rate: Callable[[Product], Estimate | None] | Mapping[Product, Estimate]) -> Taf:
    """Return the total FLOPs / the sum of times (count x FLOPs / rate) of the products whose rate is known.

    The interval treats the errors of the products as independent and adds them in quadrature.

    Args:
        captured: products of a model.
        rate: 10¹² FLOP/s by product; None if unknown.

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
    slower = hypot(*(work[p] / rates[p].ci_low - work[p] / rates[p].value for p in rates))
    faster = hypot(*(work[p] / rates[p].value - work[p] / rates[p].ci_high for p in rates))
    tflops = Estimate(
        total / seconds, total / (seconds + slower), total / (seconds - faster), min(estimate.n for estimate in rates.values())
    )
    left_out = {product: "no rate" for product in captured.counts if product not in rates}
    covered = {product: product.flops * captured.counts[product] for product in rates}
    shares = {product: flops / captured.flops for product, flops in covered.items()}
    return Taf(tflops, sum(covered.values()) / captured.flops, rates, shares, left_out)


@dataclass(frozen=True)
class TimedProduct:
    """A captured product, timed with flushed caches and verified.

    Args:
        tflops: rate in 10¹² FLOP/s, from `timing`.
        backend: the BLAS library that PyTorch prefers for it.
    """

    tflops: Estimate
    timing: Timing
    verification: Verification
    backend: str


def measure_taf(captured: CapturedGemms, device: Device, time_limit_s: float = 30.0) -> Taf:
    """Measure the TAF of the products that can be timed within the time limit; see `measure_products`.

    Raises:
        HyperionError: no product could be timed, or the output of a product is wrong.
    """
    measured = measure_products(captured, device, time_limit_s)
    rates = {product: result.tflops for product, result in measured.items() if isinstance(result, TimedProduct)}
    reasons = {product: result for product, result in measured.items() if isinstance(result, str)}
    if not rates:
        raise HyperionError(
            f"no product could be timed: {'; '.join(dict.fromkeys(reasons.values())) or 'the call has none'}",
            where=f"measure_taf on {device.name}",
            next_step="capture a call that multiplies matrices in a dtype that the device supports",
        )
    return replace(taf(captured, rates), left_out=reasons)


def measure_products(captured: CapturedGemms, device: Device, time_limit_s: float = 30.0) -> dict[Product, TimedProduct | str]:
    """Time the captured products with flushed caches and verify each, in descending order of total FLOPs.

    The memory layout is ignored: the second operand is always a transposed weight. A convolution is timed as its product with
    unfolded patches, attention as its batched products.

    Args:
        time_limit_s: seconds after which no further product is started.

    Returns:
        The timing of each product, or why it was not timed.

    Raises:
        HyperionError: the output of a product is wrong.
    """
    measured: dict[tuple, TimedProduct | str] = {_key(p): _refusal(p, device) for p in captured.counts}
    waiting = [product for product, _ in captured.by_flops() if not measured[_key(product)]]
    deadline, begun = time.monotonic() + time_limit_s, False
    for place, product in enumerate(waiting):
        left_s = deadline - time.monotonic()
        if measured[_key(product)]:
            continue  # a product of the same size was timed
        if begun and left_s <= 0:
            measured[_key(product)] = f"the {time_limit_s:g} s were over"
            continue
        share_s = max(_LEAST_TIME_S, left_s / (len(waiting) - place))
        measured[_key(product)], begun = _timed(product, device, share_s), True
    return {product: measured[_key(product)] for product in captured.counts}


def _key(product: Product) -> tuple:
    return product.batch, product.m, product.n, product.k, product.dtype


def _refusal(product: Product, device: Device) -> str:
    """Return why the product cannot be timed on the device, or ""."""
    if product.dtype not in FORMATS or product.batch > 1 and FORMATS[product.dtype].scaled:
        return f"{product.dtype} has no {'batched ' * (product.batch > 1)}product to time"
    supported, how = device.supports(product.dtype)
    return "" if supported else f"unsupported: {how}"


def _timed(product: Product, device: Device, time_limit_s: float) -> TimedProduct | str:
    """Return the timing of a product, or why it was not timed."""
    size = product.m, product.n, product.k, product.dtype, device
    try:
        subject = Gemm(*size) if product.batch == 1 else BatchedGemm(product.batch, *size)
        timing, verification = subject.measure(time_limit_s=time_limit_s)
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).splitlines()[0]}"
    except RefusedProduct as error:
        return f"refused: {error.what}"
    if not verification.passed:
        raise HyperionError(
            f"the output of {product} is wrong: error {verification.error:.2g}, tolerance {verification.tolerance:.2g}",
            where=f"measure_products on {device.name}",
            next_step="run hyperion doctor, and do not use this device until it passes",
        )
    rate = timing.estimate.map(lambda seconds: product.flops / seconds / 1e12)
    return TimedProduct(rate, timing, verification, blas_backend(device, FORMATS[product.dtype]))


class BatchedGemm:
    """Products of one size in a single call: C[b,M,N] = A[b,M,K]·B[b,K,N], with operands as in `Gemm`.

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
        """Time the products, then verify the first, middle and last output of the batch."""
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
