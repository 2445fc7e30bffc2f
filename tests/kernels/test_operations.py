"""The kernels of the chapter on kernels: references, refusals, the interpreter, planted bugs, and builds for GPUs."""

import json
import os
import platform
import subprocess
import sys
import types

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.kernels import operations
from hyperion.kernels.attention_float64 import attention_tolerance, exact_attention
from hyperion.kernels.availability import why_no_kernels, why_no_triton
from hyperion.kernels.token_loss import HAS_TRITON
from hyperion.measure import error_of_rows, relative_error

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


def test_a_single_wrong_row_is_found_where_the_norm_of_all_rows_hides_it():
    """The planted fault is a last block of queries, or of keys, in which one row is not computed."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2047, 64, dtype=torch.float64) for _ in range(4))
    exact = exact_attention(q[None], k, v, grad[None])
    forward, backward = (attention_tolerance(torch.bfloat16, which) for which in (False, True))
    output, *gradients = (one.bfloat16() for one in (exact.output, exact.grad_q, exact.grad_k, exact.grad_v))
    assert exact.output_error(output, forward) < forward and exact.gradient_error(*gradients, backward) < backward
    for tensor in (output, *gradients):
        right = tensor[..., -1, :].clone()
        tensor[..., -1, :] = 0
        assert relative_error(output, exact.output) < forward
        found = exact.output_error(output, forward) > forward, exact.gradient_error(*gradients, backward) > backward
        assert found == (tensor is output, tensor is not output)
        tensor[..., -1, :] = right
    output[0, 5, 5] = float("nan")
    assert not exact.output_error(output, forward) <= forward


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
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")  # Triton has a package for it, too
    assert "that this PyTorch requires" in why_no_triton()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "no package for Linux on riscv64" in why_no_triton()
    monkeypatch.setattr(availability, "HAS_TRITON", True)
    assert why_no_triton() == ""


def test_the_version_of_triton_is_known_whichever_package_contains_it(monkeypatch):
    from hyperion.kernels.availability import triton_version

    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="9.9+rocm"))
    assert triton_version() == "9.9+rocm"


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
    compared = list(interpreted.compare_group(module))
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
    "an element that is not written": (
        "rows_triton",
        "(powers / tl.sum(powers, 0)).to(y.dtype.element_ty), mask=inside)",
        "(powers / tl.sum(powers, 0)).to(y.dtype.element_ty), mask=inside & (column > 0))",
        "softmax",
    ),
    "a gradient without its mean": (
        "rows_triton",
        "weighted - tl.sum(weighted, 0) / columns - normalized",
        "weighted - normalized",
        "layer_norm backward",
    ),
    "keys beyond the last that count in the gradient of q": (
        "attention_triton",
        "key <= query if CAUSAL else key < rows, p, 0.0",
        "key <= query if CAUSAL else key < rows + 64, p, 0.0",
        "attention,attention with descriptors",
    ),
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


# The functions of `operations`, with their kernels in the interpreter, as on a GPU.
SERVED = """
import json, pathlib, types
import torch
import torch.nn.functional as F
from hyperion.errors import HyperionError
from hyperion.kernels import operations
from hyperion.kernels.attention_triton import Attention, Tile, Tiles
operations.implementation = lambda x: "triton"
torch.cuda.current_device = lambda: None
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=1)
torch.manual_seed(0)

def worst(leaves, found, expected):
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    pairs = [(found(*leaves), expected(*doubles))]
    grad = torch.randn_like(pairs[0][0])
    pairs += zip(torch.autograd.grad(pairs[0][0], leaves, grad), torch.autograd.grad(pairs[0][1], doubles, grad.double()))
    assert [leaf.dtype for leaf in leaves] == [one.dtype for one, _ in pairs[1:]]
    return max(((one - other).norm() / other.norm()).item() for one, other in pairs)

def refused(function, *arguments):
    try:
        function(*arguments)
    except HyperionError as error:
        return error.what
    return "served"

x, strided = torch.randn(5, 100), torch.randn(100, 2)
leaves = [leaf.detach().requires_grad_() for leaf in (x.clone(), strided[:, 0], strided[:, 1])]
errors = [worst(leaves, operations.layer_norm, lambda x, w, b: F.layer_norm(x, (100,), w, b))]
tiles, buffer = Tiles(*[Tile(32, 16, 4, 1)] * 3), torch.randn(3, 2 * 20 * 64 + 1)
leaves = [row[1:].view(1, 2, 20, 64).requires_grad_() for row in buffer]
found, expected = (lambda *three: Attention.apply(*three, True, tiles)), operations.attention_reference
errors.append(worst(leaves, found, expected))

heads = torch.zeros(1, 1, 0, 64).half(), torch.zeros(65536, 1, 1, 64).half()
wanting, wide = x.clone().requires_grad_(), torch.zeros(1, 20000, requires_grad=True)
refusals = [
    refused(operations.vector_add, x.double(), x.double()),
    refused(operations.vector_add, x.long(), x.long()),
    refused(operations.softmax, x.double()),
    refused(operations.layer_norm, x, x[0].double(), x[0]),
    refused(operations.matmul, x.double(), x.double().T),
    refused(operations.vector_add, wanting, x),
    refused(operations.softmax, wanting),
    refused(operations.matmul, x, wanting.T),
    refused(operations.layer_norm, wide, wide[0], wide[0]),
    *(refused(operations.attention, one, one, one) for one in heads),
]

from hyperion.experiments.kernels.interpreted_kernels import interpret
from hyperion.kernels import interpreted
from tests.chapter.toy import toy_context
interpreted.GROUPS = {"rows_triton": interpreted.GROUPS["rows_triton"]}
rows = interpret(toy_context("interpreted_kernels", {}, pathlib.Path("nowhere")), lambda *progress: None).rows
assert all(row.check_error < row.check_tolerance for row in rows)
print(json.dumps([errors, refusals, sorted({row.variant for row in rows})]))
"""


@needs_triton
@pytest.mark.process
@pytest.mark.slow
def test_operations_serve_strided_tensors_and_refuse_what_a_kernel_would_compute_wrongly():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SERVED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors, refusals, kernels = json.loads(done.stdout)
    assert kernels == ["layer_norm", "layer_norm backward", "softmax", "vector_add"]
    assert max(errors) < 1e-5 and len(errors) == 2, errors
    words = ["float64", "int64", "float64", "float64", "float64", *["requires a gradient"] * 3, "20000", "0, 64", "65536"]
    assert all(word in message for word, message in zip(words, refusals, strict=True)), refusals


@needs_triton
def test_the_persistent_product_takes_only_elements_of_two_bytes():
    from hyperion.kernels.matmul_triton import has_descriptors

    assert has_descriptors(torch.empty(64, 64, dtype=torch.bfloat16)) and not has_descriptors(torch.empty(64, 64))
    assert not has_descriptors(torch.empty(64, 65, dtype=torch.bfloat16))


@needs_triton
def test_the_list_of_builds_has_groups_of_heads_odd_sizes_and_both_kinds_of_attention():
    from hyperion.kernels.builds import ARCHITECTURES
    from hyperion.kernels.shipped import shipped_builds

    for architecture in ARCHITECTURES.values():
        builds = shipped_builds(architecture)
        assert len({build.name for build in builds}) == len(builds)
        kinds = {(build.constants["GROUP"], build.constants["CAUSAL"]) for build in builds if "CAUSAL" in build.constants}
        assert kinds == {(1, True), (1, False), (4, True)}
        assert any(build.constants.get("EVEN") is False and not build.aligned for build in builds)


@needs_triton
@pytest.mark.slow
def test_the_experiment_of_compiled_kernels_has_a_row_for_each_number(tmp_path, monkeypatch):
    from hyperion.experiments.kernels import compiled_kernels
    from hyperion.kernels import shipped
    from tests.chapter.toy import perform, toy_context

    monkeypatch.setattr(shipped, "shipped_builds", lambda architecture: shipped.row_builds(768)[:1])
    rows = perform(toy_context("compiled_kernels", {"architectures": ["gfx90a", "sm_90"]}, tmp_path), tmp_path).rows
    assert [(row.variant, row.metric) for row in rows] == [
        (name, metric) for name in ("gfx90a", "sm_90") for metric in compiled_kernels.METRICS
    ]
    assert all(row.value == 0 for row in rows if row.metric == "register_spills")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "sm_90"])
def test_every_shipped_kernel_fits_its_architecture(name):
    from hyperion.kernels.builds import ARCHITECTURES, compile_build
    from hyperion.kernels.shipped import shipped_builds

    architecture = ARCHITECTURES[name]
    builds = shipped_builds(architecture)
    if name == "gfx942":  # the same tiles as on gfx90a: only the kernels that multiply matrices can differ
        builds = [build for build in builds if build.matrix and ("128 features" in build.name or "matmul" in build.name)]
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
@pytest.mark.parametrize("low", [False, True])
def test_attention_on_a_gpu_has_the_gradients_of_float64(features, heads, key_heads, length, causal, low):
    torch.manual_seed(0)
    shapes = [torch.randn(1, n, length, features, device="cuda").bfloat16() for n in (heads, key_heads, key_heads, heads)]
    q, k, v, grad = shapes
    if low:  # scores of about -100: the probability of a key beyond the last overflows if it is not masked
        q[..., 0], k[..., 0] = 800 * (features / 64) ** 0.5, -1
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    output = operations.attention(*leaves, causal)
    output.backward(grad)
    group = heads // key_heads
    exact = exact_attention(q[0, -group:], k[0, -1], v[0, -1], grad[0, -group:], causal)
    forward, backward = (attention_tolerance(torch.bfloat16, which) for which in (False, True))
    assert exact.output_error(output[0, -group:], forward) < forward
    gradients = leaves[0].grad[0, -group:], leaves[1].grad[0, -1], leaves[2].grad[0, -1]
    assert all(one.isfinite().all() for one in gradients)
    if length > 1 and not low:  # a single position has a probability of 1, whose gradient is 0
        assert exact.gradient_error(*gradients, backward) < backward


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(512, 256, 128), (333, 77, 130), (1, 1, 1), (130, 256, 72)])
def test_products_and_row_kernels_on_a_gpu(shape, dtype):
    M, N, K = shape
    torch.manual_seed(0)
    a, b = torch.randn(M, K, device="cuda").to(dtype), torch.randn(K, N, device="cuda").to(dtype)
    tolerance = torch.finfo(dtype).eps / 2 + 1e-5
    assert error_of_rows(operations.matmul(a, b), a.double() @ b.double(), tolerance) < tolerance
    assert error_of_rows(operations.softmax(a), a.double().softmax(1), tolerance) < tolerance
    assert torch.equal(operations.vector_add(a, a), 2 * a)
    strided = torch.rand(K, 2, device="cuda")
    leaves = [one.detach().requires_grad_() for one in (a, strided[:, 0], strided[:, 1])]
    doubles = [one.detach().double().requires_grad_() for one in leaves]
    grad = torch.randn_like(a)
    operations.layer_norm(*leaves).backward(grad)
    torch.nn.functional.layer_norm(doubles[0], (K,), *doubles[1:]).backward(grad.double())
    for one, other in zip(leaves, doubles, strict=True):
        if K > 1:  # the layer norm of one element is the bias
            assert error_of_rows(one.grad, other.grad, tolerance) < tolerance


@needs_triton
def test_whole_programs_are_resident_as_far_as_registers_and_shared_memory_allow():
    from hyperion.kernels.builds import ARCHITECTURES, _resident_warps, _resident_waves

    cdna = ARCHITECTURES["gfx90a"]
    assert _resident_waves(7, 0, 16, cdna) == 4  # 28 warps have registers: one program of 16
    assert _resident_waves(3, 0, 8, cdna) == 2
    assert _resident_waves(8, 32 << 10, 4, cdna) == 2  # LDS for two programs
    assert _resident_waves(8, 40 << 10, 2, cdna) == 0.5
    # 48 registers for 32 threads are 1,536: ten warps in each of four partitions, and not 42 in 65,536 registers.
    assert _resident_warps(48, 0, 2) == 40 and _resident_warps(48, 0, 4) == 40
    assert _resident_warps(32, 100 << 10, 4) == 8
