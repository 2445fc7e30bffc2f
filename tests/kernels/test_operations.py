"""The kernels of the chapter on kernels: references, refusals, the interpreter, planted bugs, and builds for GPUs."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.kernels import operations
from hyperion.kernels.attention_float64 import attention_tolerance, exact_attention
from hyperion.kernels.availability import why_no_kernels, why_no_triton
from hyperion.kernels.token_loss import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: it comes with PyTorch for GPUs")
pytestmark = pytest.mark.usefixtures("one_thread")


def random_attention(H=4, K=2, T=19, D=8, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, heads, T, D, dtype=dtype) for heads in (H, K, K, H)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_reference_is_the_attention_of_torch(causal, key_heads):
    q, k, v, _ = random_attention(K=key_heads)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(operations.attention(q, k, v, causal), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_exact_attention_in_chunks_has_the_gradients_of_autograd(causal, monkeypatch):
    monkeypatch.setattr("hyperion.kernels.attention_float64._SCORES", 2 * 19 * 5)  # five queries of each head in a chunk
    q, k, v, grad = random_attention()
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    output = operations.attention_reference(*leaves, causal)
    output.backward(grad)
    for head in (0, 1):
        queries = slice(2 * head, 2 * head + 2)
        found = exact_attention(q[1, queries], k[1, head], v[1, head], grad[1, queries], causal)
        expected = output[1, queries], leaves[0].grad[1, queries], leaves[1].grad[1, head], leaves[2].grad[1, head]
        pairs = zip((found.output, found.grad_q, found.grad_k, found.grad_v), expected, strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other.detach(), atol=1e-12, rtol=1e-12)


def test_attention_in_bf16_is_within_the_tolerance_and_a_missing_scale_is_not():
    """The backend of torch for the CPU stores the probabilities in the dtype of the inputs, as the kernels do."""
    q, k, v, grad = random_attention(H=2, K=2, T=150, D=64, dtype=torch.bfloat16)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    output.backward(grad)
    exact = exact_attention(q[0, :1], k[0, 0], v[0, 0], grad[0, :1])
    unscaled = exact_attention(q[0, :1] * 8, k[0, 0], v[0, 0], grad[0, :1])

    def error(found, expected):
        return ((found.double() - expected).norm() / expected.norm()).item()

    forward, backward = (attention_tolerance(torch.bfloat16, which) for which in (False, True))
    assert error(output[0, :1], exact.output) < forward < 0.1 * error(unscaled.output, exact.output)
    pairs = (leaves[0].grad[0, :1], exact.grad_q), (leaves[1].grad[0, 0], exact.grad_k), (leaves[2].grad[0, 0], exact.grad_v)
    assert all(error(*pair) < backward for pair in pairs)


def test_flops_count_half_of_a_causal_matrix_and_a_backward_pass_two_and_a_half_times():
    assert operations.attention_flops(2, 3, 10, 5, True) == {"forward": 2 * 3 * 2 * 100 * 5, "backward": 5 * 3 * 2 * 100 * 5}
    assert operations.attention_flops(1, 1, 10, 5, False)["forward"] == 4 * 100 * 5


def test_the_references_of_the_other_operations():
    torch.manual_seed(0)
    x, y, weight, bias = torch.randn(3, 7), torch.randn(3, 7), torch.randn(7), torch.randn(7)
    assert operations.implementation(x) == "reference"
    assert torch.equal(operations.vector_add(x, y), x + y)
    assert torch.equal(operations.softmax(x), torch.softmax(x, 1))
    assert torch.equal(operations.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (7,), weight, bias))
    assert torch.equal(operations.matmul(x, y.T), x @ y.T)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda x: operations.vector_add(x, x[:2]), r"y is \[2, 6\] float32"),
        (lambda x: operations.vector_add(x, x.double()), "y is .* float64"),
        (lambda x: operations.softmax(x[0]), r"the input is \[6\]"),
        (lambda x: operations.softmax(x[:0]), r"the input is \[0, 6\]"),
        (lambda x: operations.softmax(x.long()), "int64"),
        (lambda x: operations.layer_norm(x, x[0], x[0, :5]), "weight"),
        (lambda x: operations.matmul(x, x), r"A is \[4, 6\] float32, B is \[4, 6\]"),
        (lambda x: operations.attention(x, x, x), "four dimensions|a tensor is"),
        (lambda x: operations.attention(*random_attention(H=4, K=3)[:3]), "queries .* keys"),
        (lambda x: operations.attention(*random_attention()[:2], torch.zeros(1)), "values"),
    ],
)
def test_bad_input_is_refused(call, why):
    with pytest.raises(HyperionError, match=why):
        call(torch.randn(4, 6))


def test_a_device_without_kernels_has_a_reason_and_a_next_step(monkeypatch):
    from hyperion.hardware import detect
    from hyperion.kernels import availability

    assert "next step" in why_no_kernels(detect()) or detect().kind != "cpu"
    monkeypatch.setattr(availability, "HAS_TRITON", False)
    assert why_no_triton().startswith("unavailable: Triton")
    monkeypatch.setattr(availability, "HAS_TRITON", True)
    assert why_no_triton() == ""


# Run the comparisons of a module with its kernels read from a copy of the file, in which a text is replaced.
INTERPRETED = """
import importlib.util, json, pathlib, sys
from hyperion.kernels import interpreted
cases, folder = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
for number, (module, old, new) in enumerate(cases):
    right = getattr(interpreted, module)
    text = pathlib.Path(right.__file__).read_text()
    assert old in text, f"{module} does not contain {old}"
    file = folder / f"changed_{number}.py"
    file.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    changed = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    setattr(interpreted, module, changed)
    compared = list(interpreted.GROUPS[module]())
    setattr(interpreted, module, right)
    print(",".join(sorted({one.kernel for one in compared if not one.error < interpreted.TOLERANCE})) or "equal")
"""
# Module, text in it, replacement, and the kernels whose results must be wrong. The first three replace nothing.
PLANTED = {
    "rows as they are": ("rows_triton", "@jit", "@jit", "equal"),
    "products as they are": ("matmul_triton", "@jit", "@jit", "equal"),
    "attention as it is": ("attention_triton", "@jit", "@jit", "equal"),
    "a mask that is off by one": (
        "attention_triton",
        "visible = key <= query if",
        "visible = key <= query + 1 if",
        "attention,attention with descriptors",
    ),
    "a missing scale": ("attention_triton", "        scale * LOG2_E,", "        LOG2_E,", "attention,attention with descriptors"),
    "an edge mask that is off by one": ("matmul_triton", "(row < M) & (column < N))", "(row < M) & (column < N - 1))", "matmul"),
    "a softmax whose padding counts": ("rows_triton", 'mask=inside, other=float("-inf")', "mask=inside, other=0.0", "softmax"),
}


@needs_triton
@pytest.mark.process
@pytest.mark.slow
def test_kernels_agree_with_float64_in_the_interpreter_and_planted_bugs_do_not(tmp_path):
    cases = json.dumps([case[:3] for case in PLANTED.values()])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED, cases, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(zip(PLANTED, done.stdout.split("\n"), strict=False))
    assert found == {name: case[3] for name, case in PLANTED.items()}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "sm_90"])
def test_every_shipped_kernel_fits_its_architecture(name):
    from hyperion.kernels.builds import ARCHITECTURES, compile_build
    from hyperion.kernels.shipped import shipped_builds

    architecture = ARCHITECTURES[name]
    builds = shipped_builds(architecture)
    if name == "gfx942":  # the same tiles as on gfx90a: only the kernels that multiply matrices can differ
        builds = [build for build in builds if build.matrix and "128 features" in build.name]
    found = {build.name: compile_build(build, architecture) for build in builds}
    faults = {build.name: found[build.name].faults(build, architecture) for build in builds}
    assert not any(faults.values()), faults
    assert all(one.registers > 0 and one.occupancy > 0 for one in found.values())
    products = [found[build.name].matrix_name for build in builds if build.matrix]
    assert all(one.startswith("v_mfma_f32" if architecture.backend == "hip" else "wgmma") for one in products)


@needs_triton
@pytest.mark.slow
def test_a_tile_that_spills_or_does_not_fit_is_found():
    from hyperion.kernels.attention_triton import Tile, Tiles
    from hyperion.kernels.builds import ARCHITECTURES, Build, compile_build
    from hyperion.kernels.shipped import attention_builds, row_builds

    tile = Tile(128, 128, 8, 2)
    build = attention_builds(128, Tiles(tile, tile, tile))[1]
    (fault,) = compile_build(build, ARCHITECTURES["sm_90"]).faults(build, ARCHITECTURES["sm_90"])
    assert fault.endswith("spills")
    large = Tile(256, 128, 8, 2, descriptors=False)
    build = attention_builds(128, Tiles(large, large, large))[0]
    faults = compile_build(build, ARCHITECTURES["gfx90a"]).faults(build, ARCHITECTURES["gfx90a"])
    assert faults
    softmax = row_builds(768)[0]
    promised = Build(softmax.name, softmax.kernel, softmax.signature, softmax.constants, softmax.warps, matrix=True)
    found = compile_build(promised, ARCHITECTURES["gfx90a"])
    assert found.faults(promised, ARCHITECTURES["gfx90a"]) == ["no matrix instruction"]


@needs_triton
def test_tiles_of_devices_that_the_list_does_not_name():
    from hyperion.kernels import attention_triton, matmul_triton

    assert attention_triton.tiles_for("cuda", 80, 128) == attention_triton.SMALL[128]
    assert matmul_triton.tiles_for("cuda", 120) == matmul_triton.SMALL
    assert not any(tile.descriptors for tile in vars(attention_triton.tiles_for("hip", "gfx90a", 64)).values())
    for tiles in (*attention_triton.HOPPER.values(), *attention_triton.CDNA.values(), *attention_triton.SMALL.values()):
        assert tiles.forward.held % tiles.forward.read == 0 and tiles.queries.held % tiles.queries.read == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize(("heads", "key_heads", "length"), [(4, 4, 256), (4, 2, 1000), (2, 1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_on_a_gpu_has_the_gradients_of_float64(features, heads, key_heads, length, causal):
    torch.manual_seed(0)
    shapes = [torch.randn(1, n, length, features, device="cuda").bfloat16() for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = shapes
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    output = operations.attention(*leaves, causal)
    output.backward(grad)
    group = heads // key_heads
    exact = exact_attention(q[0, -group:], k[0, -1], v[0, -1], grad[0, -group:], causal)
    pairs = [(output[0, -group:], exact.output, False), (leaves[2].grad[0, -1], exact.grad_v, True)]
    if length > 1:  # a single position has a probability of 1, whose gradient is 0
        pairs += [(leaves[0].grad[0, -group:], exact.grad_q, True), (leaves[1].grad[0, -1], exact.grad_k, True)]
    for found, expected, backward in pairs:
        error = (found.double() - expected).norm() / expected.norm()
        assert error < attention_tolerance(torch.bfloat16, backward), error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("shape", [(512, 256, 128), (333, 77, 130), (1, 1, 1), (130, 256, 72)])
def test_products_and_row_kernels_on_a_gpu(shape):
    M, N, K = shape
    torch.manual_seed(0)
    a, b = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(K, N, device="cuda").bfloat16()
    exact = a.double() @ b.double()
    assert (operations.matmul(a, b).double() - exact).norm() / exact.norm() < 6e-3
    assert (operations.softmax(a).double() - a.double().softmax(1)).abs().max() < 4e-3
    assert torch.equal(operations.vector_add(a, a), 2 * a)
    leaves = [t.clone().requires_grad_() for t in (a, torch.rand(K, device="cuda"), torch.rand(K, device="cuda"))]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    operations.layer_norm(*leaves).float().square().sum().backward()
    torch.nn.functional.layer_norm(doubles[0], (K,), *doubles[1:]).square().sum().backward()
    for one, other in zip(leaves[1:], doubles[1:], strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0.03, atol=0.03 * math.sqrt(M))
