"""Matrix products: rate, correctness, and the library that did them."""

from collections.abc import Callable
from functools import partial

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure.clock import checks
from hyperion.measure.clock.dtypes import NumberFormat, format_of, matmul_precision
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, Timing, compare_with_plain_loop, time_function
from hyperion.measure.clock.verify import Verification, poison, verify_product
from hyperion.measure.products.operands import ACTIVATIONS, Operand, distinct_share, made_up, stored, verify_data


class RefusedProduct(HyperionError):
    """The library does not multiply this shape in this format here; its own words say why."""


class Gemm:
    """Operands of one product on a device, B as the transposed weight of a Linear layer; `Gemm.of` takes given operands.

    fp8 operands are multiplied by `torch._scaled_mm` into bf16, sums in float32 (its default, not `use_fast_accum`); int8
    ones by `torch._int_mm` into int32; all others by `torch.mm`. PyTorch also multiplies where the device has no units for
    the format, by converting it: `device.supports(dtype)` says which of the two a time is of.

    Args:
        m, n, k: sizes of C[M,N] = A[M,K]·B[K,N].
        dtype: a name of `FORMATS`, or 'fp8' for the one that the device multiplies.
        data: what the operands hold: zeros, constant, uniform or normal; see `DISTRIBUTIONS`.

    Attributes:
        flops: 2·M·N·K.
        traffic_bytes: both operands read once, the output written once.
        function: the call that multiplies: torch.mm, torch._scaled_mm or torch._int_mm.
        backend: the BLAS library that does it, or that PyTorch prefers for it.
    """

    def __init__(self, m: int, n: int, k: int, dtype: str, device: Device, seed: int = 0, data: str = "normal"):
        chosen = format_of(dtype, device)
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        a, b = (made_up(data, shape, chosen, device, generator) for shape in ((m, k), (n, k)))
        self._hold(a, b.transposed, _output(m, n, chosen, device), chosen, device, data)

    @classmethod
    def of(cls, a_MK: torch.Tensor, b_KN: torch.Tensor, dtype: str, device: Device, data: str = ACTIVATIONS) -> "Gemm":
        """A product of given matrices, a layer's input and its transposed weight say, rounded to the format.

        Args:
            a_MK, b_KN: floating-point, on any device; they are copied.
            data: the name under which rows speak of them.

        Raises:
            HyperionError: the shapes do not fit, or a value is not finite.
        """
        if a_MK.ndim != 2 or b_KN.ndim != 2 or a_MK.shape[1] != b_KN.shape[0]:
            raise HyperionError(
                f"A {list(a_MK.shape)} and B {list(b_KN.shape)} have no product.",
                where="Gemm.of",
                next_step="Pass A as [M, K] and B as [K, N]; flatten a batch of activations to rows first.",
            )
        if not (torch.isfinite(a_MK).all() and torch.isfinite(b_KN).all()):
            raise HyperionError("An operand holds NaN or infinity.", where="Gemm.of", next_step="Pass finite values.")
        chosen = format_of(dtype, device)
        a, b = (stored(x.detach().to(device.torch_device, copy=True).contiguous(), chosen) for x in (a_MK, b_KN.T))
        c_MN = _output(len(a_MK), b_KN.shape[1], chosen, device)
        return cls.holding(a, b.transposed, c_MN, chosen, device, data)

    @classmethod
    def holding(cls, a: Operand, b: Operand, c_MN: torch.Tensor, chosen: NumberFormat, device: Device, data: str) -> "Gemm":
        """A product of stored operands, B column-major, into a given output: nothing is allocated or copied."""
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
            self.function, self._multiply = "torch._int_mm", partial(torch._int_mm, a.values, b.values, out=c_MN)
        elif chosen.scaled:
            inputs = a.values, b.values, a.scale, b.scale
            self.function = "torch._scaled_mm"
            self._multiply = partial(torch._scaled_mm, *inputs, out_dtype=chosen.output, out=c_MN)
        else:
            self.function, self._multiply = "torch.mm", partial(torch.mm, a.values, b.values, out=c_MN)

    def __call__(self) -> torch.Tensor:
        return self._multiply()

    def plain_call(self) -> Callable[[], torch.Tensor]:
        """The same product as PyTorch's own call on the bare tensors, which makes its output anew."""
        a, b = self.a_MK, self.b_KN
        if self.format.storage == torch.int8:
            return lambda: torch._int_mm(a, b)
        if self.format.scaled:
            scales, output = (self._a.scale, self._b.scale), self.format.output
            return lambda: torch._scaled_mm(a, b, *scales, out_dtype=output)
        return lambda: torch.mm(a, b)

    @property
    def distinct_share(self) -> float:
        """How many of its values differ, of those that could (0 to 1), in the operand where fewer do."""
        return min(distinct_share(self.a_MK), distinct_share(self.b_KN))

    def verify_data(self) -> Verification:
        """Do the operands hold what `data` says: many values, or one?"""
        return verify_data(self.data, self.a_MK, self.b_KN)

    def verify(self) -> Verification:
        """Poison the output, multiply once, check a slice.

        Raises:
            RefusedProduct: the library does not do this product here.
        """
        poison(self.c_MN)
        with matmul_precision(self.format):
            self.first_call()
        return self._verified()

    def measure(self, *, cold: bool = True, time_limit_s: float = 5.0) -> tuple[Timing, Verification]:
        """Time the product, its caches flushed before each sample or not, then verify the output that the calls left.

        Raises:
            RefusedProduct: the library does not do this product here.
        """
        with matmul_precision(self.format):
            self.first_call()
            poison(self.c_MN)
            timing = time_function(self, self.device, cold=cold, time_limit_s=time_limit_s)
        return timing, self._verified()

    def first_call(self) -> None:
        """Multiply for the first time, which loads or tunes a kernel, and may find that there is none.

        Raises:
            RefusedProduct: the library does not do this product here.
        """
        try:
            self()
        except RuntimeError as error:
            # A full or a broken device has not refused this product in particular.
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            shape, words = f"{self.m}x{self.n}x{self.k} (MxNxK)", str(error).strip().split("\n")[0]
            raise RefusedProduct(
                f"{self.backend} refused a product of {shape} in {self.format.name}: {words}",
                where=self.device.name,
                next_step="Choose other sizes (8-bit formats want multiples of 16 on a GPU), or another format.",
            ) from error

    def _verified(self) -> Verification:
        checks.require_product_flops(self.flops, self.a_MK, self.b_KN)
        checks.require_passed(self.verify_data())
        # An int8 product is left as the integer sums of the stored values: no scale was applied.
        scaled = self.format.scaled and self.format.storage.is_floating_point
        scale = self._a.scale.item() * self._b.scale.item() if scaled else 1.0
        return verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance, scale=scale)

    def compare_with_plain_loop(self, calls: int = 10, rounds: int = MINIMUM_SAMPLES) -> tuple[Timing, Timing]:
        """The harness's clock beside the loop anybody would write: synchronize, host clock, `calls` products, synchronize.

        Both run with warm caches, `calls` products in turn, round after round; a round gives one sample of each.

        Returns:
            Timings of one product by the harness (median of its calls) and by the plain loop (mean of its calls).
        """
        with matmul_precision(self.format):
            return compare_with_plain_loop(self, self.device, calls, rounds)


def blas_backend(device: Device, number_format: NumberFormat) -> str:
    """The library that multiplies here, as far as PyTorch tells: a change of library is a change of machine."""
    if device.kind == "cpu":
        if number_format.bytes <= 2 and torch.backends.mkldnn.is_available():
            return "oneDNN" if number_format.name in ("fp16", "bf16", "int8") else "oneDNN or conversion to float32"
        return "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or built-in BLAS"
    tunable = ", TunableOp on" if torch.cuda.tunable.is_enabled() else ""
    if number_format.scaled:
        # torch._scaled_mm (one scale a matrix) and torch._int_mm know no other; TunableOp does not choose for int8.
        library = {"cuda": "cuBLASLt", "rocm": "hipBLASLt"}[device.kind]
        return library + (tunable if number_format.storage.is_floating_point else "")
    preferred = str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1].lower()
    names = {"cuda": {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"}, "rocm": {"cublas": "rocBLAS", "cublaslt": "hipBLASLt"}}
    name = names[device.kind].get(preferred, f"{preferred} choice of PyTorch")
    return f"{name} preferred{tunable}"


def _output(m: int, n: int, number_format: NumberFormat, device: Device) -> torch.Tensor:
    return torch.empty(m, n, dtype=number_format.output, device=device.torch_device)
