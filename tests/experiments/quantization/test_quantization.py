"""Quantised models, decoding and training with few bits at toy sizes: rows with checks, reasons, planted faults."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperion.chapter import Context, experiment_named, load_profile
from hyperion.errors import HyperionError
from hyperion.experiments.quantization import decode_speed, onnx_int8, qlora, quantization, quantized_linears
from hyperion.experiments.quantization.claims import byte_claims, decode_claims, error_claims, quality_claims, training_claims
from hyperion.experiments.quantization.decoder import COMPILED, EAGER, MODES, DecodeBlock, StaticDecoder, tokens_of_plain_forward
from hyperion.experiments.quantization.layer_checks import output_bound
from hyperion.experiments.quantization.quantized_linears import SCHEMES, Int8Linear, why_no_bitsandbytes
from hyperion.hardware import Telemetry, detect, detect_cpu
from hyperion.measure import Timing, Verification
from hyperion.models.llama import build_random_llama
from hyperion.results import Row, RowError
from hyperion.results.rows import UNEXPECTED
from hyperion.workloads.onnx_sessions import Session, why_no_onnx
from hyperion.workloads.quality import windows_of_tokens
from tests.chapter.toy import perform, toy_context
from tests.experiments.quantization.planted_bugs import unpack_wrong_nibble

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
TOY = {
    "language_model": "llama_toy",
    "classifier": "resnet18_toy",
    "dtype": "fp32",
    "batch_size": 4,
    "batches": [1, 3],
    "latency_samples": 20,
    "latency_limit_s": 0.1,
    "time_limit_s": 0.01,
}
DECODE = {
    "trained_model": "llama_toy",
    "dtype": "fp32",
    "schemes": ["int8 weight-only"],
    "prompt_tokens": 4,
    "new_tokens": 4,
    "positions": 16,
    "time_limit_s": 0.01,
}
QLORA = {
    "trained_model": "llama_toy",
    "sequence_length": 64,
    "batch_size": 4,
    "held_out_rows": 8,
    "steps": 10,
    "adapter_rate": 1e-2,
    "full_rate": 1e-3,
    "qlora_bound_nats": 0.3,
}


@pytest.fixture(scope="module", autouse=True)
def home(toy_models, tmp_path_factory):
    """The trained models of all tests of this file."""
    folder = shutil.copytree(toy_models, tmp_path_factory.mktemp("trained") / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(folder))
        experiment_named("quantization")  # registers the metrics
        yield


def known(rows, metric):
    return [row for row in rows if row.metric == metric and row.value is not None]


@pytest.fixture(scope="module")
def result(home, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("quantization")
    return perform(toy_context("quantization", TOY, folder), folder)


def test_the_files_of_the_variants_are_removed(home, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "SCHEMES", ())
    monkeypatch.setattr(quantization, "_in_onnx", lambda *given: ([], []))
    context = toy_context("quantization", TOY, tmp_path)
    quantization.run(context, lambda *progress: None)
    assert not context.workspace.exists()


@pytest.mark.long
def test_every_scheme_has_bytes_errors_quality_and_time_or_a_reason(result):
    ran = {row.variant for row in known(result.rows, "count")}
    here = {scheme.name for scheme in SCHEMES if not scheme.why_absent(detect())}
    assert ran == here | set(onnx_int8.KINDS)
    for metric in ("weight_bytes", "relative_difference", "speedup", "stored_gb"):
        assert ran <= {row.variant for row in known(result.rows, metric)}, metric
    assert ran - {onnx_int8.DIVERGENCE} <= {row.variant for row in known(result.rows, "perplexity_ratio")}
    absent = {row.variant: row.value_reason for row in result.rows if row.value is None and row.metric == "weight_bytes"}
    assert set(absent) == {scheme.name for scheme in SCHEMES} - here and all(absent.values())
    assert {row.variant for row in known(result.rows, "accuracy_difference")} == set(onnx_int8.KINDS)
    variants = {(row.variant, row.params["model"], row.params["runtime"]) for row in known(result.rows, "inference_time_s")}
    for metric, batches in (("latency_p50_s", [1]), ("latency_p99_s", [1]), ("samples_per_s", [1, 3])):
        found = [row for row in result.rows if row.metric == metric]
        for variant in variants:
            one = [row for row in found if (row.variant, row.params["model"], row.params["runtime"]) == variant]
            assert [row.params["batch"] for row in one] == batches, (metric, variant)
    assert all(holds for holds, _ in byte_claims(result.rows) + error_claims(result.rows))


@pytest.mark.long
def test_rows_name_what_ran(result):
    found = {(row.variant, row.params["model"]): row.params for row in known(result.rows, "count")}
    static = found["int8 static", "resnet18_toy"]
    assert static["provider"] == "CPUExecutionProvider" and static["operators"] == {"QLinearConv": 20, "QGemm": 1}
    assert set(found["int8 dynamic", "llama_toy"]["operators"]) <= {"MatMulIntegerToFloat", "DynamicQuantizeMatMul"}
    assert found["int8 weight-only", "llama_toy"]["module"] == "Int8Linear"
    if not why_no_bitsandbytes(detect_cpu()):
        assert found["NF4", "llama_toy"]["module"] == "Linear4bit"
        assert "bitsandbytes" in found["NF4", "llama_toy"]["kernel"]


@pytest.mark.long
def test_bytes_are_predicted_before_and_the_order_of_formats_is_right(result, tmp_path):
    forecasts = quantization.forecast(toy_context("quantization", TOY, tmp_path))
    stored = {(row.variant, json.dumps(row.params)): row.value for row in known(result.rows, "weight_bytes")}
    compared = [one for one in forecasts if (one.variant, json.dumps(one.params)) in stored]
    assert len(compared) >= 4
    assert all(stored[one.variant, json.dumps(one.params)] == one.estimate for one in compared)
    by_name = {row.variant: row.value for row in known(result.rows, "weight_bytes") if row.params["runtime"] == "PyTorch"}
    assert by_name["int4 weight-only"] < by_name["int8 weight-only"] < by_name["original"] / 3.5


@pytest.mark.parametrize("fault", ["wrong nibble", "scale not applied"])
def test_planted_faults_of_a_scheme_are_refused(fault, tmp_path, monkeypatch):
    scheme = "int4 weight-only" if fault == "wrong nibble" else "int8 weight-only"
    monkeypatch.setattr(quantization, "SCHEMES", tuple(one for one in SCHEMES if one.name == scheme))
    monkeypatch.setattr(quantization, "_in_onnx", lambda *given: ([], []))
    if fault == "wrong nibble":
        monkeypatch.setattr(quantized_linears, "unpack_int4", unpack_wrong_nibble)
    else:
        monkeypatch.setattr(Int8Linear, "forward", lambda self, x: F.linear(x, self.q_NK.to(x.dtype)))
    with pytest.raises(RowError, match="largest error over its bound"):
        perform(toy_context("quantization", TOY, tmp_path), tmp_path)


def test_a_scheme_that_fails_is_unexpected_and_an_error_of_the_device_ends_the_experiment(tmp_path, monkeypatch):
    class Refusing(type(SCHEMES[0])):
        error = RuntimeError("the shape is not supported")

        def convert(self, weight_NK, device):
            raise self.error

    monkeypatch.setattr(quantization, "SCHEMES", (Refusing(),))
    monkeypatch.setattr(quantization, "_in_onnx", lambda *given: ([], []))
    rows = perform(toy_context("quantization", TOY, tmp_path), tmp_path).rows
    (failed,) = [row for row in rows if row.is_unexpected]
    assert failed.value_reason == f"{UNEXPECTED}the shape is not supported" and failed.variant == SCHEMES[0].name
    assert known(rows, "inference_time_s"), "the original model still runs"
    assert [claim for claim in byte_claims(rows) if not claim[0]] == [(False, f"{failed.variant}: {failed.value_reason}")]
    Refusing.error = torch.AcceleratorError("an illegal memory access")
    with pytest.raises(torch.AcceleratorError):
        perform(toy_context("quantization", TOY, tmp_path / "again"), tmp_path / "again")


@pytest.mark.skipif(bool(why_no_onnx()), reason=why_no_onnx())
@pytest.mark.parametrize("kind", onnx_int8.KINDS)
def test_int8_of_onnx_runtime_is_within_its_bound_and_a_wrong_scale_is_not(kind, tmp_path):
    import onnx
    from onnx import numpy_helper

    torch.manual_seed(0)
    layer, x = nn.Linear(48, 16, bias=False), torch.randn(5, 48)
    source = onnx_int8.export(layer, x, tmp_path / "layer.onnx")
    # The calibration data have half of the range, so values are clipped.
    path = onnx_int8.quantise(kind, source, tmp_path / "int8.onnx", [0.5 * x])
    weight = layer.weight.detach()
    ranges = onnx_int8.dynamic_ranges(x) if kind == onnx_int8.DYNAMIC else onnx_int8.static_ranges(path)
    exact = F.linear(x.double(), weight.double())
    bound = output_bound(F.linear, x, weight, ranges.input_error(x), onnx_int8.weight_error(kind, weight), 1e-5)
    bound = bound + ranges.output_error(exact)

    def worst():
        return ((Session(path)(x).double() - exact).abs() / bound).max().item()

    assert 0.01 < worst() <= 1
    if kind == onnx_int8.STATIC:
        calibrated = pytest.approx((0.5 * x.min().item(), 0.5 * x.max().item()), abs=ranges.input_step)
        assert (ranges.input_low, ranges.input_high) == calibrated
    assert onnx_int8.stored_weight_bytes(path) == onnx_int8.weight_bytes(kind, [(16, 48)])
    # A batch that is smaller than the exported one gives the same values.
    assert torch.equal(Session(path)(x)[:2], Session(path)(x[:2])) or kind == onnx_int8.DYNAMIC
    model = onnx.load(str(path))
    # Some exporters store the mask of causal attention as a constant. It is no weight.
    model.graph.initializer.append(numpy_helper.from_array(np.tri(8, dtype=bool), "le"))
    onnx.save(model, str(path))
    assert onnx_int8.stored_weight_bytes(path) == onnx_int8.weight_bytes(kind, [(16, 48)])
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if tensor.name.endswith("_scale") and values.size == 16:  # the scales of another output
            tensor.CopyFrom(numpy_helper.from_array(values[::-1].copy() * 3, tensor.name))
    onnx.save(model, str(path))
    assert worst() > 1


def test_on_a_machine_with_a_gpu_the_cpu_provider_scores_less_data_in_smaller_batches(tmp_path):
    context = toy_context("quantization", TOY | {"host_batch_size": 2, "host_windows": 3}, tmp_path)
    trained = quantization.trained_language_model(context, "llama_toy")
    beside_gpu = SimpleNamespace(device=replace(detect_cpu(), kind="cuda"))
    options = quantization.QuantizationOptions.of(context)
    sizes = []

    def logits(x):
        sizes.append(len(x))
        return F.one_hot(x, 640).float()

    scored = {}
    for name, there in (("cpu", context), ("beside a GPU", beside_gpu)):
        material = quantization._Material(there, options, trained, quantization.ORT, detect_cpu(), "fp32")
        sizes.clear()
        scores = material.score(logits)
        scored[name] = sum(sizes), sizes[0], len(material.batch())
        assert len(windows_of_tokens(trained, material.records)) == len(scores.losses)
    assert scored == {"cpu": (16, 4, 4), "beside a GPU": (3, 2, 2)}


@pytest.mark.skipif(bool(why_no_onnx()), reason=why_no_onnx())
def test_ranges_come_from_training_data_and_each_variant_is_scored_and_timed_as_itself(tmp_path, monkeypatch):
    calibrated, timed = [], {}
    quantise = onnx_int8.quantise

    def recorded(kind, source, target, calibration=(), *skip):
        calibrated.extend(calibration)
        return quantise(kind, source, target, calibration, *skip)

    context = toy_context("quantization", TOY, tmp_path)
    context.workspace.mkdir(parents=True)
    trained = quantization.trained_language_model(context, "llama_toy")
    options = quantization.QuantizationOptions.of(context)
    monkeypatch.setattr(onnx_int8, "quantise", recorded)
    monkeypatch.setattr(quantization, "_onnx_error_rows", lambda *given: [])
    monkeypatch.setattr(quantization, "SCHEMES", SCHEMES[:1])
    monkeypatch.setattr(quantization._Material, "time_rows", lambda self, variants: timed.update(variants) or ([], []))
    rows, _ = quantization._in_onnx(context, options, trained)
    files = {name: session._path.name for name, (_, session) in timed.items()}
    assert files == {
        quantization.ORIGINAL: "language.onnx",
        onnx_int8.DYNAMIC: "language-0.onnx",
        onnx_int8.STATIC: "language-1.onnx",
    }
    windows = torch.cat(calibrated).tolist()
    of_training, held_out = trained.calibration(detect_cpu()).tolist(), trained.held_out(detect_cpu())[0].tolist()
    assert windows and all(window in of_training and window not in held_out for window in windows)
    timed.clear()
    rows += quantization._language_in_torch(context, options, trained, lambda *progress: None)[0]
    linears = {name: len(quantized_linears.block_linears(model)) for name, (_, model) in timed.items()}
    assert linears[quantization.ORIGINAL] > 0 and linears[SCHEMES[0].name] == 0
    ratios = {row.variant: row.value for row in known(rows, "perplexity_ratio")}
    assert set(ratios) == {onnx_int8.DYNAMIC, onnx_int8.STATIC, SCHEMES[0].name} and 1.0 not in ratios.values()


def test_a_variant_that_takes_half_the_time_has_a_speed_up_of_two(tmp_path, monkeypatch):
    context = toy_context("quantization", TOY, tmp_path)
    options, trained = quantization.QuantizationOptions.of(context), quantization.trained_language_model(context, "llama_toy")
    material = quantization._Material(context, options, trained, quantization.EAGER, detect_cpu(), "fp32")
    monkeypatch.setattr(quantization, "time_interleaved", lambda calls, device, **given: [timing_of(2.0), timing_of(1.0)])
    rows, _ = material._in_alternation({quantization.ORIGINAL: ("fp32", int), "int8": ("int8", int)})
    assert [(row.variant, row.value) for row in known(rows, "speedup")] == [("int8", 2.0)]


def test_a_weight_of_onnx_runtime_has_an_error_of_at_most_a_step_of_its_scale():
    weight = torch.tensor([[1.0, -2.0], [0.5, 0.25]])
    by_output, by_tensor = torch.tensor([[4.0, 4.0], [1.0, 1.0]]).double() / 255, torch.full((2, 2), 4.0).double() / 255
    assert torch.equal(onnx_int8.weight_error(onnx_int8.STATIC, weight), by_output)
    assert torch.equal(onnx_int8.weight_error(onnx_int8.DYNAMIC, weight), by_output)
    # The convolution of the dynamic kind has a single scale.
    of_convolution = onnx_int8.weight_error(onnx_int8.DYNAMIC, weight[:, :, None, None])
    assert torch.equal(of_convolution[..., 0, 0], by_tensor)


def test_static_quantisation_needs_calibration(tmp_path):
    if why_no_onnx():
        pytest.skip(why_no_onnx())
    source = onnx_int8.export(nn.Linear(8, 4), torch.randn(2, 8), tmp_path / "layer.onnx")
    with pytest.raises(HyperionError, match="without calibration data"):
        onnx_int8.quantise(onnx_int8.STATIC, source, tmp_path / "int8.onnx")


def test_without_onnx_runtime_its_rows_have_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "why_no_onnx", lambda: "unavailable: made up")
    monkeypatch.setattr(quantization, "SCHEMES", ())
    rows = perform(toy_context("quantization", TOY, tmp_path), tmp_path).rows
    absent = [row.variant for row in rows if row.value_reason == "unavailable: made up"]
    assert absent == [onnx_int8.DYNAMIC, onnx_int8.STATIC, *onnx_int8.KINDS]


@pytest.mark.skipif(bool(why_no_onnx()), reason=why_no_onnx())
def test_calibration_by_divergence_cuts_off_few_large_values(tmp_path):
    """Few large values widen the range of the static kind. Cutting them off makes the error of all others smaller."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 16, bias=False)
    calibration = torch.randn(256, 64)
    calibration[0, 0] = 20.0
    x = torch.randn(256, 64)
    source, exact = onnx_int8.export(layer, x, tmp_path / "layer.onnx"), layer(x).detach()
    ranges, errors = {}, {}
    for kind in (onnx_int8.STATIC, onnx_int8.DIVERGENCE):
        path = onnx_int8.quantise(kind, source, tmp_path / "int8.onnx", [calibration])
        ranges[kind] = onnx_int8.static_ranges(path)
        errors[kind] = (Session(path)(x) - exact).norm().item()
    assert ranges[onnx_int8.STATIC].input_high > 19
    # The normal values reach 4. The smallest range that the search can choose ends at 20 * 128 / 1024.
    assert 2.5 < ranges[onnx_int8.DIVERGENCE].input_high < 8
    # The error is proportional to the range of the input, which is 2.7 times as large with the large value.
    assert errors[onnx_int8.DIVERGENCE] < 0.75 * errors[onnx_int8.STATIC]
    assert not list(tmp_path.glob("*calibration*"))


@pytest.mark.skipif(bool(why_no_onnx()), reason=why_no_onnx())
def test_ranges_of_least_divergence_do_not_depend_on_the_order_of_the_calibration_data(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(32, 8, bias=False)
    batches = [scale * torch.randn(16, 32) for scale in (0.2, 1.0, 3.0)]
    source = onnx_int8.export(layer, batches[0], tmp_path / "layer.onnx")
    augmented = tmp_path / "augmented.onnx"
    ranges = [onnx_int8._ranges_of_least_divergence(source, augmented, data) for data in (batches, batches[::-1])]
    assert len(ranges[0]) == 2 and ranges[0] == ranges[1]


def random_decoder(dtype=torch.float32, positions=32):
    torch.manual_seed(0)
    lm = build_random_llama("random_llama_d64_l2", 512, dtype).eval().requires_grad_(False)
    return lm, StaticDecoder(lm, positions, detect_cpu(), EAGER)


def test_the_tokens_are_those_of_a_plain_forward_pass_and_of_generate():
    lm, decoder = random_decoder()
    decoder.decode([5, 9, 2, 7], 20)
    best, logits = tokens_of_plain_forward(lm, decoder.tokens_S[:24], 4)
    assert torch.equal(best, decoder.tokens_S[4:24]) and logits.shape == (20, 512)
    prompt = torch.tensor([[5, 9, 2, 7]])
    generated = lm.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0)
    assert torch.equal(generated[0], decoder.tokens_S[:24])
    # A second decode gives the same tokens, although the cache still holds those of the first.
    first = decoder.tokens_S.clone()
    decoder.rewind(4)
    decoder.continue_(20)
    assert torch.equal(decoder.tokens_S, first)


def test_the_compiled_parts_of_a_step_are_whole_graphs_and_give_the_same_tokens(monkeypatch):
    lm, eager = random_decoder()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, options, **given: compile_(part, backend="eager", **given))
    monkeypatch.setattr(StaticDecoder, "_capture", lambda self: self._step)  # a CPU has no graphs
    compiled = StaticDecoder(lm, 32, detect_cpu(), COMPILED)
    for decoder in (eager, compiled):
        decoder.decode([5, 9, 2, 7], 20)
    assert torch.equal(compiled.tokens_S, eager.tokens_S) and torch.equal(compiled.logits_1V, eager.logits_1V)


def test_decoding_has_times_bytes_and_verified_tokens(tmp_path):
    rows = perform(toy_context("decode_speed", DECODE, tmp_path), tmp_path).rows
    times = known(rows, "decode_time_s")
    assert [row.variant for row in times] == ["original", "int8 weight-only"]
    assert all(row.params["mode"] == EAGER and row.check_error < row.check_tolerance < 0.1 for row in times)
    plain, int8 = (row.value for row in known(rows, "weight_bytes"))
    assert int8 < plain
    reasons = [row.value_reason for row in rows if row.metric == "decode_bandwidth_share"]
    assert len(reasons) == 2 and all("chapter 1.1" in reason for reason in reasons)


def timing_of(seconds):
    return Timing(np.full(30, seconds), (seconds,), True, False, "interval", Telemetry())


def test_the_time_of_a_token_is_that_of_a_decode_over_its_new_tokens(tmp_path, monkeypatch):
    def a_second_each(calls, device, **options):
        for call in calls:
            call()
        return [timing_of(1.0) for _ in calls]

    monkeypatch.setattr(decode_speed, "time_interleaved", a_second_each)
    sizes = DECODE | {"schemes": [], "prompt_tokens": 3, "new_tokens": 5}
    (time,) = known(perform(toy_context("decode_speed", sizes, tmp_path), tmp_path).rows, "decode_time_s")
    assert time.value == pytest.approx(1 / 5)


def test_the_share_of_bandwidth_is_the_bytes_of_a_step_over_its_time_and_the_copy(tmp_path):
    where = {"notebook": "n", "experiment": "bandwidth", "variant": "copy", "dtype": "fp32", "params": {"elements": 10}}
    copy = Row(metric="bandwidth_gb_s", value=100.0, **where)
    context = toy_context("decode_speed", DECODE, tmp_path, [copy])
    check = Verification("c", 0.0, 1.0)
    rows = decode_speed._time_rows(context, "original", timing_of(0.25), check, 5 * 10**9, {"dtype": "fp32", "params": {}})
    # A step reads 5 GB in 0.25 s, which is 20 GB/s.
    values = {row.metric: row.value for row in rows}
    assert values == pytest.approx({"decode_time_s": 0.25, "decode_bandwidth_share": 0.2})


@pytest.mark.parametrize("fault", ["cache one position late", "sees one position ahead", "position not rotated"])
def test_planted_faults_of_the_cache_are_refused(fault, tmp_path, monkeypatch):
    attend = DecodeBlock.attend

    def faulty(self, x, cosine, sine, position, hidden):
        if fault == "cache one position late":
            return attend(self, x, cosine, sine, (position - 1).clamp_min(0), hidden)
        if fault == "sees one position ahead":
            return attend(self, x, cosine, sine, position, hidden.roll(3))
        return attend(self, x, torch.ones_like(cosine), torch.zeros_like(sine), position, hidden)

    monkeypatch.setattr(DecodeBlock, "attend", faulty)
    with pytest.raises(RowError, match="tokens and last logits"):
        perform(toy_context("decode_speed", DECODE | {"new_tokens": 10, "schemes": []}, tmp_path), tmp_path)


def test_in_16_bits_a_token_may_differ_by_rounding_only():
    decoder = random_decoder(torch.bfloat16)[1]
    options = decode_speed.DecodeSpeedOptions.parse(DECODE | {"dtype": "bf16", "new_tokens": 24, "positions": 32}, "decode_speed")
    decoder.decode([5, 9, 2, 7], 24)
    check = decode_speed._verified(decoder, options, 4)
    assert check.passed and check.tolerance < 0.5
    decoder.tokens_S[10] = (decoder.tokens_S[10] + 1) % 512
    assert not decode_speed._verified(decoder, options, 4).passed


def test_the_time_of_a_token_is_predicted_from_bytes_and_the_copy_of_this_run(tmp_path):
    sizes = load_profile("full").sizes("decode_speed")
    context = toy_context("decode_speed", sizes, tmp_path)
    assert {one.estimate for one in decode_speed.forecast(context)} == {None}
    copy = Row(
        notebook="n",
        experiment="bandwidth",
        variant="copy",
        dtype="fp32",
        metric="bandwidth_gb_s",
        value=4000.0,
        params={"elements": 10},
    )
    slower = replace(copy, value=1.0, params={"elements": 9})
    other = replace(copy, variant="sum", value=9000.0)
    fields = {name: getattr(context, name) for name in ("notebook", "experiment", "sizes", "workspace", "synthetic")}
    forecasts = decode_speed.forecast(Context(**fields, upstream=[slower, copy, other]))
    by_name = {(one.variant, one.params["model"]): one.estimate for one in forecasts}
    # All parameters but the embedding, and a cache of 256 positions of 2 x 32 x 4096 numbers, in 2 bytes.
    expected = 2 * (6_738_415_616 - 32000 * 4096 + 256 * 2 * 32 * 4096)
    assert by_name["original", "random_llama_7b"] == pytest.approx(expected / 4e12)
    assert 0.25 < by_name["NF4", "random_llama_7b"] / by_name["original", "random_llama_7b"] < 0.32


def test_the_share_of_bandwidth_has_a_claim_for_large_models_only():
    common = {"notebook": "n", "experiment": "decode_speed", "variant": "original"}
    interval = {"n": 30, "ci_low": 0.5, "ci_high": 0.9, "limit_source": "made up"}

    def rows(stored, *shares):
        bytes_row = Row(metric="weight_bytes", value=stored, params={"model": "m"}, **common)
        return [bytes_row] + [
            Row(metric="decode_bandwidth_share", value=share, params={"model": "m", "mode": mode}, **common, **interval)
            for share, mode in zip(shares, MODES, strict=False)
        ]

    assert decode_claims(rows(1e6, 0.1)) == []
    assert [holds for holds, _ in decode_claims(rows(13e9, 0.1, 0.75))] == [True]
    assert [holds for holds, _ in decode_claims(rows(13e9, 0.1, 0.65))] == [False]
    assert [holds for holds, _ in decode_claims(rows(13e9))] == [False]
    wrong_bytes = replace(rows(13e9)[0], value=None, value_reason=f"{UNEXPECTED}made up")
    assert decode_claims([wrong_bytes]) == [], "the chapter reports the row itself"
    # Without a measured copy, the bandwidth of the data sheet counts.
    timed = interval | {"limit": 4e-3, "params": {"model": "m"}, "check": "c", "check_error": 0, "check_tolerance": 0}
    for time_s, expected in ((5.4e-3, True), (6e-3, False)):
        timing = Row(metric="decode_time_s", value=time_s, **common, **timed)
        assert [holds for holds, _ in decode_claims([*rows(13e9), timing])] == [expected]


def test_quality_claims_follow_the_bits():
    common = {"notebook": "n", "experiment": "quantization", "variant": "v", "metric": "perplexity_ratio", "n": 30}
    rows = [
        Row(value=value, ci_low=value - 0.001, ci_high=value + 0.001, dtype=dtype, **common)
        for value, dtype in ((1.005, "int8"), (1.012, "int8"), (1.012, "nf4"), (1.0195, "nf4"), (1.05, "nf4"))
    ]
    refused = Row(value=None, value_reason="unexpected: a check failed", dtype="nf4", **common)
    assert refused.is_unexpected
    assert quality_claims([refused]) == [(False, "v: unexpected: a check failed")]
    layer = replace(refused, metric="relative_difference", params={"what": "layer"})
    assert error_claims([layer]) == [(False, "v: unexpected: a check failed")]
    # The interval of the fourth row contains the limit.
    assert [holds for holds, _ in quality_claims(rows)] == [True, False, True, False, False]
    assert [holds for holds, _ in quality_claims([]) + byte_claims([]) + error_claims([]) + training_claims([])] == [False] * 4


def test_wrong_bytes_refute_their_claim():
    check = {"check": "bytes computed from the format", "check_error": 4, "check_tolerance": 0}
    row = Row(notebook="n", experiment="quantization", variant="v", metric="weight_bytes", value=100, **check)
    assert byte_claims([row.without_failed_value()]) == [(False, "v: 4 bytes more or fewer than computed")]


def test_the_state_of_8_bit_adamw_has_two_bytes_and_its_scales():
    assert qlora.state_bytes(qlora.ADAMW, [100, 5000]) == 8 * 5100 + 8
    assert qlora.state_bytes(qlora.ADAMW_8BIT, [100, 5000]) == 800 + 2 * 5000 + 2 * 4 * 20 + 2048
    assert qlora.state_bytes(qlora.ADAMW_8BIT, [100]) == 800


@pytest.fixture
def bitsandbytes():
    """Skip the test where bitsandbytes cannot be used. A fixture, because its import would add seconds to every collection."""
    if reason := why_no_bitsandbytes(detect_cpu()):
        pytest.skip(reason)


def test_twins_train_alike_and_the_base_does_not_change(bitsandbytes, tmp_path):
    result = perform(toy_context("qlora", QLORA, tmp_path), tmp_path)
    assert all(holds for holds, _ in training_claims(result.rows))
    gaps = {row.variant: row for row in known(result.rows, "loss_difference_nats")}
    assert {name: row.check_tolerance for name, row in gaps.items()} == {qlora.QLORA: 0.3, qlora.ADAMW_8BIT: 0.02}
    assert abs(gaps[qlora.ADAMW_8BIT].value) < 0.02
    base = [row for row in known(result.rows, "relative_difference") if row.params["what"] == "base weights before training"]
    assert len(base) == 1 and 0.5 < base[0].check_error <= 1, "the largest error is near the bound, half of the largest gap"
    states = {row.variant: row.value for row in known(result.rows, "optimizer_state_bytes")}
    assert states[qlora.ADAMW_8BIT] < 0.35 * states[qlora.ADAMW] and states[qlora.QLORA] == states[qlora.LORA]
    assert len(result.samples) == 4 * QLORA["steps"]


def test_a_scale_of_the_base_that_changes_is_found(bitsandbytes, tmp_path, monkeypatch):
    def touched(engine, *given, **named):
        history = train(engine, *given, **named)
        for module in engine.model.modules():
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if state is not None:
                state.absmax.view(torch.uint8)[0] ^= 1
                break
        return history

    train = qlora.train
    monkeypatch.setattr(qlora, "train", touched)
    with pytest.raises(RowError, match="sha256 of the frozen weights"):
        perform(toy_context("qlora", QLORA, tmp_path), tmp_path)


def test_wrong_scales_of_the_base_are_refused(bitsandbytes, tmp_path, monkeypatch):
    def with_wrong_scales(model, scheme, device):
        originals = replace_linears(model, scheme, device)
        state = model.get_submodule(next(iter(originals))).weight.quant_state
        state.absmax.copy_(state.absmax.roll(1))  # each block has the scale of its neighbour
        return originals

    replace_linears = qlora.replace_linears
    monkeypatch.setattr(qlora, "replace_linears", with_wrong_scales)
    with pytest.raises(RowError, match="float64, largest error over its bound"):
        perform(toy_context("qlora", QLORA, tmp_path), tmp_path)


def test_a_variant_that_trains_worse_than_its_twin_is_refused(bitsandbytes, tmp_path, monkeypatch):
    def with_wrong_epsilon(variant, model, rate):
        made = optimizer(variant, model, rate)
        for group in made.param_groups:
            group["eps"] = 1e-3 if variant == qlora.ADAMW_8BIT else group["eps"]  # for 1e-8
        return made

    optimizer = qlora._optimizer
    monkeypatch.setattr(qlora, "_optimizer", with_wrong_epsilon)
    with pytest.raises(RowError, match="nats above the loss of the twin"):
        perform(toy_context("qlora", QLORA, tmp_path), tmp_path)


def test_rows_of_twins_that_failed_their_check_refute_a_claim():
    common = {"notebook": "n", "experiment": "qlora", "variant": qlora.QLORA, "n": 20, "params": {"what": "base"}}
    for metric in ("loss_difference_nats", "relative_difference"):
        check = {"check": "c", "check_error": 0.06, "check_tolerance": 0.05}
        row = Row(metric=metric, value=0.06, ci_low=0.05, ci_high=0.07, **common, **check)
        assert not any(holds for holds, _ in training_claims([row.without_failed_value()]))
        passed = replace(row, check_error=0.01)
        assert all(holds for holds, _ in training_claims([passed]))


@pytest.mark.parametrize(("before", "after", "holds"), [(3.0, 2.0, True), (2.0, 3.0, False)])
def test_a_held_out_loss_that_rises_refutes_its_claim(before, after, holds):
    about = {"notebook": "n", "experiment": "qlora", "variant": qlora.QLORA, "metric": "validation_loss"}
    rows = [Row(**about, value=value, params={"step": step}) for step, value in ((0, before), (10, after))]
    assert [claim[0] for claim in training_claims(rows)] == [holds]


def test_without_bitsandbytes_the_twins_have_reasons(tmp_path, monkeypatch):
    monkeypatch.setattr(qlora, "why_no_bitsandbytes", lambda device: "unavailable: made up")
    rows = perform(toy_context("qlora", QLORA, tmp_path), tmp_path).rows
    assert {row.variant for row in rows if row.value is None} == {qlora.QLORA, qlora.ADAMW_8BIT}
    assert {row.variant for row in known(rows, "validation_loss")} == {qlora.LORA, qlora.ADAMW}


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_the_sizes_of_the_profiles_are_valid(profile):
    sizes = load_profile(profile).sizes
    quantization.QuantizationOptions.parse(sizes("quantization"), "quantization")
    qlora.QloraOptions.parse(sizes("qlora"), "qlora")
    options = decode_speed.DecodeSpeedOptions.parse(sizes("decode_speed"), "decode_speed")
    assert {variant.name for variant in options.variants()} == {decode_speed.ORIGINAL, *options.schemes}
    assert options.prompt_tokens + options.new_tokens <= options.positions
    if profile == "full":
        assert options.random_model == "random_llama_7b" and options.dtype == "bf16"
