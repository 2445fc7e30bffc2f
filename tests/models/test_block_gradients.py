"""Gradients of a block against float64; their kernels in Triton's interpreter, and compiled for AMD's and NVIDIA's devices."""

import math
import os
import subprocess
import sys
import types

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.profiler import ProfilerActivity, profile

from hyperion.models import TransformerConfig, TransformerLM, block_gradients
from hyperion.models.token_loss import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: it comes with PyTorch for GPUs")

# Strips with a remainder, more than one block of columns, columns that fill no block.
INTERPRETED = """
import torch, torch.nn.functional as F
from hyperion.models.block_gradient_kernels import gelu_strip, joined_strip
torch.manual_seed(0)
M, D, STRIP, STRIPS = 11, 96, 4, 3
def close(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)
x, y, z = torch.randn(M, D), torch.randn(M, D), torch.randn(M, D)

double = x.double().requires_grad_()
F.gelu(double, approximate="tanh").backward(y.double())
found, sums = torch.full_like(x, 7.0), torch.full((STRIPS, D), 7.0)
gelu_strip[(2, STRIPS)](y, x, found, sums, M, D, STRIP, 2, 64, 1)
close(found, double.grad); close(sums.sum(0), double.grad.sum(0))

joined, sums = torch.full((M, 3 * D), 7.0), torch.full((STRIPS, 3 * D), 7.0)
joined_strip[(2, STRIPS, 3)](x, y, z, joined, sums, M, D, STRIP, 2, 64, 1)
assert torch.equal(joined, torch.cat([x, y, z], 1)); close(sums.sum(0), joined.double().sum(0))
print("equal")
"""


@needs_triton
def test_the_kernels_agree_with_float64():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr


KERNELS = {
    "gelu_strip": ("of_y products gradient", 3072),
    "joined_strip": ("first_part second_part third_part joined", 768),
}


@needs_triton
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("backend", "architecture", "width"), [("hip", "gfx90a", 64), ("hip", "gfx942", 64), ("cuda", 90, 32)])
def test_the_kernels_compile_for_devices_that_are_not_here(name, backend, architecture, width):
    import triton
    from triton.backends.compiler import GPUTarget

    from hyperion.models import block_gradient_kernels as kernels

    half, columns = KERNELS[name]
    tile = {"gelu_strip": kernels.GELU, "joined_strip": kernels.JOINED}[name]
    constants = {
        "columns": columns, "STRIP": kernels.STRIP, "ROWS": tile.rows, "BLOCK": tile.columns, "STAGES": tile.stages,
    }  # fmt: skip
    signature = dict.fromkeys(half.split(), "*bf16") | {"sums": "*fp32", "rows": "i32"}
    source = triton.compiler.ASTSource(
        fn=getattr(kernels, name), signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    built = triton.compile(source, target=GPUTarget(backend, architecture, width), options={"num_warps": tile.warps})
    assert built.asm["hsaco" if backend == "hip" else "cubin"]


def of_gelu(of_y_ME, x_ME):
    """What the operator of that kernel gives, by PyTorch."""
    x, scale = x_ME.float(), (2 / math.pi) ** 0.5
    tanh = torch.tanh(scale * (x + 0.044715 * x**3))
    slope = (1 + tanh) / 2 + x * (1 - tanh**2) / 2 * scale * (1 + 3 * 0.044715 * x**2)
    of_x_ME = of_y_ME.float() * slope
    return of_x_ME.to(x_ME.dtype), of_x_ME.sum(0)


def of_joined(*parts_MD):
    joined_ME = torch.cat(parts_MD, 1)
    return joined_ME, joined_ME.float().sum(0)


def test_the_functions_around_the_kernels_have_the_gradients_of_float64(monkeypatch, one_thread):
    """Compiled as on a GPU, down to the kernels, in whose place PyTorch's operators stand: those have tests of their own."""
    kernels = types.ModuleType("hyperion.models.block_gradient_kernels")
    kernels.gelu_gradient, kernels.joined_gradient, made = of_gelu, of_joined, []
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(block_gradients, "applies_to", lambda x: torch.compiler.is_compiling() and x.dtype == torch.bfloat16)
    model, tokens = with_biases(TransformerConfig(vocab_size=50, context=9, width=24, heads=2, layers=2), "cpu")
    compiled = torch.compile(model, backend=lambda graph, inputs: made.append(graph) or aot_eager(graph, inputs), fullgraph=True)
    require_gradients_of_float64(model, compiled, tokens, "cpu")
    assert "autograd_function_apply" in made[0].code, "the block was made of its own layers"


def with_biases(config, device):
    """A model whose biases are not zero, and tokens."""
    torch.manual_seed(0)
    model = TransformerLM(config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, torch.randint(config.vocab_size, (7, config.context + 1)).to(device)


def require_gradients_of_float64(model, compiled, tokens, device):
    """Near those of the model in float64, as near as the uncompiled model's under the same autocast."""
    exact = TransformerLM(model.config).double().to(device)
    exact.load_state_dict(model.state_dict())
    autocast = torch.autocast(device, torch.bfloat16)
    found, ours = gradients(model, autocast(compiled), tokens)
    expected, true = gradients(exact, exact, tokens)
    plain, _ = gradients(model, autocast(model.forward), tokens)
    assert ours == pytest.approx(true, rel=2e-3)
    for name, gradient in expected.items():
        if name.endswith("key.bias"):  # softmax does not see it: its gradient is zero
            continue
        error, of_plain = ((g[name] - gradient).norm() / gradient.norm() for g in (found, plain))
        assert error < max(0.02, 1.5 * of_plain), (name, error, of_plain)


def gradients(model, loss, tokens):
    """Of each parameter in float64, and the loss."""
    model.zero_grad()
    value = loss(tokens[:, :-1], tokens[:, 1:]).mean()
    value.backward()
    return {name: parameter.grad.double().cpu() for name, parameter in model.named_parameters()}, value.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_compiled_block_has_the_gradients_of_float64():
    # A width that fills no block of columns, and rows that leave a remainder of a strip.
    model, tokens = with_biases(TransformerConfig(vocab_size=500, context=37, width=96, heads=4, layers=3), "cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as kernels:
        require_gradients_of_float64(model, torch.compile(model, fullgraph=True), tokens, "cuda")
    made = {event.key for event in kernels.key_averages()}
    assert {"gelu_strip", "joined_strip"} <= made, "the block was made of its own layers"
