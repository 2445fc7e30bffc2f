"""fp8 and int8 products are right, rounded as their formats say, and refused with a reason where a device has none."""

from dataclasses import replace

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect, detect_cpu, fp8_format, gemm_path, peak
from hyperion.measure import FORMATS, Gemm, RefusedProduct, blas_backend, format_of, verify_product
from hyperion.measure.products.gemm import stored
from tests.hardware.machines import GPUS, facts

FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
# K = 1 is left out: torch._int_mm of PyTorch 2.13 writes nothing then on a CPU (which the check sees).
SHAPES = ((96, 80, 112), (64, 1, 33), (1, 48, 17), (33, 65, 2), (1, 1, 2))


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_shape_in_every_format_agrees_with_float64(cpu, dtype, shape):
    product = Gemm(*shape, dtype, cpu)
    verification = product.verify()
    assert verification.passed and product.c_MN.shape == shape[:2] and product.c_MN.dtype is FORMATS[dtype].output
    assert product.flops == 2 * shape[0] * shape[1] * shape[2]


def test_int8_is_exact_also_where_its_sums_are_largest(cpu):
    product = Gemm(8, 8, 8192, "int8", cpu, data="constant")
    assert product.verify().error == 0 and FORMATS["int8"].gemm_tolerance == 0
    assert product.c_MN.unique().tolist() == [8192 * 127**2]


def test_one_wrong_integer_is_caught(cpu):
    product = Gemm(48, 64, 80, "int8", cpu)
    product()
    product.c_MN[-1, -1] += 1
    assert not verify_product(product.a_MK, product.b_KN, product.c_MN, 0.0).passed


@pytest.mark.parametrize("dtype", ["int8", *FP8])
def test_an_output_that_was_never_written_is_caught(cpu, dtype):
    product = Gemm(48, 300, 80, dtype, cpu)
    assert product.verify().passed
    # The product's work is replaced by nothing, so that the poison stays; a single element is found as well.
    product._multiply = lambda: product.c_MN
    assert not product.verify().passed
    Gemm.__call__(product)
    written = Gemm(48, 300, 80, dtype, cpu)
    written()
    lowest = float("nan") if dtype in FP8 else torch.iinfo(torch.int32).min
    written.c_MN[0, 1] = lowest
    assert not written._verified().passed


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_operands_use_the_whole_range_of_their_format(cpu, dtype):
    product = Gemm(64, 64, 64, dtype, cpu)
    largest = torch.finfo(FORMATS[dtype].storage).max
    for operand in (product.a_MK, product.b_KN):
        assert operand.dtype is FORMATS[dtype].storage and operand.double().abs().max() == largest
    # The reference multiplies what the operands hold, so a wrong scale is as wrong as a wrong product.
    a = product._a
    product._a = replace(a, scale=a.scale * 1.01)
    assert not product._verified().passed


@pytest.mark.parametrize("dtype", ["int8", *FP8])
def test_rounding_to_eight_bits_is_within_half_a_step(dtype):
    matrix = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    operand = stored(matrix, FORMATS[dtype])
    back = operand.values.double() * operand.scale.double()
    error = (back - matrix).abs()
    if dtype == "int8":
        assert error.max() <= 0.5 * operand.scale * 1.001
    else:
        # Three bits after the point: 2^-4 of the value, or half of the smallest subnormal below the normal range.
        subnormal = 2.0**-9 if dtype == "fp8_e4m3fn" else 2.0**-10
        assert (error <= torch.maximum(matrix.abs() / 16, 0.5 * subnormal * operand.scale) * 1.001).all()


def _product_of_short_sums(k: int, promoted: bool) -> float:
    """Relative error of an fp8 product whose sums keep 14 bits, added up in float64 every 128 terms or never.

    Source of how Hopper's fp8 units add: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2.
    """

    def truncated(x):
        significand, exponent = torch.frexp(x)
        return torch.ldexp(torch.trunc(significand * 2**14) / 2**14, exponent)

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for shape in ((40, k), (k, 40)))
    a64, b64 = a.double(), b.double()
    total, partial_sum = torch.zeros(40, 40, dtype=torch.float64), torch.zeros(40, 40, dtype=torch.float64)
    for step, start in enumerate(range(0, k, 32)):
        partial_sum = truncated(partial_sum + a64[:, start : start + 32] @ b64[start : start + 32])
        if promoted and step % 4 == 3:
            total, partial_sum = total + partial_sum, torch.zeros_like(total)
    c = (total + partial_sum).bfloat16()
    return verify_product(a, b, c, FORMATS["fp8_e4m3fn"].gemm_tolerance).error


def test_the_fp8_tolerance_has_room_for_promoted_sums_and_none_for_short_ones():
    tolerance = FORMATS["fp8_e4m3fn"].gemm_tolerance
    assert _product_of_short_sums(8192, promoted=True) < tolerance / 3
    assert _product_of_short_sums(8192, promoted=False) > tolerance


@pytest.mark.parametrize("machine", GPUS)
def test_fp8_is_the_format_that_the_device_has_or_an_error_with_the_reason(machine):
    device = detect(facts(machine))
    if device.supports("fp8")[0]:
        chosen = format_of("fp8", device)
        assert chosen.name in FP8 and device.supports(chosen.name)[0]
        assert chosen.name == ("fp8_e4m3fnuz" if machine in ("MI300X", "MI325X") else "fp8_e4m3fn")
    else:
        with pytest.raises(HyperionError, match=f"unsupported: {device.arch} has no fp8"):
            format_of("fp8", device)


def test_a_cpu_has_no_fp8_and_says_what_would_happen_instead(cpu):
    with pytest.raises(HyperionError, match="unsupported: this CPU has no fp8 instructions"):
        Gemm(16, 16, 16, "fp8", cpu)
    with pytest.raises(HyperionError, match="'fp4' is not a supported number format"):
        Gemm(16, 16, 16, "fp4", cpu)


def test_the_library_of_eight_bit_products_is_named(cpu, monkeypatch):
    h200, mi300x = detect(facts("H200")), detect(facts("MI300X"))
    for tuned in (False, True):
        # A fact of the process that a PyTorch without GPUs does not know.
        monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda tuned=tuned: tuned)
        assert blas_backend(h200, FORMATS["int8"]) == "cuBLASLt"
        assert blas_backend(mi300x, FORMATS["int8"]) == "hipBLASLt"
        assert blas_backend(h200, FORMATS["fp8_e4m3fn"]) == "cuBLASLt" + ", TunableOp on" * tuned
        assert blas_backend(mi300x, FORMATS["fp8_e4m3fnuz"]) == "hipBLASLt" + ", TunableOp on" * tuned
    assert blas_backend(cpu, FORMATS["int8"])


def test_what_a_library_refuses_is_told_in_its_words(cpu):
    product = Gemm(16, 16, 16, "fp32", cpu)
    product._multiply = lambda: torch.mm(product.a_MK, product.b_KN[:-1])
    with pytest.raises(RefusedProduct, match=r"refused a product of 16x16x16 \(MxNxK\) in fp32: .*shapes"):
        product.verify()

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    product._multiply = full
    with pytest.raises(torch.OutOfMemoryError):
        product.measure(time_limit_s=0.01)


@pytest.mark.parametrize("machine", GPUS)
def test_every_format_has_a_peak_or_a_reason_on_every_machine(machine):
    device = detect(facts(machine))
    for name in FORMATS:
        supported, reason = device.supports(name)
        found = peak(device, gemm_path(name, device))
        assert reason and (found.limit_tflops is not None or found.reason)
        if FORMATS[name].scaled:
            assert supported == (found.limit_tflops is not None and name in ("int8", fp8_format(device)))


def test_the_call_that_multiplies_is_named(cpu):
    functions = {dtype: Gemm(16, 16, 16, dtype, cpu).function for dtype in ("tf32", "bf16", "fp8_e4m3fn", "int8")}
    assert list(functions.values()) == ["torch.mm", "torch.mm", "torch._scaled_mm", "torch._int_mm"]


def test_traffic_counts_the_bytes_of_each_format(cpu):
    assert Gemm(3, 5, 7, "fp32", cpu).traffic_bytes == 4 * (3 * 7 + 7 * 5 + 3 * 5)
    assert Gemm(3, 5, 7, "fp8_e4m3fn", cpu).traffic_bytes == 3 * 7 + 7 * 5 + 2 * 3 * 5
    assert Gemm(3, 5, 7, "int8", cpu).traffic_bytes == 3 * 7 + 7 * 5 + 4 * 3 * 5


def test_an_eight_bit_product_is_timed_and_verified_like_any_other(cpu):
    timing, verification = Gemm(64, 96, 80, "int8", cpu).measure(time_limit_s=0.05)
    assert verification.passed and len(timing.samples_s) >= 30 and timing.cold
