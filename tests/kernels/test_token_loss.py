"""The loss of tokens against float64; its kernel in Triton's interpreter, and compiled for AMD and NVIDIA GPUs."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hyperion.data.packing import IGNORE_INDEX
from hyperion.kernels.token_loss import HAS_TRITON, padded_classes, token_loss

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: it comes with PyTorch for GPUs")

# Rows of several blocks with a remainder, one row whose largest logit comes last, ignored and impossible targets.
INTERPRETED = """
import torch
from hyperion.kernels.token_loss_triton import nll_and_slope
torch.manual_seed(0)
M, V, P, BLOCK = 6, 300, 320, 64
logits = torch.randn(M, P) * 20; logits[3, V - 1] = 90; logits[:, V:] = 1e4
logits[1, :BLOCK] = float("-inf")  # a whole block, the first one
targets = torch.tensor([0, 299, 5, 299, -100, 300])
double, untouched = logits[:5, :V].double().requires_grad_(), logits.clone()
exact = torch.nn.functional.cross_entropy(double, targets[:5], ignore_index=-100, reduction="none")
exact.sum().backward()
for slope in (0.0, 2.0):
    nll = torch.full((M,), 7.0)
    nll_and_slope[(M,)](logits, targets, nll, -100, P, V, slope, BLOCK=BLOCK, STAGES=1)
    assert torch.allclose(nll[:5].double(), exact, atol=1e-5, rtol=1e-6), (nll, exact)
    assert nll[4] == 0 and nll[5].isnan()
    assert slope or torch.equal(logits, untouched)
assert torch.allclose(logits[:5, :V].double(), 2 * double.grad, atol=2e-6) and (logits[:5, V:] == 0).all()
print("equal")
"""


def test_rows_of_logits_are_aligned():
    assert [padded_classes(classes) for classes in (1, 64, 65, 50257)] == [64, 64, 128, 50304]


def test_it_is_the_negative_log_likelihood_in_float64():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(37, 8, dtype=torch.float64)
    targets = torch.tensor([0, 36, 5, IGNORE_INDEX, 2])
    expected = F.cross_entropy(x @ weight.T, targets, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(token_loss(x, weight, targets).double(), expected, atol=1e-5, rtol=1e-5)


@needs_triton
def test_the_kernel_agrees_with_float64():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr


@needs_triton
@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_head_gets_no_gradient_of_its_weight(trained):
    from hyperion.kernels.token_loss_triton import _backward

    x, weight, slope = torch.ones(3, 2), torch.ones(5, 2), torch.ones(3, 5)
    context = SimpleNamespace(saved_tensors=(x, weight, slope), needs_input_grad=(True, trained))
    of_x, of_weight, *_ = _backward(context, torch.ones(3), slope)
    assert of_x.shape == x.shape and (of_weight is None) != trained


@needs_triton
@pytest.mark.parametrize(("backend", "architecture", "width"), [("hip", "gfx90a", 64), ("hip", "gfx942", 64), ("cuda", 90, 32)])
def test_the_kernel_compiles_for_devices_that_are_not_here(backend, architecture, width):
    import triton
    from triton.backends.compiler import GPUTarget

    from hyperion.kernels import token_loss_triton as kernels

    constants = {"columns": 50304, "classes": 50257, "slope": 1.0, "BLOCK": kernels.BLOCK, "STAGES": kernels.STAGES}
    pointers = {"logits": "*bf16", "targets": "*i64", "nll": "*fp32", "ignored": "i32"}
    source = triton.compiler.ASTSource(
        fn=kernels.nll_and_slope, signature=pointers | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    built = triton.compile(source, target=GPUTarget(backend, architecture, width), options={"num_warps": kernels.WARPS})
    assert built.asm["hsaco" if backend == "hip" else "cubin"]
