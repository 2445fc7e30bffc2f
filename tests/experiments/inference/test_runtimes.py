"""Runtimes of toy models: rows of eager mode and ONNX Runtime, planted errors that checks find, and runtimes that are absent."""

import dataclasses
import math
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hyperion.chapter import experiment_named, load_profile
from hyperion.errors import HyperionError
from hyperion.experiments.inference import backends, runtimes
from hyperion.experiments.inference.backends import (
    AOTI,
    COMPILED,
    EAGER,
    ORT_CPU,
    Prepared,
    count_kernels,
    prepare,
    why_absent,
    why_no_migraphx,
)
from hyperion.experiments.inference.claims import runtime_quality_claims
from hyperion.experiments.inference.runtimes import RuntimesOptions, output_tolerance
from hyperion.experiments.quantization import onnx_int8
from hyperion.experiments.quantization.quantized_linears import SCHEMES, replace_linears
from hyperion.hardware import Telemetry, detect_cpu
from hyperion.measure import FORMATS, Timing, Verification
from hyperion.measure.steps import profiled as profiling
from hyperion.processes.job import JobError
from hyperion.results import Row
from hyperion.results.rows import UNEXPECTED, canonical_params
from hyperion.workloads import batch_times
from hyperion.workloads.onnx_sessions import CPU_PROVIDER, SPINNING, Session, require_provider, why_no_gpu_provider, why_no_onnx
from hyperion.workloads.trained_models import trained_classifier, trained_language_model
from tests.chapter.toy import toy_context
from tests.experiments.inference import dying_jobs

pytestmark = pytest.mark.slow

CPU = detect_cpu()
INT4 = next(scheme for scheme in SCHEMES if scheme.dtype == "int4")
SIZES = {
    "language_model": "llama_toy",
    "classifier": "resnet18_toy",
    "dtype": "fp32",
    "batches": [1, 3],
    "latency_samples": 80,
    "time_limit_s": 0.01,
    "windows": 8,
    "images": 8,
}


@pytest.fixture(scope="module")
def material(toy_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runtimes")
    shutil.copytree(toy_models, folder / "data")
    torch.set_num_threads(1)
    experiment_named("runtimes")  # registers the metrics
    context = toy_context("runtimes", SIZES, folder)
    context.workspace.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(folder / "data"))
        yield context, trained_classifier(context, "resnet18_toy"), trained_language_model(context, "llama_toy")


def measured(material, runtime, change=lambda logits: logits, model=1, dtype="fp32", change_model=lambda model: None):
    """Rows of a model in a runtime, whose logits or whose layers are changed."""
    context, trained = material[0], material[model]
    options = RuntimesOptions.of(context)
    reference = runtimes._Reference(trained, CPU, CPU, options)
    loaded = trained.load(CPU, FORMATS[dtype].storage)
    change_model(loaded)
    prepared = prepare(runtime, loaded, reference.inputs[:2], CPU, dtype, context.workspace)
    changed = Prepared(lambda x: change(prepared.call(x)), CPU, dtype, prepared.seconds, prepared.stored_bytes, prepared.ran)
    kernels_of = prepared if runtime == ORT_CPU else changed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtimes, "count_kernels", lambda one, x: count_kernels(kernels_of, x))
        rows, _ = runtimes._Variant(context, options, runtime, changed, reference).measure()
    return [row.without_failed_value() for row in rows]


@pytest.fixture
def equal_times(monkeypatch):
    """Let the clock report 1 ms for every call, whatever its batch is.

    Batch 3 is then timed and the best one on every machine. On a busy machine, a call may take longer than the 0.01 s of the
    search, or a batch of one may be as fast per image.
    """

    def timed(calls, device, cold, **options):
        for call in calls:
            call()
        return [Timing(np.full(30, 1e-3), (1e-3,), True, cold, "interval", Telemetry()) for _ in calls]

    monkeypatch.setattr(batch_times, "second_call_s", lambda call, device: 1e-3)
    monkeypatch.setattr(batch_times, "time_function", lambda call, device, **options: timed([call], device, **options)[0])
    monkeypatch.setattr(runtimes, "time_interleaved", timed)


def of(rows, metric, **params):
    return [row for row in rows if row.metric == metric and all(row.params.get(name) == one for name, one in params.items())]


@pytest.mark.parametrize("model", [1, 2], ids=["classifier", "language"])
def test_eager_mode_is_itself(material, model):
    rows = measured(material, EAGER, model=model)
    assert [row.value for row in of(rows, "relative_difference", against="PyTorch eager")] == [0.0]
    assert 0 < of(rows, "relative_difference", against="float64")[0].value < 1e-5
    quality = rows[2]
    assert quality.value == pytest.approx(1.0 if model == 2 else 0.0, abs=1e-9)
    # 80 samples give an interval of the median and of the 95th percentile, and none of the 99th.
    assert of(rows, "latency_p95_s")[0].ci_high >= of(rows, "latency_p50_s")[0].value > 0
    assert of(rows, "latency_p99_s")[0].value_reason.endswith("samples; an interval of this percentile needs 368")
    assert [row.params["batch"] for row in of(rows, "samples_per_s", role="search")] == [1, 3]
    assert len(of(rows, "samples_per_s", role="best batch")) == 1 and not of(rows, "speedup")


def test_eager_mode_in_16_bits_is_itself_with_frequencies_in_float32(material, monkeypatch):
    context, trained = material[0], material[2]
    seen = []
    monkeypatch.setattr(runtimes, "IN_PROCESS", (EAGER,))
    monkeypatch.setattr(runtimes, "prepare", lambda *given: seen.append(given[1]) or prepare(*given))
    sixteen = dataclasses.replace(context, sizes=context.sizes | {"dtype": "bf16"})
    rows = runtimes.measure_in_process(sixteen, lambda *_: None, str(trained.folder)).rows
    assert [row.value for row in of(rows, "relative_difference", against="PyTorch eager")] == [0.0]
    assert {one.dtype for one in seen[0].parameters()} == {torch.bfloat16}
    assert {one.dtype for one in seen[0].buffers()} == {torch.float32}, "the frequencies of the rotary embeddings"


def test_both_sides_of_a_speed_up_get_the_same_converted_inputs(material, monkeypatch, equal_times):
    context, trained = material[0], material[1]
    options = RuntimesOptions.of(context)
    reference = runtimes._Reference(trained, CPU, CPU, options)
    model, given = trained.load(CPU, torch.bfloat16), {"runtime": set(), "eager": set()}

    def seen(name, call):
        return lambda x: given[name].add((x.dtype, x.is_contiguous(memory_format=torch.channels_last))) or call(x)

    monkeypatch.setattr(reference, "eager", lambda dtype: seen("eager", model))
    prepared = Prepared(seen("runtime", model), CPU, "bf16")
    variant = runtimes._Variant(context, options, "a runtime", prepared, reference)
    rows, frames = variant.time_throughput(Verification("c", 0.0, 1.0))
    # The key of a timing, with which a page finds out whether the samples of a row were steady.
    timed = {(frame["variant"][0], frame["dtype"][0], frame["params"][0]) for frame in frames}
    rates = [row for row in rows if row.metric == "samples_per_s"]
    assert timed == {(row.variant, row.dtype, canonical_params(row.params)) for row in rates} and len(frames) == len(rates) == 6
    assert given == {"runtime": {(torch.bfloat16, True)}, "eager": {(torch.bfloat16, True)}}


def test_the_limit_of_a_throughput_is_the_rate_of_products_over_the_work_of_an_example(material, monkeypatch, equal_times):
    context, trained = material[0], material[1]
    options = RuntimesOptions.of(context)
    reference = runtimes._Reference(trained, CPU, CPU, options)
    prepared = Prepared(trained.load(CPU), CPU, "fp32")
    monkeypatch.setattr(runtimes, "gemm_limit", lambda device, dtype: (100.0, "the data sheet"))
    monkeypatch.setattr(runtimes, "_flops_per_example", lambda reference: 2e9)
    rows, _ = runtimes._Variant(context, options, "a runtime", prepared, reference).time_throughput(Verification("c", 0.0, 1.0))
    rates = of(rows, "samples_per_s")
    assert {row.params["role"] for row in rates} == {"search", "one example", "best batch"}
    # 100 TFLOPS over 2 GFLOP.
    assert {(row.limit, row.limit_source) for row in rates} == {(50_000.0, "2 GFLOP of an example at the data sheet")}
    # Every batch takes 1 ms.
    assert {(row.params["batch"], round(row.value)) for row in rates} == {(1, 1000), (3, 3000)}


def test_the_work_of_an_example_is_that_of_one_example():
    reference = SimpleNamespace(model=nn.Linear(8, 4), inputs=torch.ones(5, 8))
    assert runtimes._flops_per_example(reference) == 2 * 8 * 4


def test_a_runtime_that_takes_half_the_time_of_eager_mode_has_a_speed_up_of_two(material, monkeypatch, equal_times):
    def timed(calls, device, **options):
        return [Timing(np.full(30, ms / 1e3), (ms / 1e3,), True, False, "interval", Telemetry()) for ms in (1, 2)]

    context, trained = material[0], material[1]
    options = RuntimesOptions.of(context)
    monkeypatch.setattr(runtimes, "time_interleaved", timed)
    reference = runtimes._Reference(trained, CPU, CPU, options)
    variant = runtimes._Variant(context, options, "a runtime", Prepared(trained.load(CPU), CPU, "fp32"), reference)
    rows, _ = variant.time_throughput(Verification("c", 0.0, 1.0))
    assert {row.value for row in of(rows, "speedup")} == {2.0}


def test_a_captured_graph_reads_the_inputs_of_each_call(monkeypatch):
    def capture(self, source):
        output = torch.empty_like(source)
        return SimpleNamespace(replay=lambda: output.copy_(self._model(source))), source, output

    monkeypatch.setattr(backends._Captured, "_capture", capture)  # a CPU has no graphs
    captured, x = backends._Captured(lambda x: 2 * x), torch.ones(2, 3)
    assert torch.equal(captured(x), 2 * x) and torch.equal(captured(5 * x), 10 * x) and torch.equal(captured(x[:1]), 2 * x[:1])
    assert torch.equal(x, torch.ones(2, 3)), "the inputs of the caller stay as they are"


def test_a_runtime_that_fails_is_unexpected_and_the_others_run(material, monkeypatch):
    context, trained = material[0], material[1]

    def broken(runtime, *given):
        if runtime == ORT_CPU:
            raise ValueError("no such operator")
        return prepare(runtime, *given)

    monkeypatch.setattr(runtimes, "IN_PROCESS", (ORT_CPU, backends.MIGRAPHX, EAGER))
    monkeypatch.setattr(runtimes, "prepare", broken)
    monkeypatch.setattr(
        RuntimesOptions, "why_absent", lambda self, kind, runtime, device: "" if runtime != backends.MIGRAPHX else "no"
    )
    rows = runtimes.measure_in_process(context, lambda *_: None, str(trained.folder)).rows
    assert [(row.variant, row.value_reason) for row in rows if row.is_unexpected] == [
        (ORT_CPU, f"{UNEXPECTED}ValueError: no such operator")
    ]
    assert of([row for row in rows if row.variant == EAGER], "latency_p50_s")[0].value


def test_a_slow_runtime_is_timed_with_fewer_calls_and_smaller_batches(material, monkeypatch):
    monkeypatch.setattr(batch_times, "second_call_s", lambda call, device: 0.2)  # 8 s allow 40 of the 80 calls
    asked = []
    time_function = batch_times.time_function

    def recorded(function, device, **options):
        asked.append(options.get("minimum_samples"))
        return time_function(function, device, **options)

    monkeypatch.setattr(batch_times, "time_function", recorded)
    rows = measured(material, EAGER)
    assert asked == [40, 6], "the latency, and the search with one example"
    search = of(rows, "samples_per_s", role="search")
    assert search[0].value and search[1].value is None
    assert search[1].value_reason == "a call with batch 3 takes 0.2 s; the profile allows 0.01 s"
    assert of(rows, "samples_per_s", role="best batch")[0].params["batch"] == 1


def test_a_runtime_on_the_cpu_of_a_machine_with_a_gpu_is_scored_on_fewer_images(material):
    context, trained = material[0], material[1]
    options = RuntimesOptions.of(context).model_copy(update={"host_images": 5})
    gpu = dataclasses.replace(CPU, kind="cuda")
    assert len(runtimes._Reference(trained, CPU, gpu, options).scores.losses) == 5
    assert len(runtimes._Reference(trained, CPU, CPU, options).scores.losses) == 8


def test_onnx_runtime_agrees_and_says_which_provider_ran(material):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    rows = measured(material, ORT_CPU)
    parity = of(rows, "relative_difference")
    assert all(row.value is not None and row.params["providers"] == CPU_PROVIDER for row in parity)
    assert of(rows, "stored_gb")[0].value * 1e9 > 4 * material[1].facts["parameters"] * 0.95
    assert of(rows, "kernels_per_call")[0].value >= 20, "at least the convolutions"
    compared = [row for row in of(rows, "samples_per_s") if row.params["role"] != "search"]
    assert compared and all(row.params["order"] == "blocks" for row in compared)
    for ratio in of(rows, "speedup"):
        role = ratio.params["role"]
        mine = next(row for row in compared if row.variant == ORT_CPU and row.params["role"] == role)
        eager = next(row for row in compared if row.params.get("beside") == ORT_CPU and row.params["role"] == role)
        # The ratio of the medians is not the median of the ratios, but it lies in an interval as wide as those of both times.
        assert eager.variant == EAGER and eager.ci_low / mine.ci_high <= 1 / ratio.value <= eager.ci_high / mine.ci_low
    assert len(of(rows, "speedup")) == len({row.params["role"] for row in compared})


def test_a_perceptron_has_the_outputs_of_eager_mode_and_its_int8_twin_is_near(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).eval()
    x = torch.randn(16, 64)
    expected = mlp(x).detach()
    path = onnx_int8.export(mlp, x, tmp_path / "mlp.onnx")
    session = Session(path)
    torch.testing.assert_close(session(x), expected, rtol=1e-3, atol=1e-5)
    executed = session.executed(x)
    assert {provider for _, provider in executed} == {CPU_PROVIDER}
    assert sum(operator in ("Gemm", "MatMul", "FusedGemm") for operator, _ in executed) >= 3
    small = Session(onnx_int8.quantise(onnx_int8.DYNAMIC, path, tmp_path / "int8.onnx"))
    error = float((small(x) - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.05, "8 bits have an error, and a small one"


@pytest.mark.parametrize(
    "change",
    [lambda y: y * 1.01, lambda y: y.roll(1, -1), lambda y: y[:1].expand(len(y), -1), lambda y: y * torch.nan],
    ids=["a missing scale", "shifted classes", "a fixed batch", "NaN"],
)
def test_a_wrong_runtime_has_no_value(material, change):
    rows = measured(material, EAGER, change)
    for row in of(rows, "relative_difference"):
        assert row.value is None and row.value_reason.startswith(UNEXPECTED)


@pytest.mark.parametrize(
    ("model", "metric"), [(1, "accuracy_difference"), (2, "perplexity_ratio")], ids=["classifier", "language"]
)
def test_a_runtime_that_prefers_the_least_probable_class_has_a_lower_quality(material, monkeypatch, model, metric):
    for times in ("time_latency", "time_throughput"):
        monkeypatch.setattr(runtimes._Variant, times, lambda self, *check: ([], []))
    # All 200 images: a toy model may classify none of the first eight correctly.
    context = dataclasses.replace(material[0], sizes=material[0].sizes | {"images": None})
    (quality,) = of(measured((context, *material[1:]), EAGER, lambda y: -y, model=model), metric)
    # The accuracy falls, and the perplexity rises.
    assert quality.ci_high < 0 if model == 1 else quality.ci_low > 1


@pytest.mark.parametrize(
    "fault",
    [{"change": lambda y: y * 1.01}, {"change_model": lambda model: replace_linears(model, INT4, CPU)}],
    ids=["a missing scale", "int4 weights"],
)
def test_a_wrong_model_in_16_bits_has_no_value(material, fault):
    # The tolerance is about 0.0035, twice the error of eager mode, and the planted errors are at least 0.0085.
    right = measured(material, EAGER, model=2, dtype="bf16")
    assert all(row.value is not None for row in of(right, "relative_difference")), "the model without the fault"
    rows = of(measured(material, EAGER, model=2, dtype="bf16", **fault), "relative_difference")
    assert len(rows) == 2
    for row in rows:
        assert row.value is None and row.value_reason.startswith(UNEXPECTED)


@pytest.mark.parametrize(
    ("metric", "value", "holds"),
    [
        ("perplexity_ratio", 0.99, False),
        ("perplexity_ratio", 1.01, False),
        ("perplexity_ratio", 0.9999, True),
        ("accuracy_difference", -0.01, False),
    ],
)
def test_a_quality_that_changes_in_either_direction_refutes_its_claim(metric, value, holds):
    row = Row(notebook="n", experiment="runtimes", variant=ORT_CPU, metric=metric, value=value, params={"model": "lm"})
    assert [claim[0] for claim in runtime_quality_claims([row])] == [holds]


def test_in_16_bits_an_eager_mode_with_a_large_error_does_not_widen_the_tolerance(material):
    context, trained = material[0], material[2]
    reference = runtimes._Reference(trained, CPU, CPU, RuntimesOptions.of(context))
    reference.eager("bf16").get_submodule("lm.model.layers.1.self_attn.o_proj").weight.zero_()
    assert reference.tolerance("bf16") == output_tolerance(reference.model, "bf16")


def test_the_tolerance_adds_the_squares_of_the_roundings_of_each_product():
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Conv2d(2, 3, 3))
    single, half = 2.0**-24, 2.0**-8
    # The sums have 16 and 18 terms, and each product rounds its output once.
    assert output_tolerance(model, "fp32") == pytest.approx(4 / math.sqrt(3) * math.sqrt(16 + 18 + 2) * single)
    assert output_tolerance(model, "bf16") == pytest.approx(4 / math.sqrt(3) * math.sqrt((16 + 18) * single**2 + 2 * half**2))


def test_a_compiled_model_cuts_other_batches_into_the_compiled_sizes(monkeypatch):
    seen = []

    def compile_nothing(model, dynamic):
        return lambda x: seen.append(len(x)) or model(x)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    model, x = nn.Linear(4, 2), torch.randn(7, 4)
    assert torch.allclose(backends._Compiled(model, (1, 3))(x), model(x)) and seen == [3, 3, 1]


def test_the_time_of_the_device_is_measured_on_inputs_in_the_format_of_the_model(material, monkeypatch):
    context, trained = material[0], material[1]
    options = RuntimesOptions.of(context)
    reference = runtimes._Reference(trained, CPU, CPU, options)
    model = trained.load(CPU, torch.bfloat16)
    seen = []

    def on_a_gpu(call, device):
        seen.append((*call().shape[:1], call().dtype))
        return 1e-6

    gpu = dataclasses.replace(CPU, kind="cuda")
    timed = batch_times.time_function
    monkeypatch.setattr(runtimes, "device_seconds", on_a_gpu)
    monkeypatch.setattr(batch_times, "second_call_s", lambda call, device: 1e-3)
    monkeypatch.setattr(batch_times, "time_function", lambda call, device, **options: timed(call, CPU, **options))
    rows, _ = runtimes._Variant(context, options, backends.GRAPH, Prepared(model, gpu, "bf16"), reference).time_latency()
    assert seen == [(1, torch.bfloat16)]
    assert of(rows, "share")[0].params["label"] == "host-bound"


def test_a_profiler_that_records_no_kernel_of_a_gpu_leaves_the_rows_without_a_value(material, monkeypatch):
    context, trained = material[0], material[1]
    options = RuntimesOptions.of(context)
    gpu = dataclasses.replace(CPU, kind="cuda")
    on_any = profiling.profiled
    monkeypatch.setattr(profiling, "profiled", lambda call, device: on_any(call, CPU))  # its events are those of the CPU
    reference = runtimes._Reference(trained, CPU, CPU, options)
    variant = runtimes._Variant(context, options, backends.GRAPH, Prepared(trained.load(CPU), gpu, "fp32"), reference)
    rows = [variant.kernels_row(), variant.host_bound_row(reference.inputs[:1], 1e-3)]
    assert [(row.metric, row.value, row.value_reason) for row in rows] == [
        ("kernels_per_call", None, "the profiler recorded no kernel on the GPU"),
        ("share", None, "the profiler recorded no kernel on the GPU"),
    ]


def test_the_loops_of_a_gpu_stay_without_profiling_because_its_packages_would_not_compile():
    import torch._inductor.config as config

    with backends._recorded_loops(torch.device("cuda")):
        assert not config.cpp.enable_kernel_profile
    with backends._recorded_loops(torch.device("cpu")):
        assert config.cpp.enable_kernel_profile


def test_the_reason_of_an_ended_process_has_the_last_line_of_its_log():
    ended = JobError("jobs:build failed with exit code 1\n  File a.py\nRuntimeError: no compiler\n", where="worker process 7")
    assert runtimes._reason(ended) == "JobError: jobs:build failed with exit code 1: RuntimeError: no compiler"
    assert runtimes._reason(ValueError("a\nb")) == "ValueError: a"


def test_only_operators_that_compute_are_counted():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Flatten(0), nn.Softmax(0))
    assert count_kernels(Prepared(model, CPU, "fp32"), torch.randn(4, 8)) == 3


def test_a_session_on_another_provider_is_refused():
    require_provider("CUDAExecutionProvider", ["CUDAExecutionProvider", CPU_PROVIDER])
    with pytest.raises(HyperionError, match="asked for CUDAExecutionProvider, but the session runs on CPUExecutionProvider"):
        require_provider("CUDAExecutionProvider", [CPU_PROVIDER])


def test_onnx_runtime_itself_would_run_on_the_cpu(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime has the provider")
    path = onnx_int8.export(nn.Linear(4, 2), torch.ones(2, 4), tmp_path / "model.onnx")
    with (
        pytest.raises(HyperionError, match="asked for CUDAExecutionProvider"),
        pytest.warns(UserWarning, match="not in available"),
    ):
        Session(path, "CUDAExecutionProvider")


def test_the_idle_threads_of_every_session_sleep(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    opened = []
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda path, options, **more: opened.append(options) or session(path, options, **more)
    )
    x = torch.ones(2, 4)
    path = onnx_int8.export(nn.Linear(4, 2), x, tmp_path / "model.onnx")
    opened.clear()
    Session(path).executed(x)
    assert [options.get_session_config_entry(SPINNING) for options in opened] == ["0"] * 2
    assert {options.intra_op_num_threads for options in opened} == {torch.get_num_threads()}


def test_what_is_absent_says_why_and_the_next_step(monkeypatch):
    cpu, rocm = SimpleNamespace(kind="cpu"), SimpleNamespace(kind="rocm")
    assert "needs an AMD GPU" in why_no_migraphx(cpu)
    assert "next step: install migraphx" in why_no_migraphx(rocm, lambda name: None)
    assert why_no_migraphx(rocm, lambda name: object()) == ""
    missing = why_no_onnx(lambda name: None if name == "onnxruntime" else object())
    assert missing == "unavailable: onnxruntime not installed; next step: pip install onnxruntime"
    assert why_no_gpu_provider(cpu) == "unavailable: this machine has no GPU"
    monkeypatch.setitem(
        sys.modules, "onnxruntime", SimpleNamespace(get_available_providers=lambda: [CPU_PROVIDER], __version__="1.0")
    )
    assert why_no_gpu_provider(rocm) == (
        "unavailable: onnxruntime 1.0 has only CPUExecutionProvider, none of MIGraphXExecutionProvider, ROCMExecutionProvider"
    )
    assert "no graphs" in why_absent(backends.GRAPH, CPU)


def test_migraphx_compiles_once_for_each_shape_and_gets_the_inputs(tmp_path):
    parsed = []

    class Output:
        """An argument of MIGraphX, which has the buffer protocol."""

        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return self.values.ravel()

        def get_shape(self):
            return SimpleNamespace(lens=lambda: self.values.shape)

    class Program:
        def compile(self, target):
            assert target == "the target gpu"

        def run(self, inputs):
            return [Output(2 * inputs["x"])]

    def parse_onnx(path, map_input_dims):
        parsed.append(map_input_dims["x"])
        return Program()

    fake = SimpleNamespace(parse_onnx=parse_onnx, get_target=lambda name: f"the target {name}", argument=np.asarray)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"12345")
    prepared = backends._migraphx(path, CPU, {}, fake)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(prepared.call(x), 2 * x) and torch.equal(prepared.call(x), 2 * x)
    assert torch.equal(prepared.call(x[:1]), 2 * x[:1])
    assert parsed == [[2, 3], [1, 3]] and prepared.stored_bytes == 5


@pytest.mark.process
def test_a_package_that_ends_its_process_is_a_row_with_the_reason(material, monkeypatch):
    context, trained, _ = material
    options = RuntimesOptions.of(context)
    for build, load, step in (
        (dying_jobs.build, dying_jobs.end_process, "loads and runs"),
        (dying_jobs.end_process, dying_jobs.build, "builds"),
    ):
        monkeypatch.setattr(runtimes, "build_in_process", build)
        monkeypatch.setattr(runtimes, "load_in_process", load)
        rows = runtimes._ahead_of_time(context, options, trained, runtimes._build(context, options, trained)).rows
        assert {row.variant for row in rows} == {AOTI} and all(row.value is None for row in rows)
        assert all(f"the process that {step} the package" in row.value_reason for row in rows)
        assert all("was killed by SIGSEGV" in row.value_reason for row in rows)
        assert sum(row.is_unexpected for row in rows) == 1


_REGEX = """
#include <regex>
extern "C" int digits(const char* text) { return std::regex_match(text, std::regex("[0-9]+")); }
"""
_CALL = """
import ctypes, sys, torch
from hyperion.experiments.inference.backends import share_cpp_library
if sys.argv[2] == "shared":
    share_cpp_library()
print(ctypes.CDLL(sys.argv[1]).digits(b"123"))
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_library_with_its_own_copy_of_the_cpp_library_works_if_that_of_the_process_is_visible(tmp_path):
    """AOTInductor's packages use std::regex when they are loaded, and some compilers link libstdc++ statically."""
    source, library = tmp_path / "regex.cpp", tmp_path / "regex.so"
    source.write_text(_REGEX)
    command = ["g++", "-shared", "-fPIC", "-static-libstdc++", str(source), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"g++ cannot link libstdc++ statically: {built.stderr[-200:]}")
    run = partial(subprocess.run, capture_output=True, text=True)
    alone, shared = (run([sys.executable, "-c", _CALL, str(library), how]) for how in ("alone", "shared"))
    if alone.returncode == 0:
        pytest.skip("on this machine, a library with its own copy works without the remedy")
    assert (shared.returncode, shared.stdout.strip()) == (0, "1")


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_torch_compile_searches_the_largest_batch_of_the_others(profile):
    options = RuntimesOptions.parse(load_profile(profile).sizes("runtimes"), "runtimes")
    assert set(options.compiled_batches) <= set(options.batches) and 1 in options.compiled_batches
    left_out = all(COMPILED in options.left_out.get(kind, ()) for kind in ("language", "classifier"))
    assert left_out or max(options.compiled_batches) == max(options.batches)
