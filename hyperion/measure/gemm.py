"""Matrix products: rate, correctness, and the library that did them."""

import time

import numpy as np
import torch

from hyperion.hardware import Device, Sampler
from hyperion.measure.dtypes import FORMATS, NumberFormat, matmul_precision
from hyperion.measure.timing import MINIMUM_SAMPLES, Timing, device_clock, time_function
from hyperion.measure.verify import Verification, verify_product


class Gemm:
    """Operands of one product on a device: standard normal inputs, B as the transposed weight of a Linear layer.

    Args:
        m, n, k: sizes of C[M,N] = A[M,K]·B[K,N].
        dtype: a name of `FORMATS`.

    Attributes:
        flops: 2·M·N·K.
        backend: the BLAS library PyTorch prefers for it.
    """

    def __init__(self, m: int, n: int, k: int, dtype: str, device: Device, seed: int = 0):
        self.format, self.device = FORMATS[dtype], device
        generator = torch.Generator(device.torch_device).manual_seed(seed)
        normal = {"generator": generator, "device": device.torch_device, "dtype": torch.float32}
        self.a_MK = torch.randn(m, k, **normal).to(self.format.storage)
        self.b_KN = torch.randn(n, k, **normal).to(self.format.storage).T
        self.c_MN = torch.empty(m, n, dtype=self.format.storage, device=device.torch_device)
        self.flops = 2 * m * n * k
        self.backend = blas_backend(device, self.format)

    def __call__(self) -> torch.Tensor:
        return torch.mm(self.a_MK, self.b_KN, out=self.c_MN)

    def verify(self) -> Verification:
        """Poison the output, multiply once, check a slice."""
        self.c_MN.fill_(float("nan"))
        with matmul_precision(self.format):
            self()
        return verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance)

    def measure(self, *, cold: bool = True, time_limit_s: float = 5.0) -> tuple[Timing, Verification]:
        """Time the product, its caches flushed before each sample or not, then verify the output that the calls left."""
        self.c_MN.fill_(float("nan"))
        with matmul_precision(self.format):
            timing = time_function(self, self.device, cold=cold, time_limit_s=time_limit_s)
        return timing, verify_product(self.a_MK, self.b_KN, self.c_MN, self.format.gemm_tolerance)

    def compare_with_plain_loop(self, calls: int = 10, rounds: int = MINIMUM_SAMPLES) -> tuple[Timing, Timing]:
        """The harness's clock beside the loop anybody would write: synchronize, host clock, `calls` products, synchronize.

        Both run with warm caches, `calls` products in turn, round after round; a round gives one sample of each.

        Returns:
            Timings of one product by the harness (median of its calls) and by the plain loop (mean of its calls).
        """
        clock = device_clock(self.device)
        harness, plain = [], []
        with matmul_precision(self.format), Sampler(self.device) as sampler:
            for _ in range(rounds + 1):
                harness.append(float(np.median(clock.sample([self], None, calls)[0])))
                plain.append(self._plain_loop(calls))
        # The first round warms both up.
        return tuple(
            Timing(np.array(series[1:]), tuple(series[:1]), True, False, "rounds", sampler.telemetry)
            for series in (harness, plain)
        )

    def _plain_loop(self, calls: int) -> float:
        synchronize = torch.cuda.synchronize if self.device.kind != "cpu" else lambda: None
        synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            torch.mm(self.a_MK, self.b_KN, out=self.c_MN)
        synchronize()
        return (time.perf_counter() - started) / calls


def blas_backend(device: Device, number_format: NumberFormat) -> str:
    """The library that PyTorch prefers for torch.mm here: a change of library is a change of machine."""
    if device.kind == "cpu":
        if number_format.bytes == 2 and torch.backends.mkldnn.is_available():
            return "oneDNN"
        return "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or built-in BLAS"
    preferred = str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1].lower()
    names = {
        "cuda": {"cublas": "cuBLAS", "cublaslt": "cuBLASLt"},
        "rocm": {"cublas": "rocBLAS", "cublaslt": "hipBLASLt"},
    }
    name = names[device.kind].get(preferred, f"{preferred} choice of PyTorch")
    return f"{name} preferred" + (", TunableOp on" if torch.cuda.tunable.is_enabled() else "")
