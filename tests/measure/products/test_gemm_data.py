"""Operands are what their name says, and a product of a layer's own activations is measured like any other."""

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure import DISTRIBUTIONS, FORMATS, Gemm, distinct_share, verify_data

FORMAT_NAMES = ("fp64", "fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "int8")


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


@pytest.fixture(scope="module")
def layer():
    """A layer's input after a ReLU, sparse and with heavy tails, [300, 128], and its weight, transposed, [128, 64]."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.relu(torch.randn(300, 128, generator=generator) - 1.0) ** 3
    return hidden, (0.02 * torch.randn(64, 128, generator=generator)).T


@pytest.mark.parametrize("dtype", FORMAT_NAMES)
@pytest.mark.parametrize("data", DISTRIBUTIONS)
def test_every_distribution_multiplies_right_in_every_format_and_bears_its_name(cpu, data, dtype):
    product = Gemm(40, 56, 72, dtype, cpu, data=data)
    assert product.data == data and product.verify().passed and product.verify_data().passed
    assert (product.distinct_share == 0) == (data in ("zeros", "constant"))


def test_distributions_are_what_they_are_called(cpu):
    a_MK = {data: Gemm(256, 2, 256, "fp32", cpu, data=data).a_MK for data in DISTRIBUTIONS}
    assert not a_MK["zeros"].any() and (a_MK["constant"] == 1).all()
    assert -1 <= a_MK["uniform"].min() < -0.99 and 0.99 < a_MK["uniform"].max() < 1
    assert abs(a_MK["uniform"].std() - 3**-0.5) < 0.01
    assert abs(a_MK["normal"].mean()) < 0.02 and abs(a_MK["normal"].std() - 1) < 0.02


def test_float64_operands_use_all_of_their_bits(cpu):
    a_MK = Gemm(64, 2, 64, "fp64", cpu).a_MK
    assert (a_MK.float().double() != a_MK).float().mean() > 0.99


@pytest.mark.parametrize("dtype", FORMAT_NAMES)
@pytest.mark.parametrize("data", ["normal", "uniform", "activations"])
def test_constant_operands_under_another_name_are_caught(cpu, layer, data, dtype):
    product = Gemm.of(*layer, dtype, cpu, data=data)
    assert product.verify_data().passed
    product.b_KN.copy_(product.b_KN[0, 0].expand(product.b_KN.shape))
    assert not product.verify_data().passed


def test_saturated_operands_are_caught():
    """Random bits of 32-bit integers converted to fp8 all become its largest value but for a few: no random data."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(2**32, (256, 256), generator=generator).double()
    saturated = raw.clamp(max=448).to(torch.float8_e4m3fn)
    assert not verify_data("uniform", saturated).passed
    assert verify_data("uniform", (raw / raw.max()).to(torch.float8_e4m3fn)).passed


def test_varied_operands_under_the_name_of_constant_are_caught(cpu):
    product = Gemm(24, 24, 24, "bf16", cpu, data="constant")
    product.a_MK[3, 5] = 2.0
    assert not product.verify_data().passed


def test_the_share_of_distinct_values():
    assert distinct_share(torch.zeros(5, 5)) == 0 and distinct_share(torch.ones(1, 1)) == 1
    assert distinct_share(torch.arange(12.0).reshape(3, 4)) == distinct_share(torch.arange(12.0).reshape(3, 4).T) == 1
    assert distinct_share(torch.tensor([[0.0, 0.0, 1.0, 1.0, 2.0]])) == pytest.approx(2 / 4)
    every = torch.arange(-128, 128).to(torch.int8).repeat(64).reshape(128, 128)
    assert distinct_share(every) == 1
    assert distinct_share(torch.randn(300, 300, generator=torch.Generator().manual_seed(0))) > 0.95


@pytest.mark.parametrize("dtype", FORMAT_NAMES)
def test_a_layers_own_operands_are_multiplied(cpu, layer, dtype):
    hidden, weight = layer
    product = Gemm.of(hidden, weight, dtype, cpu)
    assert product.data == "activations" and product.verify().passed
    assert (product.m, product.n, product.k) == (300, 64, 128) and product.b_KN.stride() == (1, 128)
    # Half of the output's accuracy is the rounding of the operands, of which the check knows nothing.
    coarse = 0.1 if FORMATS[dtype].scaled else 0.01
    scale = product._a.scale * product._b.scale if dtype == "int8" else 1.0
    assert torch.dist(product.c_MN.double() * scale, (hidden @ weight).double()) <= coarse * (hidden @ weight).norm()


def test_given_operands_are_copied(cpu):
    a_MK, b_KN = torch.randn(8, 8), torch.randn(8, 8)
    product = Gemm.of(a_MK, b_KN, "fp32", cpu)
    a_MK.zero_(), b_KN.zero_()
    assert product.verify_data().passed and product.a_MK.any() and product.b_KN.any()


@pytest.mark.parametrize(
    ("a_MK", "b_KN", "words"),
    [
        (torch.ones(3, 4), torch.ones(3, 4), "cannot be multiplied"),
        (torch.ones(2, 3, 4), torch.ones(4, 5), "cannot be multiplied"),
        (torch.full((3, 4), float("nan")), torch.ones(4, 5), "NaN or infinity"),
        (torch.ones(3, 4), torch.full((4, 5), float("inf")), "NaN or infinity"),
    ],
)
def test_operands_without_a_product_are_refused(cpu, a_MK, b_KN, words):
    with pytest.raises(HyperionError, match=words):
        Gemm.of(a_MK, b_KN, "int8", cpu)


def test_an_unknown_distribution_is_refused_and_activations_are_asked_for(cpu):
    with pytest.raises(HyperionError, match="'activations' is not a distribution") as refusal:
        Gemm(8, 8, 8, "fp32", cpu, data="activations")
    assert "Gemm.of" in refusal.value.next_step
