"""Products in fp8 against float64 of the same quantised operands; the model's blocks, and nothing else, train in it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import choose_precision
from hyperion.training.float8 import FNUZ, OCP, Float8Linear, float8_formats, quantized, to_float8

CPU = replace(detect_cpu(), isa=("avx2",))


def gpu(kind, arch):
    return replace(CPU, kind=kind, arch=arch, torch_device="cuda:0")


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [OCP.forward, OCP.gradient, FNUZ.forward, FNUZ.gradient])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_scale_of_its_own_keeps_relative_rounding_whatever_a_tensors_size(dtype, size):
    x = torch.randn(64, 32) * size
    x8, scale = quantized(x, dtype)
    back = x8.double() * scale.double()
    large = x.abs() > 1e-2 * x.abs().max()  # far below the largest number begin the subnormals
    step = 2**-4 if "e4m3" in str(dtype) else 2**-3  # half a unit in the last place
    assert ((back - x.double()).abs()[large] <= step * x.double().abs()[large]).all()
    assert x8.float().abs().max() == torch.finfo(dtype).max


def test_zeros_stay_zeros_and_what_is_infinite_shows():
    zeros, scale = quantized(torch.zeros(16, 16), OCP.forward)
    assert not zeros.float().any() and torch.isfinite(scale)
    for bad in (float("inf"), float("nan")):
        x8, scale = quantized(torch.full((16, 16), bad), OCP.gradient)
        assert not torch.isfinite(x8.float() * scale).any()


def reference_product(x, w, x_dtype, w_dtype):
    """Return x·wᵀ in float64, computed from the same quantized operands as Float8Product."""
    (x8, x_scale), (w8, w_scale) = quantized(x, x_dtype), quantized(w, w_dtype)
    return torch.nn.functional.linear(x8.double() * x_scale.double(), w8.double() * w_scale.double())


def test_all_three_products_are_those_of_the_quantised_operands():
    x = torch.randn(48, 64, requires_grad=True)
    layer = Float8Linear(nn.Linear(64, 32), OCP)
    g = torch.randn(48, 32).bfloat16()
    y = layer(x)
    y.backward(g)
    with torch.no_grad():
        wanted = reference_product(x, layer.weight, OCP.forward, OCP.forward) + layer.bias.double()
        dx = reference_product(g, layer.weight.t(), OCP.gradient, OCP.forward)
        dw = reference_product(g.t(), x.t(), OCP.gradient, OCP.forward)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    for found, exact in ((y, wanted), (x.grad, dx), (layer.weight.grad, dw)):
        # bfloat16 rounds the sum, and then the sum with the bias.
        assert ((found.double() - exact).abs() <= 2**-7 * exact.abs().max()).all()
    torch.testing.assert_close(layer.bias.grad, g.sum(0).float(), rtol=2**-7, atol=0.1)
    # And they are products of fp8: nearer to the quantised reference than to the operands' own product by far.
    with torch.no_grad():
        stray = (wanted - torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())).abs().max()
    assert stray > 4 * (y.double() - wanted).abs().mean()


def language_model():
    return TransformerLM(TransformerConfig(vocab_size=19, context=16, width=32, heads=2, layers=2))


def test_only_linear_layers_of_blocks_are_replaced_and_parameters_keep_names_and_values():
    model = language_model()
    before = dict(model.named_parameters())
    model = to_float8(model, OCP)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    kinds = {type(module) for block in model.blocks for module in block.modules() if isinstance(module, nn.Linear)}
    assert kinds == {Float8Linear} and type(model.token_embedding) is nn.Embedding


@pytest.mark.slow
@pytest.mark.long
def test_a_model_learns_in_it_as_in_bf16():
    ids = torch.randint(19, (4, 17))
    losses = {}
    for name in ("bf16", "fp8"):
        torch.manual_seed(1)
        model = language_model()
        model = to_float8(model, OCP) if name == "fp8" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(40):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = float(loss.detach())
    assert losses["bf16"] < 1.5 and losses["fp8"] == pytest.approx(losses["bf16"], rel=0.1)


def test_devices_without_it_say_why_and_others_give_their_own_formats():
    assert float8_formats(gpu("cuda", "sm_90")) == OCP == float8_formats(gpu("rocm", "gfx950"))
    assert float8_formats(gpu("rocm", "gfx942")) == FNUZ
    without = {"gfx90a has no fp8": gpu("rocm", "gfx90a"), "sm_80": gpu("cuda", "sm_80"), "no fp8 instructions": CPU}
    for why, device in without.items():
        for ask in (lambda d=device: float8_formats(d), lambda d=device: choose_precision(d, "fp8")):
            with pytest.raises(HyperionError, match=why):
                ask()
    chosen = choose_precision(gpu("cuda", "sm_90"), "fp8")
    assert chosen.dtype == "fp8" and "e4m3" in chosen.reason and "bf16" in chosen.reason


def test_a_compiler_takes_it_whole_and_the_gradients_are_the_same():
    x, g = torch.randn(32, 64), torch.randn(32, 32).bfloat16()
    layer = Float8Linear(nn.Linear(64, 32), OCP)
    gradients = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        function(leaf).backward(g)
        gradients.append((leaf.grad, layer.weight.grad))
        layer.zero_grad()
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=2**-7, atol=1e-3)


@pytest.mark.slow
def test_a_compiled_block_makes_all_its_products_in_it():
    block = to_float8(language_model(), OCP).blocks[0]
    counted = []

    def counting(graph, inputs):
        counted.append(sum("autograd_function" in str(node.target) for node in graph.graph.nodes))
        return graph

    x = torch.randn(1, 16, 32)
    torch.testing.assert_close(torch.compile(block, backend=counting)(x), block(x), rtol=0, atol=2e-3)
    assert counted == [6]


@pytest.mark.parametrize("features, tokens", [((20, 32), 16), ((32, 32), 10)])
def test_sizes_that_the_units_do_not_take_are_refused(features, tokens):
    with pytest.raises(HyperionError, match="multiples of 16"):
        Float8Linear(nn.Linear(*features), OCP)(torch.randn(tokens, features[0]))
