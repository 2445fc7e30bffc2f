"""Formats of weights: packed values, bytes, error bounds, and planted faults that the bounds find."""

import math

import pytest
import torch
import torch.nn.functional as F

from hyperion.errors import HyperionError
from hyperion.experiments.quantization import layer_checks, quantized_linears
from hyperion.experiments.quantization.layer_checks import (
    output_error,
    represented_weight,
    stored_error,
    weight_bytes_of,
    what_ran,
)
from hyperion.experiments.quantization.quantized_linears import (
    SCHEMES,
    Fp8,
    Fp8Linear,
    Int4Linear,
    Int4WeightOnly,
    Int8Linear,
    Int8WeightOnly,
    LlmInt8,
    Nf4,
    pack_int4,
    replace_linears,
    unpack_int4,
)
from hyperion.hardware import detect_cpu
from tests.experiments.quantization.planted_bugs import quantise_without_scale, quantise_wrong_axis, unpack_wrong_nibble

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = detect_cpu()
BY_NAME = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name, indirect=True)


@pytest.fixture
def scheme(request):
    """One scheme of each storage form. A fixture asks whether it works here: the import of bitsandbytes takes seconds, which
    every collection would pay."""
    if reason := request.param.why_absent(CPU):
        pytest.skip(reason)
    return request.param


def case(dtype=torch.float32, n=48, k=192):
    """A weight whose outputs have sizes from 1/30 to 30, and inputs with an outlier."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-1.5, 1.5, n)[:, None]
    x = torch.randn(2, 5, k, generator=generator)
    x[0, 0, 3] = 20.0
    return weight.to(dtype), x.to(dtype)


def test_the_first_value_of_a_pair_is_in_the_upper_four_bits():
    assert pack_int4(torch.tensor([[-8, 7, 1, -2]])).tolist() == [[0x0F, 0x96]]
    values = torch.randint(-8, 8, (5, 14), generator=torch.Generator().manual_seed(1))
    assert (unpack_int4(pack_int4(values)) == values).all()
    assert (unpack_wrong_nibble(pack_int4(values)) != values).any()


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_are_within_the_bounds_and_bytes_are_those_of_the_format(scheme, dtype, caplog):
    weight, x = case(dtype)
    layer = scheme.convert(weight, CPU)
    assert weight_bytes_of([layer]) == scheme.weight_bytes(*weight.shape)
    (error, of_output), (_, of_weight) = output_error(scheme, weight, x, layer(x)), stored_error(scheme, weight, layer)
    assert 0 < error < 0.2
    # The bound is tight: some weight is near the middle between two values.
    assert 0.8 < of_weight <= 1 and 0.01 < of_output <= 1
    # The bytes are still those of the format after a call, in which bitsandbytes moves its scales.
    assert weight_bytes_of([layer]) == scheme.weight_bytes(*weight.shape)
    assert not caplog.messages, "a notebook would show them for each of hundreds of products"


def int8_inputs(x):
    """Inputs that LLM.int8() multiplies: in each row 8 bits with one scale, and 16 bits in columns with an outlier."""
    x = x.half().double()
    outliers = x.abs() >= 6
    scale = x.masked_fill(outliers, 0).abs().amax(-1, keepdim=True) / 127
    return torch.where(outliers.flatten(0, -2).any(0), x, (x / scale).round() * scale)


@BY_NAME
def test_the_kernel_multiplies_the_weights_that_the_bytes_represent(scheme):
    weight, x = case()
    layer = scheme.convert(weight, CPU)
    inputs = int8_inputs(x) if isinstance(scheme, LlmInt8) else x.double()
    expected = F.linear(inputs, represented_weight(layer))
    assert ((layer(x).double() - expected).norm() / expected.norm()).item() < 1e-3


def test_the_bound_of_int8_products_contains_the_error_of_their_inputs():
    """Inputs that are rounded by up to half a step, all in the same direction, and weights without an error."""
    scheme, K = LlmInt8(), 192
    # A step of the inputs is 0.03. 3.81 is 127 steps, and 0.0147 is 0.49 steps, which become 0.
    x = torch.full((1, K), 0.0147)
    x[0, 0] = 3.81
    weight, by_hand = torch.full((4, K), 2.0), torch.full((1, 4), 2 * 3.81)
    # Half a step, with the rounding of the scale and of the values to fp16, for the inputs (sum over K) and for a weight.
    sum_x = 3.81 + (K - 1) * 0.0147
    dx, dw = K * 1.001 * 0.015 + sum_x / 2048, 1.001 / 127 + 2 / 2048
    rounding = 1.5 / 1024 + K / 2**23
    bound = sum_x * dw + dx * 2 + dx * dw + rounding * (sum_x + dx) * (2 + dw)
    ratio = (K - 1) * 0.0147 * 2 / bound
    assert 0.9 < ratio <= 1
    assert output_error(scheme, weight, x, by_hand)[1] == pytest.approx(ratio, rel=1e-4)
    if not scheme.why_absent(CPU):
        layer = scheme.convert(weight, CPU)
        assert output_error(scheme, weight, x, layer(x))[1] == pytest.approx(ratio, rel=1e-2)


def output_ratio(scheme, layer):
    weight, x = case()
    return stored_error(scheme, weight, layer)[1], output_error(scheme, weight, x, layer(x))[1]


def test_a_wrong_nibble_is_found(monkeypatch):
    layer = Int4WeightOnly().convert(case()[0], CPU)
    assert max(output_ratio(Int4WeightOnly(), layer)) <= 1
    monkeypatch.setattr(quantized_linears, "unpack_int4", unpack_wrong_nibble)
    assert min(output_ratio(Int4WeightOnly(), layer)) > 1


def test_the_wrong_nibble_of_bitsandbytes_is_found(monkeypatch):
    scheme = Nf4(double=True)
    if reason := scheme.why_absent(CPU):
        pytest.skip(reason)
    layer = scheme.convert(case()[0], CPU)
    monkeypatch.setattr(layer_checks, "unpack_int4", unpack_wrong_nibble)
    of_weight, of_output = output_ratio(scheme, layer)
    # The kernel is right, and what this library decodes is not.
    assert of_weight > 1 >= of_output


@pytest.mark.parametrize("fault", [quantise_without_scale, quantise_wrong_axis, "not applied"])
def test_a_missing_scale_and_a_scale_of_the_wrong_axis_are_found(fault, monkeypatch):
    weight = case(n=48, k=48)[0]
    layer = Int8Linear(weight)
    x = case(k=48)[1]
    if fault == "not applied":
        monkeypatch.setattr(Int8Linear, "forward", lambda self, x: F.linear(x, self.q_NK.to(x.dtype)))
    else:
        layer.q_NK, layer.scale_N = fault(weight)
    scheme = Int8WeightOnly()
    of_weight, of_output = stored_error(scheme, weight, layer)[1], output_error(scheme, weight, x, layer(x))[1]
    assert of_output > 1 and (of_weight > 1) == (fault != "not applied")


def test_nan_is_beyond_every_bound():
    scheme = Int8WeightOnly()
    weight, x = case()
    layer = scheme.convert(weight, CPU)
    y = layer(x)
    y[0, 0, 0] = math.nan
    assert math.isnan(output_error(scheme, weight, x, y)[1])


def test_a_group_of_zeros_has_no_error():
    weight, x = case()
    weight[3] = 0
    for scheme in (Int8WeightOnly(), Int4WeightOnly()):
        layer = scheme.convert(weight, CPU)
        assert not layer(x)[..., 3].any()
        assert max(stored_error(scheme, weight, layer)[1], output_error(scheme, weight, x, layer(x))[1]) <= 1


def scaled_mm(a, b, scale_a, scale_b, out_dtype, fault=""):
    """What `torch._scaled_mm` computes, in float64."""
    rows = scale_a.double() if fault != "one scale" else scale_a.double().flatten()[:1]
    return ((a.double() @ b.double()) * rows * (scale_b.double() if fault != "no scale" else 1)).to(out_dtype)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_fp8_is_within_its_bound_and_a_missing_scale_is_not(by_row, storage, monkeypatch):
    """The product of fp8 units is replaced by float64, so the scales and the bound are tested without a GPU."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight, x = case()
    scheme, layer = Fp8(by_row), Fp8Linear(weight, storage, by_row)
    assert weight_bytes_of([layer]) == scheme.weight_bytes(*weight.shape)
    (error, of_output), (_, of_weight) = output_error(scheme, weight, x, layer(x)), stored_error(scheme, weight, layer)
    assert error < 0.05 and 0.9 < of_weight <= 1 and of_output <= 1
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: scaled_mm(*a, **k, fault="no scale"))
    assert output_error(scheme, weight, x, layer(x))[1] > 1
    if by_row:
        monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: scaled_mm(*a, **k, fault="one scale"))
        assert output_error(scheme, weight, x, layer(x))[1] > 1


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_layer_reads_its_stored_codes_in_every_call(kind, monkeypatch):
    """A layer that kept converted weights would be timed without the conversion, and would read more bytes than its rows say."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight, x = case()
    make = {"int8": Int8Linear, "int4": Int4Linear, "fp8": lambda weight: Fp8Linear(weight, torch.float8_e4m3fn, True)}
    layer = make[kind](weight)
    assert layer(x).any()
    for codes in (one for one in layer.buffers() if one.dtype != torch.float32):
        codes.copy_(pack_int4(torch.zeros_like(weight)) if kind == "int4" else torch.zeros_like(codes))
    assert not layer(x).any()


def test_what_cannot_run_here_has_a_reason(monkeypatch):
    assert Fp8(False).why_absent(CPU).startswith("unsupported: this CPU has no fp8")
    monkeypatch.setattr(quantized_linears.importlib.util, "find_spec", lambda name: None)
    assert "next step: pip install bitsandbytes" in Nf4(False).why_absent(CPU)


def test_only_the_layers_of_blocks_are_replaced():
    class Model(torch.nn.Module):
        def __init__(self, bias):
            super().__init__()
            self.model = torch.nn.Module()
            self.model.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(32, 64, bias=bias))])
            self.head = torch.nn.Linear(64, 8, bias=False)

    model = Model(bias=False)
    assert list(replace_linears(model, Int8WeightOnly(), CPU)) == ["model.layers.0.0"]
    assert type(model.head) is torch.nn.Linear
    with pytest.raises(HyperionError, match="a layer with a bias"):
        replace_linears(Model(bias=True), Int8WeightOnly(), CPU)


def test_the_profiler_names_the_operator_of_the_library():
    x = case()[1]
    assert what_ran(lambda: x @ x.mT, CPU).startswith("aten::")
    if not LlmInt8().why_absent(CPU):
        layer = LlmInt8().convert(case()[0], CPU)
        assert what_ran(lambda: layer(x), CPU).startswith(("MatMul8bit", "bitsandbytes::"))
