"""Matrix products: rate, correctness, and the library that did them."""

import torch

from hyperion.hardware import Device
from hyperion.measure.dtypes import FORMATS, matmul_precision
from hyperion.measure.timing import Timing, time_function, time_interleaved
from hyperion.measure.verify import Verification, verify_product


class Gemm:
    """Operands of one product on a device: standard normal inputs, B as the transposed weight of a Linear layer.

    Args:
        m, n, k: sizes of C[M,N] = A[M,K]·B[K,N].
        dtype: a name of `FORMATS`.

    Attributes:
        flops: 2·M·N·K.
        backend: the BLAS library PyTorch calls for it.
    """

    def __init__(self, m: int, n: int, k: int, dtype: str, device: Device, seed: int = 0):
        self.format, self.device = FORMATS[dtype], device
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        normal = {"generator": generator, "device": device.torch_device, "dtype": torch.float32}
        self.a_MK = torch.randn(m, k, **normal).to(self.format.storage)
        self.b_KN = torch.randn(n, k, **normal).to(self.format.storage).T
        self.c_MN = torch.empty(m, n, dtype=self.format.storage, device=device.torch_device)
        self.flops = 2 * m * n * k
        self.backend = blas_backend(device)

    def __call__(self) -> torch.Tensor:
        return torch.mm(self.a_MK, self.b_KN, out=self.c_MN)

    def verify(self) -> Verification:
        """Poison the output, multiply once, check a slice."""
        self.c_MN.fill_(float("nan"))
        with matmul_precision(self.format):
            self()
        return verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance)

    def measure(self, time_limit_s: float = 5.0) -> tuple[Timing, Verification]:
        """Time the product with flushed caches, then verify the output that the timed calls left."""
        self.c_MN.fill_(float("nan"))
        with matmul_precision(self.format):
            timing = time_function(self, self.device, time_limit_s=time_limit_s)
        return timing, verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance)

    def compare_with_plain_loop(self, calls: int = 10, time_limit_s: float = 3.0) -> tuple[Timing, Timing]:
        """This harness (cold, one call a sample) interleaved with the loop anybody would write: `calls` products, one clock.

        Returns:
            Timings of one product by the harness and by the plain loop (its samples divided by `calls`).
        """

        def plain_loop():
            for _ in range(calls):
                torch.mm(self.a_MK, self.b_KN, out=self.c_MN)

        with matmul_precision(self.format):
            harness, plain = time_interleaved([self, plain_loop], self.device, time_limit_s=time_limit_s)
        return harness, _per_call(plain, calls)


def blas_backend(device: Device) -> str:
    """The library behind torch.mm here: its row says so, since a change of library is a change of machine."""
    if device.kind == "cpu":
        return "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or built-in BLAS"
    preferred = str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1].lower()
    names = {
        "cuda": {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"},
        "rocm": {"cublas": "rocBLAS", "cublaslt": "hipBLASLt"},
    }
    name = names[device.kind].get(preferred, f"{preferred} choice of PyTorch")
    return f"{name} + TunableOp" if torch.cuda.tunable.is_enabled() else name


def _per_call(timing: Timing, calls: int) -> Timing:
    samples, warmup = timing.samples_s / calls, tuple(window / calls for window in timing.warmup_s)
    return Timing(samples, warmup, timing.warm, timing.cold, timing.stopped, timing.telemetry)
