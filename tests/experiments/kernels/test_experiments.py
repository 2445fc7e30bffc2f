"""The experiments of the chapter on kernels at toy sizes: rows with checks, reasons where nothing ran, planted faults."""

import pytest
import torch

from hyperion.chapter import Context, load_profile
from hyperion.experiments.kernels import (
    attention_memory,
    attention_speed,
    compiled_kernels,
    interpreted_kernels,
    matmul_kernel,
    row_kernels,
)
from hyperion.experiments.kernels.attention_implementations import RefusedError, attend, make_inputs, what_ran
from hyperion.hardware import detect
from hyperion.results import Row, RowError
from tests.chapter.toy import perform, toy_context

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {"batch": 1, "heads": 2, "key_heads": 1, "length": 33, "features": 64}
SPEED = {"dtype": "fp32", "time_limit_s": 0.01, "shapes": [SHAPE]}


def measured(rows, metric):
    return [row for row in rows if row.metric == metric and row.value is not None]


def test_row_kernels_are_checked_and_compared_with_a_copy(tmp_path):
    sizes = {"dtype": "fp32", "elements": 4096, "width": 64, "time_limit_s": 0.01}
    rows = perform(toy_context("row_kernels", sizes, tmp_path), tmp_path).rows
    rates = measured(rows, "bandwidth_gb_s")
    assert [row.params["operation"] for row in rates] == list(row_kernels.OPERATIONS)
    assert all(row.check == "float64" and row.check_error < row.check_tolerance for row in rates)
    assert len(measured(rows, "rate_ratio")) == len(rates)
    absent = [row for row in rows if row.value is None]
    assert {row.variant for row in absent} == {"triton"} and all("next step" in row.value_reason for row in absent)


def test_a_wrong_softmax_is_refused(tmp_path, monkeypatch):
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: softmax(x * (1.001 if x.dtype == torch.float32 else 1), dim))
    sizes = {"dtype": "fp32", "elements": 4096, "width": 64, "time_limit_s": 0.01}
    with pytest.raises(RowError, match="failed its check"):
        perform(toy_context("row_kernels", sizes, tmp_path), tmp_path)


def test_products_are_verified(tmp_path):
    sizes = {"dtype": "fp32", "shapes": [{"m": 33, "n": 17, "k": 9}], "time_limit_s": 0.01}
    absent, row = perform(toy_context("matmul_kernel", sizes, tmp_path), tmp_path).rows
    assert (absent.variant, absent.value) == (matmul_kernel.TRITON, None) and "next step" in absent.value_reason
    assert row.variant == "torch.mm" and row.check == "float64 slice" and row.check_error < 1e-6


def test_attention_runs_in_the_backend_that_was_asked_for(tmp_path):
    rows = perform(toy_context("attention_speed", SPEED, tmp_path), tmp_path).rows
    rates = measured(rows, "attention_tflops")
    assert {(row.variant, row.params["pass"]) for row in rates} == {
        (name, which) for name in ("flash", "math") for which in ("forward", "backward")
    }
    assert all(row.params["ran"] == row.variant and row.variant in row.params["kernel"] for row in rates)
    assert all(0 < row.check_error < row.check_tolerance for row in rates)
    reasons = {row.variant: row.value_reason for row in rows if row.value is None}
    assert reasons["cudnn"].startswith("refused: No viable backend") and "next step" in reasons["triton"]


@pytest.mark.parametrize("fault", ["no scale", "sees one position ahead", "wrong gradient"])
def test_planted_faults_of_attention_are_refused(fault, tmp_path, monkeypatch):
    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return -grad

    def faulty(name, q, k, v, causal=True):
        if fault == "no scale":
            return attend(name, q * 8, k, v, causal)
        if fault == "sees one position ahead":
            return attend(name, q.roll(-1, 2), k, v, causal).roll(1, 2)
        return attend(name, Negated.apply(q), k, v, causal)

    monkeypatch.setattr(attention_speed, "attend", faulty)
    with pytest.raises(RowError, match="failed its check"):
        perform(toy_context("attention_speed", SPEED, tmp_path), tmp_path)


def test_the_prediction_adds_products_and_exponentials(tmp_path, monkeypatch):
    context = toy_context("attention_speed", SPEED, tmp_path)
    (forward, backward) = attention_speed.forecast(context)
    assert forward.estimate is None and "no estimate" in forward.basis and forward.variant == "flash"

    class Gpu:
        kind, compute_units, max_clock_mhz, arch, name = "cuda", 100, 1000.0, "sm_00", "a GPU"

    class GpuContext(Context):
        device = Gpu()

    monkeypatch.setattr(attention_speed, "gemm_limit", lambda device, dtype: (1000.0, "made up"))
    monkeypatch.setattr(attention_speed, "why_absent", lambda name, device: "")
    gemm = Row(notebook="n", experiment="gemm", variant="v", dtype="fp32", metric="gemm_tflops", value=500.0)
    fields = {name: getattr(context, name) for name in ("notebook", "experiment", "sizes", "workspace")}
    forward, backward = attention_speed.forecast(GpuContext(**fields, upstream=[gemm]))
    pairs, flops = 2 * 33**2 / 2, 2 * 2 * 33**2 * 64
    seconds = flops / 500e12 + pairs / (100 * 16 * 1e9)
    assert forward.estimate == pytest.approx(flops / seconds / 1e12) and forward.variant == "triton"
    seconds = 3.5 * flops / 500e12 + 2 * pairs / (100 * 16 * 1e9)
    assert backward.estimate == pytest.approx(2.5 * flops / seconds / 1e12)
    assert forward.ceiling == 1000.0


def test_memory_of_stored_scores_grows_with_the_square(tmp_path):
    sizes = {"dtype": "fp32", "heads": 1, "features": 64, "lengths": [768, 1024, 1536, 2048]}
    rows = perform(toy_context("attention_memory", sizes, tmp_path), tmp_path).rows
    shares = {row.variant: row.value for row in measured(rows, "quadratic_share")}
    assert shares["flash"] < 0.01 and shares["math"] > 0.9
    assert all(row.value > row.limit for row in measured(rows, "peak_memory_gib"))


def test_a_fit_separates_linear_and_quadratic_memory():
    lengths = (1024, 2048, 4096, 8192, 16384)
    assert attention_memory.quadratic_share(lengths, [1000 + 7 * one for one in lengths])[0] < 1e-9
    share, residual = attention_memory.quadratic_share(lengths, [5 * one + one**2 for one in lengths])
    assert share == pytest.approx(16384 / (16384 + 5)) and residual < 1e-9
    assert attention_memory.quadratic_share(lengths, [1, 1, 1, 1, 100])[1] > attention_memory.FIT_TOLERANCE


def test_backends_accept_or_give_a_reason(tmp_path):
    rows = perform(toy_context("attention_backends", {"length": 16}, tmp_path), tmp_path).rows
    assert all(row.value == 1 for row in rows if row.variant == "math")
    refused = [row for row in rows if row.value == 0]
    assert refused and all(row.params["reason"] for row in refused)
    (dropout,) = [row for row in rows if (row.variant, row.params["case"]) == ("flash", "dropout")]
    assert dropout.params["reason"] == "Both fused kernels do not support non-zero dropout."


def test_a_refusal_keeps_the_reasons_and_not_the_announcement():
    q, k, v, _ = make_inputs(detect(), torch.float32, (1, 2, 2, 8, 16), 0)
    with pytest.raises(RefusedError) as refusal:
        attend("flash", q, k, v, dropout_p=0.5)
    assert "Triggered" not in str(refusal.value) and "because" not in str(refusal.value)


def test_a_refusal_of_the_triton_kernels_has_a_reason_too():
    q, k, v, _ = make_inputs(detect(), torch.float32, (1, 3, 2, 8, 16), 0)
    with pytest.raises(RefusedError, match="queries .* keys"):
        attend("triton", q, k, v)


def test_the_profiler_names_the_backend_that_ran():
    q, k, v, _ = make_inputs(detect(), torch.float32, (1, 2, 2, 8, 16), 0)
    assert what_ran(lambda: attend("math", q, k, v), detect())[0] == "math"
    assert what_ran(lambda: q + 1, detect())[0] == ""


def test_without_triton_the_rows_have_the_reason(tmp_path, monkeypatch):
    why = "unavailable: not here; next step: install it"
    for module in (compiled_kernels, interpreted_kernels):
        monkeypatch.setattr(module, "why_no_triton", lambda: why)
    sizes = {"architectures": ["gfx90a", "sm_90"]}
    rows = perform(toy_context("compiled_kernels", sizes, tmp_path), tmp_path).rows
    rows += perform(toy_context("interpreted_kernels", {}, tmp_path), tmp_path).rows
    assert [row.value_reason for row in rows] == [why] * 3


def test_a_kernel_that_spills_is_no_row(tmp_path):
    context = toy_context("compiled_kernels", {"architectures": ["sm_90"]}, tmp_path)
    check = {"check": "largest allowed number", "check_error": 8, "check_tolerance": 0}
    with pytest.raises(RowError, match="failed its check"):
        context.row("sm_90", "register_spills", 8, dtype="bf16", params={"kernel": "k"}, **check).validate()


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_the_sizes_of_the_profiles_are_valid(profile):
    sizes = load_profile(profile).sizes
    speed = attention_speed.AttentionSpeedOptions.parse(sizes("attention_speed"), "attention_speed")
    assert {shape.features for shape in speed.shapes} == {64, 128}
    assert any(shape.heads > shape.key_heads for shape in speed.shapes) and any(shape.length % 2 for shape in speed.shapes)
    memory = attention_memory.AttentionMemoryOptions.parse(sizes("attention_memory"), "attention_memory")
    assert len(memory.lengths) >= 4 and max(memory.lengths) >= 4 * min(memory.lengths)
    compiled = compiled_kernels.CompiledKernelsOptions.parse(sizes("compiled_kernels"), "compiled_kernels")
    assert compiled.architectures == ("gfx90a", "gfx942", "sm_90")
    if profile == "full":
        squares = [shape.m for shape in matmul_kernel.MatmulKernelOptions.parse(sizes("matmul_kernel"), "m").shapes]
        assert {4096, 8192} <= set(squares) and (min(memory.lengths), max(memory.lengths)) == (1024, 16384)
