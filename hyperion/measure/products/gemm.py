"""Matrix products (GEMMs): create operands in a number format, time the product, verify it, and name the BLAS library.

In this module, "product" always means a matrix product.

The speed of a product depends on the values of its operands. If the bits of the values repeat, fewer transistors switch, the
device draws less power, and it throttles less. Source: Bhalachandra et al., Understanding the Impact of Input Entropy on FPU,
CPU, and GPU Power, 2022. For example, AMD tests its devices with two kinds of data and requires a different rate for each. For
the same shape, the two required rates differ by a factor of 1.05 to 1.46. Source: ROCm Validation Suite,
rvs/conf/MI3*/gst_single.conf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import mm_flop

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, HarnessError, Timing, compare_with_plain_loop, time_function
from hyperion.measure.clock.verify import NumberFormat, Verification, format_of, matmul_precision, poison, verify_product

_torch: Any = torch  # torch's type stubs lack torch._int_mm and torch._scaled_mm, which are not public
_SAMPLED = 4096
# Smallest `distinct_share` of data that counts as not constant. It is small because 4096 samples of the 8-bit activations of real
# layers contain only dozens of distinct values.
_LEAST_DISTINCT = 0.005

DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda shape, generator, **options: torch.zeros(shape, **options),
    "constant": lambda shape, generator, **options: torch.ones(shape, **options),
    "uniform": lambda shape, generator, **options: torch.rand(shape, generator=generator, **options).mul_(2).sub_(1),
    "normal": lambda shape, generator, **options: torch.randn(shape, generator=generator, **options),
}
# Distributions whose elements all have the same value.
SAME_EVERYWHERE = ("zeros", "constant")
# Default name of the data if the caller passes the operands.
ACTIVATIONS = "activations"


class RefusedProduct(HyperionError):
    """Raised when the BLAS library does not support a product. The message contains the error message of the library."""


@dataclass(frozen=True)
class Operand:
    """A matrix in a number format. It represents `values * scale`.

    Args:
        values: stored values, shape [rows, columns], in the storage dtype of the format.
        scale: float32 scalar.
    """

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def transposed(self) -> "Operand":
        """The transposed matrix as a view."""
        return Operand(self.values.T, self.scale)


class Gemm:
    """One matrix product on a device, with its operands. B has the memory layout of the transposed weight of a Linear layer.

    The dtype determines which PyTorch function multiplies the operands:

    - fp8: `torch._scaled_mm`. The output is bf16. Sums are accumulated in float32, without `use_fast_accum`.
    - int8: `torch._int_mm`. The output is int32.
    - all other formats: `torch.mm`.

    If the device has no units for a format, PyTorch may convert the operands. Use `device.supports(dtype)` to find out whether
    the device has such units.

    Args:
        m, n, k: sizes of C[M,N] = A[M,K]·B[K,N].
        dtype: a key of `FORMATS`, or 'fp8' for the fp8 format of the device.
        data: distribution of the operands: zeros, constant, uniform or normal; see `DISTRIBUTIONS`.

    Attributes:
        flops: number of FLOPs, 2·M·N·K.
        traffic_bytes: minimum memory traffic in bytes: both operands are read once, and the output is written once.
        function: name of the PyTorch function: torch.mm, torch._scaled_mm or torch._int_mm.
        backend: name of the BLAS library. If PyTorch does not report it, the name of the library that PyTorch prefers.
    """

    def __init__(self, m: int, n: int, k: int, dtype: str, device: Device, seed: int = 0, data: str = "normal"):
        chosen = format_of(dtype, device)
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        # B is created as [N, K] and used transposed, as a Linear layer uses its weight. fp8 products need a column-major B.
        a, b = (made_up(data, shape, chosen, device, generator) for shape in ((m, k), (n, k)))
        self._hold(a, b.transposed, _output(m, n, chosen, device), chosen, device, data)

    @classmethod
    def of(cls, a_MK: torch.Tensor, b_KN: torch.Tensor, dtype: str, device: Device, data: str = ACTIVATIONS) -> "Gemm":
        """Return the product of given matrices, for example the input of a layer and its transposed weight.

        The matrices are copied and rounded to the format.

        Args:
            a_MK, b_KN: floating-point matrices on any device.
            dtype: a key of `FORMATS`, or 'fp8' for the fp8 format of the device.
            data: name of the data in result rows.

        Raises:
            HyperionError: the matrices cannot be multiplied because of their shapes, or a value is not finite.
        """
        if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
            raise HyperionError(
                f"A {list(a_MK.shape)} and B {list(b_KN.shape)} cannot be multiplied.",
                where="Gemm.of",
                next_step="Pass A as [M, K] and B as [K, N]; flatten batched activations to rows first.",
            )
        if not (torch.isfinite(a_MK).all() and torch.isfinite(b_KN).all()):
            raise HyperionError("An operand contains NaN or infinity.", where="Gemm.of", next_step="Pass finite values.")
        chosen = format_of(dtype, device)
        a, b = (stored(x.detach().to(device.torch_device, copy=True).contiguous(), chosen) for x in (a_MK, b_KN.T))
        c_MN = _output(len(a_MK), b_KN.shape[1], chosen, device)
        return cls.holding(a, b.transposed, c_MN, chosen, device, data)

    @classmethod
    def holding(cls, a: Operand, b: Operand, c_MN: torch.Tensor, chosen: NumberFormat, device: Device, data: str) -> "Gemm":
        """Return a product that reads given operands and writes into a given output. Nothing is allocated or copied.

        Args:
            a: left operand A[M,K].
            b: right operand B[K,N], column-major.
            c_MN: output tensor.
            chosen: number format of the operands.
            data: name of the data in result rows.
        """
        product = cls.__new__(cls)
        product._hold(a, b, c_MN, chosen, device, data)
        return product

    def _hold(self, a: Operand, b: Operand, c_MN: torch.Tensor, chosen: NumberFormat, device: Device, data: str) -> None:
        self.format, self.device, self.data = chosen, device, data
        self.a_MK, self.b_KN, self.c_MN = a.values, b.values, c_MN
        self._a, self._b = a, b
        (self.m, self.k), self.n = a.values.shape, b.values.shape[1]
        self.flops = 2 * self.m * self.n * self.k
        self.traffic_bytes = (self.m + self.n) * self.k * chosen.bytes + self.m * self.n * chosen.output.itemsize
        self.backend = blas_backend(device, chosen)
        if chosen.storage == torch.int8:
            self.function, self._multiply = "torch._int_mm", partial(_torch._int_mm, a.values, b.values, out=c_MN)
        elif chosen.scaled:
            inputs = a.values, b.values, a.scale, b.scale
            self.function = "torch._scaled_mm"
            self._multiply = partial(_torch._scaled_mm, *inputs, out_dtype=chosen.output, out=c_MN)
        else:
            self.function, self._multiply = "torch.mm", partial(torch.mm, a.values, b.values, out=c_MN)

    def __call__(self) -> torch.Tensor:
        """Multiply once and return the output C[M,N]."""
        return self._multiply()

    def plain_call(self) -> Callable[[], torch.Tensor]:
        """Return a function that computes the same product with a plain PyTorch call. Each call allocates its output."""
        a, b = self.a_MK, self.b_KN
        if self.format.storage == torch.int8:
            return lambda: _torch._int_mm(a, b)
        if self.format.scaled:
            scales, output = (self._a.scale, self._b.scale), self.format.output
            return lambda: _torch._scaled_mm(a, b, *scales, out_dtype=output)
        return lambda: torch.mm(a, b)

    @property
    def distinct_share(self) -> float:
        """The share of distinct values (0 to 1) of the operand that has fewer; see the function `distinct_share`."""
        return min(distinct_share(self.a_MK), distinct_share(self.b_KN))

    def verify_data(self) -> Verification:
        """Check that the operands have the distribution that `data` names."""
        return verify_data(self.data, self.a_MK, self.b_KN)

    def verify(self) -> Verification:
        """Fill the output with an invalid value, multiply once, and check a part of the output.

        Raises:
            RefusedProduct: the library does not support this product.
        """
        poison(self.c_MN)
        with matmul_precision(self.format):
            self.first_call()
        return self._verified()

    def measure(
        self, *, cold: bool = True, minimum_samples: int = MINIMUM_SAMPLES, minimum_span_s: float = 0.0, time_limit_s: float = 5.0
    ) -> tuple[Timing, Verification]:
        """Time the product, then verify the output of the timed calls.

        Args:
            cold: if True, flush the caches before each sample.
            minimum_samples, minimum_span_s, time_limit_s: see `time_interleaved`.

        Raises:
            RefusedProduct: the library does not support this product.
            HarnessError: the operands do not have the distribution that `data` names, or `flops` is wrong.
        """
        with matmul_precision(self.format):
            self.first_call()
            poison(self.c_MN)
            timing = time_function(
                self,
                self.device,
                cold=cold,
                minimum_samples=minimum_samples,
                minimum_span_s=minimum_span_s,
                time_limit_s=time_limit_s,
            )
        return timing, self._verified()

    def first_call(self) -> None:
        """Multiply for the first time. The first call loads or tunes a kernel, so it is not timed.

        Raises:
            RefusedProduct: the library does not support this product.
        """
        try:
            self()
        except RuntimeError as error:
            # If the device ran out of memory or failed, this does not mean that the library does not support the product.
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            shape, words = f"{self.m}x{self.n}x{self.k} (MxNxK)", str(error).strip().split("\n")[0]
            raise RefusedProduct(
                f"{self.backend} refused a product of {shape} in {self.format.name}: {words}",
                where=self.device.name,
                next_step="Choose other sizes or another format. On a GPU, 8-bit formats need sizes that are multiples of 16.",
            ) from error

    def _verified(self) -> Verification:
        require_product_flops(self.flops, self.a_MK, self.b_KN)
        require_passed(self.verify_data())
        # The output of an int8 product is the integer sum over the stored values, without the scales.
        scaled = self.format.scaled and self.format.storage.is_floating_point
        scale = self._a.scale.item() * self._b.scale.item() if scaled else 1.0
        return verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance, scale=scale)

    def compare_with_plain_loop(self, calls: int = 10, rounds: int = MINIMUM_SAMPLES) -> tuple[Timing, Timing]:
        """Time the product with Hyperion's clock and with a plain loop; see the function `compare_with_plain_loop`."""
        with matmul_precision(self.format):
            return compare_with_plain_loop(self, self.device, calls, rounds)


def blas_backend(device: Device, number_format: NumberFormat) -> str:
    """Return the name of the BLAS library that multiplies matrices of this format on this device.

    If PyTorch does not report the library, the result names the library that PyTorch prefers, or all possible libraries.
    """
    if device.kind == "cpu":
        if number_format.bytes <= 2 and torch.backends.mkldnn.is_available():
            return "oneDNN" if number_format.name in ("fp16", "bf16", "int8") else "oneDNN or conversion to float32"
        return "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or built-in BLAS"
    tunable = ", TunableOp on" if torch.cuda.tunable.is_enabled() else ""
    if number_format.scaled:
        # torch._scaled_mm (with one scale per matrix) and torch._int_mm use only this library. TunableOp does not tune int8.
        library = {"cuda": "cuBLASLt", "rocm": "hipBLASLt"}[device.kind]
        return library + (tunable if number_format.storage.is_floating_point else "")
    if device.kind == "rocm" and number_format.name == "fp64":
        return f"rocBLAS{tunable}"  # PyTorch never calls hipBLASLt for float64
    preferred = str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1].lower()
    names = {"cuda": {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"}, "rocm": {"cublas": "rocBLAS", "cublaslt": "hipBLASLt"}}
    name = names[device.kind].get(preferred, f"{preferred} choice of PyTorch")
    return f"{name} preferred{tunable}"


def _output(m: int, n: int, number_format: NumberFormat, device: Device) -> torch.Tensor:
    return torch.empty(m, n, dtype=number_format.output, device=device.torch_device)


def made_up(
    data: str, shape: tuple[int, ...], number_format: NumberFormat, device: Device, generator: torch.Generator
) -> Operand:
    """Return a matrix of random or constant values from a named distribution.

    Args:
        data: "zeros", "constant" (all 1), "uniform" in [-1, 1), or "normal" (standard).
        generator: random generator of the device. None is allowed for "zeros" and "constant".

    Raises:
        HyperionError: there is no distribution with this name.
    """
    if data not in DISTRIBUTIONS:
        raise HyperionError(
            f"{data!r} is not a distribution of operands.",
            next_step=f"Use one of {', '.join(DISTRIBUTIONS)}; pass the activations of a real layer to Gemm.of(a_MK, b_KN, …).",
        )
    # float64 operands are generated in float64. In float32, the last 29 bits of each value would be 0.
    drawn = torch.float64 if number_format.storage == torch.float64 else torch.float32
    return stored(DISTRIBUTIONS[data](shape, generator, device=device.torch_device, dtype=drawn), number_format)


def stored(matrix: torch.Tensor, number_format: NumberFormat) -> Operand:
    """Round a floating-point matrix to a number format.

    For 8-bit formats, the matrix is first divided by a scale, as quantised layers do. The scale is max|x| divided by the largest
    value of the format.
    """
    one = torch.ones((), dtype=torch.float32, device=matrix.device)
    if not number_format.scaled:
        return Operand(matrix.to(number_format.storage), one)
    matrix = matrix.float()
    furthest = torch.maximum(-matrix.amin(), matrix.amax())
    scale = torch.where(furthest > 0, furthest / number_format.largest, one)
    scaled = (matrix / scale).clamp_(-number_format.largest, number_format.largest)
    whole = scaled if number_format.storage.is_floating_point else scaled.round_()
    return Operand(whole.to(number_format.storage), scale)


def distinct_share(values: torch.Tensor) -> float:
    """Return the share of distinct values, 0 to 1. It is 0 if all values are equal.

    The formula is (d − 1) / (min(n, c) − 1), where d is the number of distinct values among n elements, and c is the number of
    different values that the dtype can represent. At most 4096 elements are used, at random indices.
    """
    # The transposed view of a column-major matrix is contiguous, so reshape copies nothing.
    flat = (values if values.is_contiguous() else values.T).reshape(-1)
    if len(flat) > _SAMPLED:
        places = torch.randint(len(flat), (_SAMPLED,), generator=torch.Generator().manual_seed(0))
        flat = flat[places.to(flat.device)]
    most = min(len(flat), 2 ** (8 * values.element_size()))
    return (len(np.unique(flat.double().cpu().numpy())) - 1) / (most - 1) if most > 1 else 1.0


def verify_data(data: str, *operands: torch.Tensor) -> Verification:
    """Check that the number of distinct values of each operand fits the name of the distribution.

    Operands named "zeros" or "constant" must have one distinct value. The error is the largest `distinct_share`. All other
    operands must have many distinct values. The error is 1 minus the smallest `distinct_share`.

    Args:
        data: name of the distribution.
        operands: the matrices to check.
    """
    shares = [distinct_share(values) for values in operands]
    if data in SAME_EVERYWHERE:
        return Verification(f"operands are {data}", max(shares), 0.0)
    return Verification(f"operands are {data}", 1 - min(shares), 1 - _LEAST_DISTINCT)


def require_passed(verification: Verification) -> None:
    """Raise an error if the check of the operands failed, which means that their values do not match their label.

    Raises:
        HarnessError: the verification failed. The message contains the name, the error and the tolerance of the verification.
    """
    if not verification.passed:
        raise HarnessError(
            f"the check '{verification.name}' failed: error {verification.error:.4g}, tolerance {verification.tolerance:.4g}",
            where="the operands of a measurement",
            next_step="draw the operands from the distribution that the label names, or correct the label",
        )


def require_product_flops(claimed: int, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Check that a number of FLOPs equals the number that PyTorch counts for this product.

    Args:
        claimed: number of FLOPs. A multiply-add counts as 2.
        a_MK, b_KN: operands. Only their shapes are used.

    Raises:
        HarnessError: the numbers differ.
    """
    # Use PyTorch's own formula, so that the count does not come from the code that is checked.
    counted = mm_flop(a_MK.shape, b_KN.shape)
    if counted != claimed:
        raise HarnessError(
            f"{claimed:,} FLOPs are claimed for a product of {tuple(a_MK.shape)} and {tuple(b_KN.shape)} that has {counted:,}",
            where="a matrix product",
            next_step="count 2 x M x N x K: a multiply-add counts as two operations",
        )
