"""Gradients of a block against float64; their kernels in Triton's interpreter, and compiled for AMD and NVIDIA GPUs."""

import math
import os
import subprocess
import sys
import types

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.profiler import ProfilerActivity, profile

from hyperion.kernels import block_gradients
from hyperion.kernels.token_loss import HAS_TRITON
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.models.transformer import LayerNorm

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: it comes with PyTorch for GPUs")

# Strips with a remainder, more than one block of columns, columns that fill no block.
INTERPRETED = """
import torch, torch.nn.functional as F
from hyperion.kernels.block_gradients_triton import gelu_strip, joined_strip, norm_strip, position_sum
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

double, weight = x.double().requires_grad_(), torch.randn(D, dtype=torch.double, requires_grad=True)
bias = torch.zeros(D, dtype=torch.double, requires_grad=True)
normed = F.layer_norm(double, (D,), weight, bias, 1e-5)
torch.autograd.backward([normed, double.clone()], [y.double(), z.double()])
variance, mean = torch.var_mean(x, -1, correction=0)
expected = torch.stack([weight.grad, bias.grad, double.grad.sum(0), z.double().sum(0)])
for count in (2, 4):
    found, sums = torch.full_like(x, 7.0), torch.full((STRIPS, count, D), 7.0)
    norm_strip[(STRIPS,)](
        x, y, z, mean, torch.rsqrt(variance + 1e-5), weight.float(), found, sums, M, D, count, STRIP, 2, 128, 1
    )
    close(found, double.grad); close(sums.sum(0), expected[:count])

batch, sums = torch.randn(5, M, D), torch.full((M, D), 7.0)
position_sum[(2, 3)](batch, sums, 5, M, D, 4, 64, 1)
close(sums, batch.double().sum(0))
print("equal")
"""


@needs_triton
def test_the_kernels_agree_with_float64():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr


# Columns, and arguments by type.
KERNELS = {
    "gelu_strip": (3072, {"*bf16": "grad_y x_values gradient", "*fp32": "sums", "i32": "rows"}),
    "joined_strip": (768, {"*bf16": "first_part second_part third_part joined", "*fp32": "sums", "i32": "rows"}),
    "norm_strip": (768, {"*bf16": "values grad_y grad_residual weight gradient", "*fp32": "means inverses sums", "i32": "rows"}),
    "position_sum": (768, {"*bf16": "values", "*fp32": "sums", "i32": "sequences rows"}),
}


@needs_triton
@pytest.mark.parametrize(
    ("name", "columns"), [*((name, usual) for name, (usual, _) in KERNELS.items()), ("norm_strip", 2048), ("norm_strip", 5120)]
)
@pytest.mark.parametrize(("backend", "architecture", "width"), [("hip", "gfx90a", 64), ("hip", "gfx942", 64), ("cuda", 90, 32)])
def test_the_kernels_compile_for_devices_that_are_not_here(name, columns, backend, architecture, width):
    import triton
    from triton.backends.compiler import GPUTarget

    from hyperion.kernels import block_gradients_triton as kernels

    _, arguments = KERNELS[name]
    tile = {
        "gelu_strip": kernels.GELU,
        "joined_strip": kernels.JOINED,
        "norm_strip": kernels.norm_tile(columns),
        "position_sum": kernels.POSITIONS,
    }[name]
    signature, kernel = ({one: kind for kind, names in arguments.items() for one in names.split()}, getattr(kernels, name))
    constants = {"columns": columns, "ROWS": tile.rows, "BLOCK": tile.columns, "STAGES": tile.stages}
    constants |= {"STRIP": kernels.STRIP, "SUMS": 4}
    constants = {one: constants[one] for one in kernel.arg_names if one in constants}
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    built = triton.compile(source, target=GPUTarget(backend, architecture, width), options={"num_warps": tile.warps})
    assert built.asm["hsaco" if backend == "hip" else "cubin"]
    assert built.metadata.shared <= 64 * 1024 and tile.warps * width <= 1024, "more than MI200's have for a program"


def of_gelu(of_y_ME, x_ME):
    """The result of that kernel's operator, computed by PyTorch."""
    x, scale = x_ME.float(), (2 / math.pi) ** 0.5
    tanh = torch.tanh(scale * (x + 0.044715 * x**3))
    slope = (1 + tanh) / 2 + x * (1 - tanh**2) / 2 * scale * (1 + 3 * 0.044715 * x**2)
    of_x_ME = of_y_ME.float() * slope
    return of_x_ME.to(x_ME.dtype), of_x_ME.sum(0)


def of_joined(*parts_MD):
    joined_ME = torch.cat(parts_MD, 1)
    return joined_ME, joined_ME.float().sum(0)


def of_norm(x_BTD, of_y_BTD, of_x_BTD, mean_BT1, inverse_BT1, weight_D, biases):
    normed_BTD, of_y_BTD = (x_BTD.float() - mean_BT1) * inverse_BT1, of_y_BTD.float()
    weighed_BTD = of_y_BTD * weight_D.float()
    shared_BT1, along_BT1 = weighed_BTD.mean(-1, keepdim=True), (weighed_BTD * normed_BTD).mean(-1, keepdim=True)
    gradient_BTD = inverse_BT1 * (weighed_BTD - shared_BT1 - normed_BTD * along_BT1) + of_x_BTD.float()
    summed = of_y_BTD * normed_BTD, of_y_BTD, gradient_BTD, of_x_BTD.float()
    return gradient_BTD.to(x_BTD.dtype), torch.stack([part.sum((0, 1)) for part in summed[: 4 if biases else 2]])


def of_positions(of_x_BTD):
    return of_x_BTD.float().sum(0)


@pytest.fixture
def stand_ins(monkeypatch):
    """Replace the kernels, which have their own tests, by PyTorch operators, and compile as on a GPU.

    Returns the number of biases that each norm sums.
    """
    kernels = types.ModuleType("hyperion.kernels.block_gradients_triton")
    kernels.gelu_gradient, kernels.joined_gradient = of_gelu, of_joined
    kernels.norm_gradient, kernels.position_gradient = of_norm, of_positions
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)

    def applies_to(x, dtype=torch.bfloat16):
        return torch.compiler.is_compiling() and x.dtype == dtype

    forked_norm, norms = block_gradients.forked_norm, []

    def counted(x_BTD, norm, *biases_D):
        norms.append(len(biases_D))
        return forked_norm(x_BTD, norm, *biases_D)

    monkeypatch.setattr(block_gradients, "applies_to", applies_to)
    monkeypatch.setattr(block_gradients, "forked_norm", counted)
    return norms


@pytest.mark.slow
def test_the_functions_around_the_kernels_have_the_gradients_of_float64(stand_ins, one_thread):
    made = []
    model, tokens = with_biases(TransformerConfig(vocab_size=50, context=9, width=24, heads=2, layers=2), "cpu")
    compiled = torch.compile(model, backend=lambda graph, inputs: made.append(graph) or aot_eager(graph, inputs), fullgraph=True)
    require_gradients_of_float64(model, compiled, tokens, "cpu")
    assert "autograd_function_apply" in made[0].code, "the block was made of its own layers"
    assert stand_ins == [0, 2, 0, 2], "two norms in each of two blocks"


@pytest.mark.slow
@pytest.mark.parametrize("why", ["dropout", "replaced"])
def test_biases_get_their_gradients_from_their_layers_where_something_comes_between(why, stand_ins, one_thread):
    model, tokens = with_biases(TransformerConfig(vocab_size=50, context=9, width=24, heads=2, layers=2), "cpu")
    for block in model.blocks:
        if why == "dropout":
            block.dropout = 1e-9  # so little that none is dropped
        else:
            block.mlp.down.__class__ = type("Replaced", (torch.nn.Linear,), {})
    require_gradients_of_float64(model, torch.compile(model, backend=aot_eager, fullgraph=True), tokens, "cpu")
    assert stand_ins == [0, 0, 0, 0]


def test_a_norm_that_was_given_biases_makes_their_gradients_though_nothing_is_compiled(stand_ins):
    """A block whose compilation broke off behind attention has given them away already."""
    norm, x_BTD = LayerNorm(24), torch.randn(3, 5, 24).bfloat16()
    before, after = (torch.zeros(24, requires_grad=True) for _ in range(2))
    stream, normed = norm.fork(x_BTD.requires_grad_(), before, after)
    (2 * stream.float() + normed.float()).sum().backward()
    torch.testing.assert_close(before.grad, x_BTD.grad.float().sum((0, 1)), rtol=0.02, atol=0.02)
    torch.testing.assert_close(after.grad, torch.full((24,), 2.0 * 15))


@pytest.mark.slow
def test_biases_too_small_for_the_streams_grid_count_on_average(stand_ins, one_thread):
    """After a first step they are a tenth of what lies between two numbers of the residual stream. Added to it by themselves
    they would be rounded away; in a product's result, which is finer, they are not."""
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(vocab_size=50, context=64, width=24, heads=2, layers=1))
    block, x_BTD = model.blocks[0], (0.05 * torch.randn(64, 64, 24)).bfloat16()
    compiled, autocast = torch.compile(block, backend=aot_eager, fullgraph=True), torch.autocast("cpu", torch.bfloat16)
    without = autocast(compiled)(x_BTD).float()
    with torch.no_grad():
        for layer in (block.attention.output, block.mlp.down):
            layer.bias.fill_(2e-5)
    shift = (autocast(compiled)(x_BTD).float() - without).mean().item()
    assert shift == pytest.approx(4e-5, rel=0.2)


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
    assert {"gelu_strip", "joined_strip", "norm_strip", "position_sum"} <= made, "the block was made of its own layers"
