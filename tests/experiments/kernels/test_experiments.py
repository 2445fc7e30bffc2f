"""The experiments of the chapter on kernels at toy sizes: rows with checks, reasons where nothing ran, planted faults."""

import math
import types

import numpy as np
import pytest
import torch

from hyperion.chapter import Context, experiment_named, load_profile
from hyperion.experiments.kernels import (
    attention_memory,
    attention_speed,
    compiled_kernels,
    interpreted_kernels,
    matmul_kernel,
    row_kernels,
)
from hyperion.experiments.kernels.attention_implementations import RefusedError, attend, make_inputs, what_ran
from hyperion.experiments.kernels.claims import (
    attention_claims,
    bandwidth_claims,
    compiled_claims,
    has_bars,
    memory_claims,
    product_claims,
)
from hyperion.experiments.kernels.timed_outputs import time_and_keep
from hyperion.hardware import Telemetry, detect
from hyperion.measure import Timing
from hyperion.results import Row, RowError
from tests.chapter.toy import perform, toy_context

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {"batch": 1, "heads": 2, "key_heads": 1, "length": 33, "features": 64}
SPEED = {"dtype": "fp32", "time_limit_s": 0.01, "shapes": [SHAPE]}


def measured(rows, metric):
    return [row for row in rows if row.metric == metric and row.value is not None]


def keep_with_times(seconds):
    """Return a replacement of `time_and_keep` that calls each function once. `seconds` are their times, or one time of all."""

    def keep(calls, device, time_limit_s):
        times = seconds if isinstance(seconds, dict) else dict.fromkeys(calls, seconds)
        timings = {name: Timing(np.full(30, times[name]), (), True, True, "interval", Telemetry()) for name in calls}
        return timings, {name: call() for name, call in calls.items()}

    return keep


def test_row_kernels_are_checked_and_compared_with_a_copy(tmp_path):
    sizes = {"dtype": "fp32", "elements": 4096, "width": 64, "time_limit_s": 0.01}
    rows = perform(toy_context("row_kernels", sizes, tmp_path), tmp_path).rows
    rates = measured(rows, "bandwidth_gb_s")
    assert [row.params["operation"] for row in rates] == list(row_kernels.OPERATIONS)
    assert all(row.check == "float64" and row.check_error < row.check_tolerance for row in rates)
    assert len(measured(rows, "rate_ratio")) == len(rates)
    absent = [row for row in rows if row.value is None]
    assert {row.variant for row in absent} == {"triton"} and all("next step" in row.value_reason for row in absent)


def test_a_kernel_that_takes_twice_the_time_of_a_copy_has_half_of_its_bandwidth(tmp_path, monkeypatch):
    monkeypatch.setattr(row_kernels, "time_and_keep", keep_with_times({row_kernels.TORCH: 2e-3, row_kernels.COPY: 1e-3}))
    sizes = {"dtype": "fp32", "elements": 4096, "width": 64, "time_limit_s": 0.01}
    ratios = measured(perform(toy_context("row_kernels", sizes, tmp_path), tmp_path).rows, "rate_ratio")
    assert {(row.variant, row.value) for row in ratios} == {("torch over copy", 0.5)}


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


@pytest.mark.parametrize("wrong", ["triton", "torch.mm"])
def test_the_speed_up_of_a_product_needs_both_products_to_be_right(wrong, tmp_path, monkeypatch):
    def product(name):
        return lambda a, b: (1.01 if name == wrong else 1) * (a @ b)

    context = toy_context(
        "matmul_kernel", {"dtype": "fp32", "shapes": [{"m": 33, "n": 17, "k": 9}], "time_limit_s": 0.01}, tmp_path
    )
    monkeypatch.setattr(matmul_kernel, "why_no_kernels", lambda device: "")
    search = context.absent_row("triton", "compile_time_s", "not on a CPU")
    monkeypatch.setattr(matmul_kernel, "_search_row", lambda *given: search)
    monkeypatch.setattr(matmul_kernel, "time_and_keep", keep_with_times(1e-3))
    monkeypatch.setattr(matmul_kernel.operations, "matmul", product("triton"))
    monkeypatch.setattr(torch, "mm", product("torch.mm"))
    rows = [row.without_failed_value() for row in matmul_kernel.run(context, lambda *progress: None).rows]
    values = {row.variant: row.value for row in rows if row is not search and row.metric in ("gemm_tflops", "speedup")}
    assert values.keys() == {"triton", "torch.mm", "triton over torch.mm"}
    assert {name for name, value in values.items() if value is None} == {wrong, "triton over torch.mm"}


def test_attention_runs_in_the_backend_that_was_asked_for(tmp_path):
    rows = perform(toy_context("attention_speed", SPEED, tmp_path), tmp_path).rows
    rates = measured(rows, "attention_tflops")
    assert {(row.variant, row.params["pass"]) for row in rates} == {
        (name, which) for name in ("flash", "math") for which in ("forward", "backward")
    }
    assert all(row.params["ran"] == row.variant for row in rates)
    kernels = {(row.variant, row.params["pass"]): row.params["kernel"] for row in rates}
    assert all(name in kernels[name, "forward"] for name in ("flash", "math"))
    assert kernels["flash", "backward"].endswith("backward") and "softmax_backward" in kernels["math", "backward"]
    assert all(0 < row.check_error < row.check_tolerance for row in rates)
    reasons = {row.variant: row.value_reason for row in rows if row.value is None}
    assert reasons["cudnn"].startswith("refused: No viable backend") and "next step" in reasons["triton"]


def test_the_rate_of_each_pass_of_attention_counts_its_own_flops(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_speed, "IMPLEMENTATIONS", ("flash",))
    monkeypatch.setattr(attention_speed, "time_and_keep", keep_with_times(1e-3))
    monkeypatch.setattr(attention_speed, "what_ran", lambda call, device: ("flash", "a kernel"))
    rows = perform(toy_context("attention_speed", SPEED, tmp_path), tmp_path).rows
    # Two products with one multiply-add per feature, for each of 2 heads and half of all pairs. The backward pass has five.
    flops = 2 * 2 * 2 * 64 * 33**2 / 2
    rates = {row.params["pass"]: row.value for row in measured(rows, "attention_tflops")}
    assert rates == pytest.approx({"forward": flops / 1e-3 / 1e12, "backward": 2.5 * flops / 1e-3 / 1e12})


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


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("place", [None, (0, 1), (1, 0), (1, 3)])
def test_nan_anywhere_in_an_output_fails_its_check(which, place):
    torch.manual_seed(0)
    tensors = tuple(torch.randn(2, 4, 8, 64) for _ in range(4))
    q, k, v, grad = (tensor.clone().requires_grad_() for tensor in tensors)
    output = attend("math", q, k, v, True)
    outputs = (output.detach(),) if which == "forward" else torch.autograd.grad(output, (q, k, v), grad)
    if place is not None:
        outputs[-1][place] = math.nan
    check = attention_speed._verification(outputs, attention_speed._exact(tensors, True), "fp32", which)
    assert (check.error <= check.tolerance) == (place is None)


def test_the_last_head_of_the_last_sequence_is_compared():
    torch.manual_seed(0)
    tensors = tuple(torch.randn(3, 4, 8, 64) for _ in range(4))
    output = attend("math", *tensors[:3], True)
    output[2, 3] *= 1.01
    check = attention_speed._verification((output,), attention_speed._exact(tensors, True), "fp32", "forward")
    assert check.error > check.tolerance


def wrong_from_call(number, function, change):
    """Return a function that is right in its first calls, and then returns changed outputs."""
    calls = []

    def called(*arguments, **options):
        calls.append(0)
        output = function(*arguments, **options)
        return output if len(calls) < number else change(output)

    return called


def test_the_outputs_of_timed_calls_are_verified(tmp_path, monkeypatch):
    """The faults begin in the second call of each function. The first call is not timed."""
    monkeypatch.setattr(attention_speed, "IMPLEMENTATIONS", ("flash",))
    # The calls before the timed calls: one with gradients, one under the profiler, and one whose output is overwritten.
    monkeypatch.setattr(attention_speed, "attend", wrong_from_call(4, attend, lambda output: 1.01 * output))
    with pytest.raises(RowError, match="failed its check"):
        perform(toy_context("attention_speed", SPEED, tmp_path), tmp_path)
    rows, product = {"dtype": "fp32", "elements": 4096, "width": 64, "time_limit_s": 0.01}, torch.mm
    monkeypatch.setattr(row_kernels, "OPERATIONS", {"softmax": 2})
    softmax = torch.softmax  # the first call computes the exact output
    monkeypatch.setattr(torch, "softmax", wrong_from_call(3, softmax, lambda output: 1.01 * output))
    with pytest.raises(RowError, match="failed its check"):
        perform(toy_context("row_kernels", rows, tmp_path), tmp_path)
    sizes = {"dtype": "fp32", "shapes": [{"m": 33, "n": 17, "k": 9}], "time_limit_s": 0.01}
    monkeypatch.setattr(torch, "mm", wrong_from_call(2, product, lambda output: 1.01 * output))
    with pytest.raises(RowError, match="failed its check"):
        perform(toy_context("matmul_kernel", sizes, tmp_path), tmp_path)


def test_an_element_that_no_timed_call_writes_is_found():
    """The function below writes every element in its first call only, to memory that it owns as an allocator does."""
    memory = torch.empty(5)

    def call():
        memory[0 if memory[0] == 0 else 1 :] = 1
        return (memory,)

    memory[0] = 0
    _, kept = time_and_keep({"faulty": call}, detect(), 0.01)
    assert kept["faulty"][0][0].isnan() and kept["faulty"][0][1] == 1


def test_a_failing_device_is_not_a_refusal(monkeypatch):
    def fail(*arguments, **options):
        raise torch.AcceleratorError("an illegal memory access")

    q, k, v, _ = make_inputs(detect(), torch.float32, (1, 2, 2, 8, 16), 0)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    with pytest.raises(torch.AcceleratorError):
        attend("flash", q, k, v)


def speedup(variant, value, params, low=None):
    why = {} if value is not None else {"value_reason": "unexpected: made up"}
    interval = {"n": 30, "ci_low": low or value, "ci_high": value} if value is not None else {}
    columns = {"notebook": "n", "experiment": "e", "metric": "speedup"} | why | interval
    return Row(variant=variant, value=value, params=params, **columns)


def test_memory_without_a_fit_is_judged_by_its_growth():
    common = {"notebook": "n", "experiment": "attention_memory", "dtype": "bf16"}

    def rows(name, gib, share=None):
        found = [
            Row(variant=name, metric="peak_memory_gib", value=value, params={"length": 8192 * 2**place}, **common)
            for place, value in enumerate(gib)
        ]
        reason = "" if share is not None else "no polynomial of the second degree fits"
        return [*found, Row(variant=name, metric="quadratic_share", value=share, value_reason=reason, **common)]

    def judged(*given):
        return [holds for holds, _ in memory_claims(rows(*given))]

    # Growth by 2 means linear memory; a share of 5 % allows 2.05. Growth by 4 means quadratic memory; a share of 50 % needs 2.67.
    assert judged("flash", [1.0, 2.0]) == judged("flash", [1.0, 1.1]) == judged("math", [1.0, 2.8]) == [True]
    assert judged("flash", [1.0, 2.1]) == judged("math", [1.0, 2.6]) == [False]
    assert judged("flash", [1.0, 4.0], 0.04) == judged("math", [1.0, 1.0], 0.6) == [True]
    assert judged("flash", [1.0, 1.0], 0.06) == judged("math", [1.0, 4.0], 0.4) == [False]
    absent = Row(variant="cudnn", metric="quadratic_share", value=None, value_reason="unavailable: made up", **common)
    assert [holds for holds, _ in memory_claims([*rows("flash", [1.0, 2.0]), absent])] == [True]
    assert [holds for holds, _ in memory_claims([absent])] == [False]


def test_claims_do_not_hold_without_rows_and_speed_needs_an_interval():
    options = attention_speed.AttentionSpeedOptions.parse(load_profile("full").sizes("attention_speed"), "attention_speed")
    claims = attention_claims([], options)
    assert len(claims) == 3 * 4 and not any(holds for holds, _ in claims)
    long = next(shape for shape in options.shapes if shape.length == 8192)
    options = options.model_copy(update={"shapes": (long,)})
    passes = [long.params | {"pass": which} for which in ("forward", "backward")]
    rows = [speedup(f"triton over {name}", 1.02, one, low=1.01) for name in ("cudnn", "flash") for one in passes]
    assert all(holds for holds, _ in attention_claims(rows, options))
    rows[2] = speedup("triton over flash", 1.02, passes[0], low=0.99)  # faster, but not beyond noise
    rows[1] = speedup("triton over cudnn", None, passes[1])
    failed = [claim for holds, claim in attention_claims(rows, options) if not holds]
    assert "1.020 (0.990 to 1.020), expected more than 1" in failed[0] and "1 rows of triton over cudnn" in failed[1]
    products = matmul_kernel.MatmulKernelOptions.parse(load_profile("full").sizes("matmul_kernel"), "matmul_kernel")
    rows = [speedup("triton over torch.mm", 0.9, {"m": 4096, "n": 4096, "k": 4096})]
    assert [holds for holds, _ in product_claims(rows, products)] == [True, False]
    arrays = row_kernels.RowKernelsOptions.parse(load_profile("full").sizes("row_kernels"), "row_kernels")
    rows = [speedup("triton over copy", value, {"operation": name}) for name, value in (("softmax", 0.9), ("layer_norm", 0.8))]
    assert [holds for holds, _ in bandwidth_claims(rows, arrays)] == [False, True, False, False]


def test_bars_are_for_the_gpus_on_which_the_settings_were_timed():
    hopper, mi250x = ({"gpus": [{"major": 9, "minor": 0}], "hip": hip} for hip in (None, "7.0"))
    assert has_bars(hopper) and not has_bars(mi250x) and not has_bars({"gpus": [], "hip": None})
    assert not has_bars({"gpus": [{"major": 8, "minor": 0}], "hip": None})


def test_a_compiled_kernel_whose_value_was_refused_fails_its_claim():
    where = {"notebook": "n", "experiment": "e", "variant": "gfx90a", "params": {"kernel": "k"}}
    rows = [
        Row(metric="register_spills", value=None, value_reason="unexpected: 8 items failed its check", **where),
        Row(metric="register_spills", value=0.0, **where),
        Row(metric="shared_memory_bytes", value=65537.0, **where),
    ]
    assert [holds for holds, _ in compiled_claims(rows)] == [False, True, False]


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


@pytest.mark.slow
def test_memory_of_stored_scores_grows_with_the_square(tmp_path):
    sizes = {"dtype": "fp32", "heads": 1, "features": 64, "lengths": [768, 1024, 1536, 2048]}
    rows = perform(toy_context("attention_memory", sizes, tmp_path), tmp_path).rows
    shares = {row.variant: row.value for row in measured(rows, "quadratic_share")}
    assert shares["flash"] < 0.01 and shares["math"] > 0.9
    assert all(row.value > row.limit for row in measured(rows, "peak_memory_gib"))


def test_scores_in_16_bits_are_predicted_in_float32(tmp_path):
    sizes = {"dtype": "bf16", "heads": 3, "features": 64, "lengths": [64, 128, 256, 512]}
    forecasts = attention_memory.forecast(toy_context("attention_memory", sizes, tmp_path))
    peaks = {one.variant: one.estimate for one in forecasts if one.metric == "peak_memory_gib"}
    assert (peaks["math"] - peaks["flash"]) * 2**30 == pytest.approx(3 * 3 * 512**2 * 4)


def test_memory_that_no_polynomial_describes_has_a_reason_and_that_of_the_kernels_of_this_library_fails(tmp_path, monkeypatch):
    sizes = {"dtype": "fp32", "heads": 1, "features": 64, "lengths": [128, 256, 512, 1024, 2048]}
    monkeypatch.setattr(attention_memory, "_peak_bytes", lambda *given: 10**9 if given[-1] == 2048 else 10**7)
    monkeypatch.setattr(attention_memory, "why_absent", lambda name, device: "" if name == measured_name else "left out")
    measured_name = "flash"
    rows = perform(toy_context("attention_memory", sizes, tmp_path), tmp_path).rows
    (row,) = (row for row in rows if row.variant == "flash" and "longest" in row.params)
    assert row.value is None and row.value_reason.startswith("no polynomial of the second degree fits")
    measured_name = "triton"
    with pytest.raises(RowError, match="failed its check 'residual of the fit'"):
        perform(toy_context("attention_memory", sizes, tmp_path / "again"), tmp_path / "again")


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
    assert "dropout" in dropout.params["reason"]


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


def test_the_value_of_a_kernel_that_spills_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_kernels, "triton_version", lambda: "0")
    build = types.SimpleNamespace(name="k", matrix=False, warps=4)
    found = types.SimpleNamespace(registers=9, spills=8, shared_bytes=0, occupancy=8, matrix_instructions=0, matrix_name="")
    context = toy_context("compiled_kernels", {"architectures": ["sm_90"]}, tmp_path)
    rows = compiled_kernels._rows(context, types.SimpleNamespace(name="sm_90", shared_bytes=1), build, found)
    refused = [row for row in rows if row.without_failed_value().value is None]
    assert [row.metric for row in refused] == ["register_spills"]


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
        # A call of at least 5e10 FLOPs takes a GPU longer than its launch takes the host.
        assert min(shape.flops()["forward"] for shape in speed.shapes) > 5e10
        squares = [shape.m for shape in matmul_kernel.MatmulKernelOptions.parse(sizes("matmul_kernel"), "m").shapes]
        assert {4096, 8192} <= set(squares) and (min(memory.lengths), max(memory.lengths)) == (1024, 16384)


def test_the_predictions_read_the_rates_of_chapter_1_1():
    names = "row_kernels", "matmul_kernel", "attention_speed"
    assert [experiment_named(name).forecast_reads for name in names] == [("bandwidth",), ("gemm",), ("gemm",)]
