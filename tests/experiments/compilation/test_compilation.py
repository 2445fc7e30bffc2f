"""The compilation experiment: rows of a mode, planted wrong outputs and dtypes refused, reasons for what cannot be measured."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from hyperion.chapter import Context, load_profile
from hyperion.errors import HyperionError
from hyperion.experiments.compilation import compilation
from hyperion.experiments.compilation.compilation_models import (
    IMAGENET_STEM,
    ModelSpec,
    fit_to_weights,
    make_model,
    reference_output,
)
from hyperion.hardware import detect
from hyperion.measure import relative_error
from hyperion.measure.steps.compilation import MODES, Compilation
from hyperion.results import Row, RowError
from tests.hardware.machines import facts

LANGUAGE = {
    "model": "lm_d128_h4_l2",
    "dtype": "fp32",
    "batch": 2,
    "sequence_length": 8,
    "vocabulary": 64,
    "modes": ["eager", "default"],
}
IMAGES = {"model": "resnet18_w4", "dtype": "bf16", "batch": 2, "modes": ["eager", "default"]}
LANGUAGE_SPEC, IMAGE_SPEC = (ModelSpec.model_validate(spec, strict=False) for spec in (LANGUAGE, IMAGES))
SIZES = {"samples": 50, "back_to_back": 2, "time_limit_s": 0.01, "models": [LANGUAGE, IMAGES]}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def context(tmp_path):
    return Context(notebook="toy", experiment="compilation", sizes=SIZES, workspace=tmp_path)


def measured(context, spec, mode):
    result = compilation.measure_mode(context, lambda *progress: None, spec, mode, str(context.workspace))
    for row in result.rows:
        row.validate()
    return result


def value_of(rows, metric, **params):
    return next(row for row in rows if row.metric == metric and params.items() <= row.params.items())


@pytest.fixture
def compiled(monkeypatch):
    """Instead of a compiler, which takes seconds: the module itself, through a function that may spoil its output."""

    def pretend(spoil):
        def compile_it(function, arguments, mode, device, search):
            facts = Compilation(mode, 2.0, (2.1, 0.1, 0.1, 0.1), 1, {}, (), {"fused": 3, "template": 0, "library": 4}, "replayed")
            return lambda *inputs: spoil(function(*inputs)), facts

        monkeypatch.setattr(compilation, "measure_compilation", compile_it)
        monkeypatch.setattr(compilation, "probe_vector_instructions", lambda *arguments: None)

    return pretend


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LANGUAGE, IMAGES], ids=lambda spec: spec["model"])
def test_eager_is_timed_checked_and_computes_in_the_dtype_it_names(context, spec):
    result = measured(context, spec, "eager")
    time = value_of(result.rows, "inference_time_s")
    assert time.n >= 50 and time.check == "float64 slice" and time.params["clock"] == "wall, 2 calls in a row"
    assert value_of(result.rows, "share").value == 1.0
    memory = value_of(result.rows, "peak_rss_gib")
    assert memory.value > memory.limit > 0 and memory.limit_source == "the weights alone"
    assert len(result.samples) == time.n and set(result.samples["variant"]) == {"eager"}


@pytest.mark.slow
def test_a_mode_is_compared_with_eager_in_turn(context, compiled):
    compiled(lambda output: output)
    result = measured(context, LANGUAGE, "default")
    ratio = value_of(result.rows, "speedup")
    assert ratio.check == "eager output" and ratio.check_error == 0.0 and ratio.n >= 50
    assert set(result.samples["variant"]) == {"default", "eager beside default"}
    assert value_of(result.rows, "count", what="calls of fused kernels").value == 3
    assert value_of(result.rows, "compile_time_s").params["cuda_graphs"] == "replayed"
    calls = value_of(result.rows, "break_even_calls")
    if ratio.ci_low > 1:
        saved = value_of(result.rows, "inference_time_s").value * (ratio.value - 1)
        assert calls.value == pytest.approx(2.0 / saved)
    else:
        assert calls.value is None and "reaches down to 1" in calls.value_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil", [lambda output: output * 1.001, lambda output: output.roll(1, 0), lambda output: output.half().float()]
)
def test_a_planted_wrong_output_is_refused(context, compiled, spoil):
    compiled(spoil)
    with pytest.raises(RowError, match="failed its check"):
        measured(context, LANGUAGE, "default")


@pytest.mark.slow
def test_an_output_of_another_dtype_is_refused(context, compiled):
    compiled(lambda output: output.float())
    with pytest.raises(RowError, match="check_error is nan"):
        measured(context, IMAGES, "default")


@pytest.mark.slow
def test_eager_in_another_dtype_than_declared_is_refused(context, monkeypatch):
    """The published mistake: the flag said bf16, the timed calls computed in fp32."""
    make = compilation.make_model
    fp32 = {"dtype": "fp32"}
    monkeypatch.setattr(compilation, "make_model", lambda spec, *rest: make(spec.model_copy(update=fp32), *rest))
    with pytest.raises(RowError, match=r"share failed its check|check_error is nan"):
        measured(context, IMAGES, "eager")


@pytest.mark.slow
def test_memory_below_the_weights_is_refused(context, monkeypatch):
    """What was read of another model's memory, or before the model was there, cannot pass for this one's."""
    row = value_of(measured(context, LANGUAGE, "eager").rows, "peak_rss_gib")
    with pytest.raises(RowError, match="beyond its limit"):
        replace(row, value=0.9 * row.limit).validate()


def test_a_missing_compiler_is_a_row_with_the_reason(context, monkeypatch):
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: "no working C++ compiler 'g++'")
    (row,) = measured(context, LANGUAGE, "default").rows
    assert row.value is None and row.value_reason.startswith("unavailable: no working C++ compiler")


def test_a_compiler_that_fails_is_a_row_with_the_reason(context, monkeypatch):
    def fail(*arguments):
        raise torch._dynamo.exc.InternalTorchDynamoError("it broke\nin many lines")

    import torch._dynamo

    monkeypatch.setattr(compilation, "measure_compilation", fail)
    monkeypatch.setattr(compilation, "probe_vector_instructions", lambda *arguments: None)
    (row,) = measured(context, LANGUAGE, "max-autotune").rows
    assert row.value_reason == "the compiler failed: it broke"


def test_every_mode_is_listed_also_those_the_profile_leaves_out(context, monkeypatch):
    asked = []

    def variant(context, report, function, params):
        asked.append((params["spec"]["model"], params["mode"], function))
        row = context.row(params["mode"], "inference_time_s", None, params=params["spec"], value_reason="made up")
        return compilation.Result([row], pd.DataFrame())

    monkeypatch.setattr(compilation, "run_variant", variant)
    rows = compilation.run(context, lambda *progress: None).rows
    assert [(row.params["model"], row.variant) for row in rows] == [(s["model"], m) for s in (LANGUAGE, IMAGES) for m in MODES]
    assert [mode for _, mode, _ in asked] == ["eager", "default"] * 2
    assert {function for *_, function in asked} == {compilation.measure_mode}


@pytest.mark.slow
def test_forecasts_rest_on_ceilings_and_shapes_and_meet_their_rows(context):
    without = compilation.forecast(context)
    assert all(forecast.estimate is None and "no ceilings" in forecast.basis for forecast in without)
    ceilings = [
        Row(notebook="n", experiment="e", variant="v", dtype=dtype, metric=metric, value=1.0, params={"elements": 1})
        for dtype, metric in (("fp32", "gemm_tflops"), ("bf16", "gemm_tflops"), ("fp32", "bandwidth_gb_s"))
    ]
    forecasts = compilation.forecast(replace(context, upstream=ceilings))
    assert [forecast.metric for forecast in forecasts] == ["speedup"] * 2 + ["inference_time_s"] * 4
    assert all(forecast.estimate > 1 for forecast in forecasts[:2])
    # 2 layers with 6 products with weights and an attention, which is one operation on every device, and the output layer.
    assert "lm_d128_h4_l2: 15 products" in forecasts[0].basis
    # With longer launches, all calls take longer, because a CPU records no graphs.
    launch = Row(notebook="n", experiment="launch_cost", variant="eager", metric="launch_time_s", value=1e-3)
    slower = compilation.forecast(replace(context, upstream=[*ceilings, launch]))
    assert all(after.estimate > before.estimate for before, after in zip(forecasts[2:], slower[2:], strict=True))
    assert "measured launches" in slower[-1].basis and "assumed" in forecasts[-1].basis
    rows = measured(context, IMAGES, "eager").rows
    time = value_of(rows, "inference_time_s")
    assert any(f.variant == "eager" and f.params.items() <= time.params.items() for f in forecasts[2:])


def test_a_gpu_waits_for_launches_only_in_modes_without_a_graph(context, monkeypatch):
    gpu = detect(facts("H100 SXM"))
    monkeypatch.setattr(Context, "device", property(lambda of_context: gpu))
    upstream = [
        Row(notebook="n", experiment="e", variant="v", dtype=dtype, metric=metric, value=value, params={"elements": 1})
        for dtype, metric, value in (("bf16", "gemm_tflops", 700.0), ("fp32", "bandwidth_gb_s", 3e3))
    ]
    upstream.append(Row(notebook="n", experiment="launch_cost", variant="eager", metric="launch_time_s", value=1e-3))
    sizes = SIZES | {"models": [IMAGES | {"modes": ["eager", "default", "reduce-overhead"]}]}
    speedup, eager, default, graph = compilation.forecast(replace(context, sizes=sizes, upstream=upstream))
    # One launch takes 1 ms, and an operator four of them. A library kernel takes as long as an operator, and a fused one half.
    operations, products = eager.estimate / 4e-3, default.estimate / 4e-3 / 1.5
    assert operations == pytest.approx(round(operations)) and products == pytest.approx(round(products)) and operations > products
    assert graph.estimate < 1e-3 and speedup.estimate == pytest.approx(eager.estimate / graph.estimate)


def profile_models(name):
    return compilation.CompilationOptions.parse(load_profile(name).sizes("compilation"), "compilation").models


@pytest.mark.parametrize("name", ["smoke", "full", "study"])
def test_profiles_measure_eager_and_name_only_modes_there_are(name):
    for spec in profile_models(name):
        assert spec.modes[0] == "eager" and len(spec.modes) > 1 and set(spec.modes) <= set(MODES)
        make_model(spec, "meta", seed=0)


def test_full_has_the_published_shapes():
    images, language = profile_models("full")
    assert (images.model, images.batch) == (IMAGENET_STEM, 32)
    model = make_model(language, "meta", seed=0)
    assert model.inputs[0].shape == (8, 128) and language.dtype == "bf16"
    config = model.module.config
    assert (config.width, config.heads, config.layers, config.vocab_size) == (768, 12, 4, 50257)


def test_the_reference_has_the_models_own_weights():
    model = make_model(LANGUAGE_SPEC, "cpu", seed=3)
    with torch.inference_mode():
        own, reference = model.module(*model.inputs), reference_output(LANGUAGE_SPEC, model)
    assert reference.dtype is torch.float64 and len(reference) == 1 and relative_error(own[:1], reference) < 1e-5


def test_given_weights_are_used_and_others_refused():
    other = make_model(LANGUAGE_SPEC, "cpu", seed=1)
    weights = other.module.state_dict()
    loaded = make_model(LANGUAGE_SPEC, "cpu", 0, weights)
    assert torch.equal(loaded.module.token_embedding.weight, other.module.token_embedding.weight)
    with pytest.raises(HyperionError, match=r"do not fit resnet18_w4: conv1.weight is missing \(and \d+ more\)"):
        make_model(IMAGE_SPEC, "cpu", 0, weights)
    longer = LANGUAGE_SPEC.model_copy(update={"vocabulary": 50257, "sequence_length": 128})
    shorter = fit_to_weights(longer, weights)
    assert (shorter.vocabulary, shorter.sequence_length) == (64, 8)
    assert fit_to_weights(IMAGE_SPEC, weights) == IMAGE_SPEC
