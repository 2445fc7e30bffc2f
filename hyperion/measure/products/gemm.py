"""Matrix products: create operands in a number format, time, verify, and name the BLAS library.

The speed of a product depends on its data: repeated bits switch fewer transistors, draw less power, and cause less throttling.
Source: Bhalachandra et al., Understanding the Impact of Input Entropy on FPU, CPU, and GPU Power, 2022. AMD's acceptance targets
for one shape (ROCm Validation Suite, rvs/conf/MI3*/gst_single.conf) differ by a factor of 1.05 to 1.46 between two kinds of data.
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

_torch: Any = torch  # torch._int_mm and torch._scaled_mm have no public names, so torch's types lack them
_SAMPLED = 4096
# 8-bit activations of real layers have dozens of different values among 4096 samples; a constant has one.
_LEAST_DISTINCT = 0.005

DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": lambda shape, generator, **options: torch.zeros(shape, **options),
    "constant": lambda shape, generator, **options: torch.ones(shape, **options),
    "uniform": lambda shape, generator, **options: torch.rand(shape, generator=generator, **options).mul_(2).sub_(1),
    "normal": lambda shape, generator, **options: torch.randn(shape, generator=generator, **options),
}
SAME_EVERYWHERE = ("zeros", "constant")
# Name of the data of operands that the caller passes.
ACTIVATIONS = "activations"


class RefusedProduct(HyperionError):
    """Raised when the library does not support a product; the message contains its reason."""


@dataclass(frozen=True)
class Operand:
    """A stored matrix: `values` [rows, columns] in the storage dtype of the format, times `scale` (float32 scalar)."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def transposed(self) -> "Operand":
        """The transposed matrix, a view."""
        return Operand(self.values.T, self.scale)


class Gemm:
    """One matrix product on a device with its operands; B is stored as the transposed weight of a Linear layer.

    fp8 operands are multiplied by `torch._scaled_mm` into bf16 with float32 accumulation (the default, not `use_fast_accum`),
    int8 operands by `torch._int_mm` into int32, and all others by `torch.mm`. If the device has no units for a format, PyTorch
    may convert the operands; `device.supports(dtype)` tells.

    Args:
        m, n, k: sizes of C[M,N] = A[M,K]·B[K,N].
        dtype: a name of `FORMATS`, or 'fp8' for the fp8 format of the device.
        data: distribution of the operands: zeros, constant, uniform or normal; see `DISTRIBUTIONS`.

    Attributes:
        flops: 2·M·N·K.
        traffic_bytes: bytes of both operands, read once, and of the output, written once.
        function: name of the call: torch.mm, torch._scaled_mm or torch._int_mm.
        backend: the BLAS library, or the one that PyTorch prefers.
    """

    def __init__(self, m: int, n: int, k: int, dtype: str, device: Device, seed: int = 0, data: str = "normal"):
        chosen = format_of(dtype, device)
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        a, b = (made_up(data, shape, chosen, device, generator) for shape in ((m, k), (n, k)))
        self._hold(a, b.transposed, _output(m, n, chosen, device), chosen, device, data)

    @classmethod
    def of(cls, a_MK: torch.Tensor, b_KN: torch.Tensor, dtype: str, device: Device, data: str = ACTIVATIONS) -> "Gemm":
        """Return a product of given matrices, such as a layer's input and its transposed weight, rounded to the format.

        Args:
            a_MK, b_KN: floating-point matrices on any device; they are copied.
            data: name of the data in rows.

        Raises:
            HyperionError: the shapes do not fit, or a value is not finite.
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
        """Return a product of stored operands (B column-major) into a given output, without allocation or copy."""
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
        """Return the same product as a plain PyTorch call, which allocates its output."""
        a, b = self.a_MK, self.b_KN
        if self.format.storage == torch.int8:
            return lambda: _torch._int_mm(a, b)
        if self.format.scaled:
            scales, output = (self._a.scale, self._b.scale), self.format.output
            return lambda: _torch._scaled_mm(a, b, *scales, out_dtype=output)
        return lambda: torch.mm(a, b)

    @property
    def distinct_share(self) -> float:
        """The smaller `distinct_share` of both operands, 0 to 1."""
        return min(distinct_share(self.a_MK), distinct_share(self.b_KN))

    def verify_data(self) -> Verification:
        """Check that the operands match the distribution `data`."""
        return verify_data(self.data, self.a_MK, self.b_KN)

    def verify(self) -> Verification:
        """Poison the output, multiply once, and check a slice.

        Raises:
            RefusedProduct: the library does not support this product.
        """
        poison(self.c_MN)
        with matmul_precision(self.format):
            self.first_call()
        return self._verified()

    def measure(self, *, cold: bool = True, time_limit_s: float = 5.0) -> tuple[Timing, Verification]:
        """Time the product, then verify the output of the timed calls.

        Args:
            cold: flush the caches before each sample.
            time_limit_s: as in `time_function`.

        Raises:
            RefusedProduct: the library does not support this product.
        """
        with matmul_precision(self.format):
            self.first_call()
            poison(self.c_MN)
            timing = time_function(self, self.device, cold=cold, time_limit_s=time_limit_s)
        return timing, self._verified()

    def first_call(self) -> None:
        """Multiply for the first time, which loads or tunes a kernel.

        Raises:
            RefusedProduct: the library does not support this product.
        """
        try:
            self()
        except RuntimeError as error:
            # Out of memory and device errors are not about this product.
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            shape, words = f"{self.m}x{self.n}x{self.k} (MxNxK)", str(error).strip().split("\n")[0]
            raise RefusedProduct(
                f"{self.backend} refused a product of {shape} in {self.format.name}: {words}",
                where=self.device.name,
                next_step="Choose other sizes (8-bit formats need multiples of 16 on a GPU), or another format.",
            ) from error

    def _verified(self) -> Verification:
        require_product_flops(self.flops, self.a_MK, self.b_KN)
        require_passed(self.verify_data())
        # The output of an int8 product is the integer sum of the stored values, without a scale.
        scaled = self.format.scaled and self.format.storage.is_floating_point
        scale = self._a.scale.item() * self._b.scale.item() if scaled else 1.0
        return verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance, scale=scale)

    def compare_with_plain_loop(self, calls: int = 10, rounds: int = MINIMUM_SAMPLES) -> tuple[Timing, Timing]:
        """Time the product with Hyperion's clock and with a plain loop; see `compare_with_plain_loop`."""
        with matmul_precision(self.format):
            return compare_with_plain_loop(self, self.device, calls, rounds)


def blas_backend(device: Device, number_format: NumberFormat) -> str:
    """Return the name of the BLAS library for a format on a device, as far as PyTorch reports it."""
    if device.kind == "cpu":
        if number_format.bytes <= 2 and torch.backends.mkldnn.is_available():
            return "oneDNN" if number_format.name in ("fp16", "bf16", "int8") else "oneDNN or conversion to float32"
        return "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or built-in BLAS"
    tunable = ", TunableOp on" if torch.cuda.tunable.is_enabled() else ""
    if number_format.scaled:
        # torch._scaled_mm (one scale per matrix) and torch._int_mm support only this library; TunableOp does not tune int8.
        library = {"cuda": "cuBLASLt", "rocm": "hipBLASLt"}[device.kind]
        return library + (tunable if number_format.storage.is_floating_point else "")
    preferred = str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1].lower()
    names = {"cuda": {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"}, "rocm": {"cublas": "rocBLAS", "cublaslt": "hipBLASLt"}}
    name = names[device.kind].get(preferred, f"{preferred} choice of PyTorch")
    return f"{name} preferred{tunable}"


def _output(m: int, n: int, number_format: NumberFormat, device: Device) -> torch.Tensor:
    return torch.empty(m, n, dtype=number_format.output, device=device.torch_device)


def made_up(data: str, shape: tuple[int, ...], number_format: NumberFormat, device: Device, generator) -> Operand:
    """Return a matrix drawn from a named distribution.

    Args:
        data: "zeros", "constant" (all 1), "uniform" in [-1, 1), or "normal" (standard).
        generator: random generator of the device; None if the distribution needs none.

    Raises:
        HyperionError: the name is unknown.
    """
    if data not in DISTRIBUTIONS:
        raise HyperionError(
            f"{data!r} is not a distribution of operands.",
            next_step=f"Use one of {', '.join(DISTRIBUTIONS)}; pass the activations of a real layer to Gemm.of(a_MK, b_KN, …).",
        )
    # A float64 operand drawn in float32 would end in 29 zero bits.
    drawn = torch.float64 if number_format.storage == torch.float64 else torch.float32
    return stored(DISTRIBUTIONS[data](shape, generator, device=device.torch_device, dtype=drawn), number_format)


def stored(matrix: torch.Tensor, number_format: NumberFormat) -> Operand:
    """Round a floating-point matrix to a format; for 8-bit formats, divide it by max|x| / largest first, as layers do."""
    one = torch.ones((), dtype=torch.float32, device=matrix.device)
    if not number_format.scaled:
        return Operand(matrix.to(number_format.storage), one)
    matrix = matrix.float()
    furthest = torch.maximum(-matrix.amin(), matrix.amax())
    scale = torch.where(furthest > 0, furthest / number_format.largest, one)
    scaled = (matrix / scale).clamp_(-number_format.largest, number_format.largest)
    whole = scaled if number_format.storage.is_floating_point else scaled.round_()
    return Operand(whole.to(number_format.storage), scale)


def distinct_share(values: torch.Tensor, seed: int = 0) -> float:
    """Return the share of distinct values: 0 if all values are equal, 1 if as many differ as possible.

    Uses at most 4096 elements at random places: (distinct − 1) / (min(elements, codes of the dtype) − 1).
    """
    flat = (values if values.is_contiguous() else values.T).reshape(-1)
    if len(flat) > _SAMPLED:
        places = torch.randint(len(flat), (_SAMPLED,), generator=torch.Generator().manual_seed(seed))
        flat = flat[places.to(flat.device)]
    most = min(len(flat), 2 ** (8 * values.element_size()))
    return (len(np.unique(flat.double().cpu().numpy())) - 1) / (most - 1) if most > 1 else 1.0


def verify_data(data: str, *operands: torch.Tensor) -> Verification:
    """Check that operands match the name of their distribution: many distinct values, or one for zeros and constant.

    The error is 1 − the smallest `distinct_share`; for zeros and constant it is the largest `distinct_share`.
    """
    shares = [distinct_share(values) for values in operands]
    if data in SAME_EVERYWHERE:
        return Verification(f"operands are {data}", max(shares), 0.0)
    return Verification(f"operands are {data}", 1 - min(shares), 1 - _LEAST_DISTINCT)


def require_passed(verification: Verification) -> None:
    """Check a verification of the operands, without which the rate is that of another quantity.

    Raises:
        HarnessError: it failed; the message contains its name, error and tolerance.
    """
    if not verification.passed:
        raise HarnessError(
            f"{verification.name}: they are not (error {verification.error:.4g} above {verification.tolerance:.4g})",
            where="the operands of a measurement",
            next_step="draw the operands from the distribution of their label, or correct the label",
        )


def require_product_flops(claimed: int, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Check a number of FLOPs against PyTorch's count for this product.

    Args:
        claimed: FLOPs; a multiply-add counts as 2.
        a_MK, b_KN: operands; only their shapes are used.

    Raises:
        HarnessError: the numbers differ.
    """
    counted = mm_flop(a_MK.shape, b_KN.shape)
    if counted != claimed:
        raise HarnessError(
            f"{claimed:,} FLOPs are claimed for a product of {tuple(a_MK.shape)} and {tuple(b_KN.shape)} that has {counted:,}",
            where="a matrix product",
            next_step="count 2 x M x N x K: a multiply-add counts as two operations",
        )
