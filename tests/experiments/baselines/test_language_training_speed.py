"""Our training path beside the plain one: the same model, a check that notices other work, and a roof from shapes."""

import math

import pytest
import torch

from hyperion.chapter import experiment_named
from hyperion.experiments.baselines.language_training_speed import (
    BF16_STREAM,
    LOSS_KERNEL,
    OWN_ROOF,
    ROOF,
    LanguageTrainingSpeedOptions,
    _ours,
    _parity,
    _plain,
    _start,
    run,
)
from hyperion.experiments.baselines.paired_loops import CAPTURED, OURS, PLAIN, PairedLoops
from hyperion.experiments.baselines.plain_loops import StepGraph, with_weights_of
from hyperion.experiments.baselines.step_roof import least_traffic
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.results import Row
from hyperion.workloads import datasets
from hyperion.workloads.workloads import workload
from tests.chapter.toy import perform, toy_context

NAME = "language_training_speed"
SIZES = {
    "model": "lm_d64_h4_l2",
    "sequence_length": 16,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "precision": "fp32",
    "compiled": False,
    "steps": 16,
    "steps_in_a_row": 2,
    "tolerance": 0.01,
    "time_limit_s": 0.05,
    "ladder_s": 0.02,
}
OPTIONS = LanguageTrainingSpeedOptions.parse(SIZES, NAME)
SMALL = TransformerConfig(vocab_size=70, context=8, width=16, heads=2, layers=2)


def ceiling(experiment, metric, dtype, value, **params):
    return Row(
        notebook="hw",
        experiment=experiment,
        variant="toy",
        metric=metric,
        dtype=dtype,
        value=value,
        n=30,
        ci_low=value,
        ci_high=value,
        params={"cache": "cold"} | params,
        limit_source="no limit: toy",
        check="toy",
        check_error=0.0,
        check_tolerance=1.0,
    )


CEILINGS = [ceiling("gemm", "gemm_tflops", "fp32", 10.0), ceiling("bandwidth", "bandwidth_gb_s", "fp32", 100.0, elements=10)]
COUNTED = Row(
    notebook="hw", experiment="text_pipeline", variant="toy", metric="count", value=300.0, params={"what": "vocabulary"}
)


@pytest.fixture(scope="module", autouse=True)
def own_data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(tmp_path_factory.mktemp("speed") / "data"))
        yield


@pytest.mark.slow
def test_both_do_the_same_work_and_take_turns(one_thread, tmp_path):
    result = perform(toy_context(NAME, SIZES, tmp_path, CEILINGS), tmp_path)
    ladder = [row for row in result.rows if "rung" in row.params]
    over_captured = next(row for row in result.rows if row.metric == "speedup" and row.params["over"] == CAPTURED)
    assert over_captured.value is None and over_captured.value_reason == "a CPU has no graphs"
    rows = {(row.metric, row.params.get("loop")): row for row in result.rows if row not in [*ladder, over_captured]}
    ours, plain = rows["step_time_s", OURS], rows["step_time_s", PLAIN]
    assert ours.n == plain.n >= 8 and not ours.params["compiled"]
    assert rows["speedup", OURS].value == pytest.approx(plain.value / ours.value, rel=1e-6)
    assert rows["speedup", OURS].params["replayed"] is False, "a CPU has no graphs"
    shares = {row.params["what"]: row for row in result.rows if row.metric == "share" and row.params["loop"] == OURS}
    assert set(shares) == {ROOF, OWN_ROOF}
    for share in shares.values():
        assert share.value == pytest.approx(share.params["roof_s"] / ours.value, rel=1e-3)
        assert share.ci_low <= share.value <= share.ci_high
        parts = [seconds for name, seconds in share.params.items() if name.endswith("_s") and name != "roof_s"]
        assert share.params["roof_s"] == pytest.approx(sum(parts) - share.params["bandwidth_gb_s"], rel=1e-3)
    products = result.samples.query("kind == 'its products alone'")
    assert len(products) == ours.n, "timed in turn with the steps"
    reasons = {row.params["rung"]: row.value_reason for row in ladder if row.value is None}
    assert reasons == dict.fromkeys((CAPTURED, BF16_STREAM, LOSS_KERNEL), "a CPU has no graphs")
    (step,) = [row for row in ladder if row.metric == "speedup"]
    assert (step.params["over"], step.params["rung"]) == (PLAIN, OURS) and step.n == ours.n, "nothing is timed twice"
    assert products["time_s"].median() == pytest.approx(shares[OWN_ROOF].params["products_s"], rel=1e-3)
    agreement = rows["relative_difference", None]
    assert agreement.check_error == agreement.value < agreement.check_tolerance and agreement.params["steps"] >= 20
    curves = result.samples.query("kind == 'parity'").pivot(index="step", columns="loop", values="loss")
    excess = curves[PLAIN] - curves[OURS]  # of classes that no token has
    classes = _vocabulary(ours.variant)
    assert excess[1] == pytest.approx(math.log(-(-classes // 64) * 64 / classes), rel=0.05)


def test_another_learning_rate_is_noticed(one_thread, tmp_path):
    context = toy_context(NAME, SIZES, tmp_path)
    _, tokenizer, prepared = datasets.text(context)

    def paired(options: LanguageTrainingSpeedOptions) -> PairedLoops:
        sizes = options.sizes.model_copy(update={"vocabulary": tokenizer.vocab_size})
        return PairedLoops(context, workload(sizes), "fp32", "synthetic", {"batch": 64})

    loops, faster = paired(OPTIONS), paired(OPTIONS.model_copy(update={"learning_rate": 2e-3}))
    tokens, started = prepared.tokens["train"], {}
    for name, build, of in ((OURS, _ours, loops), (PLAIN, _plain, loops), ("faster", _plain, faster)):
        started[name] = _start(OPTIONS, of, tokens, build)
        for _ in range(28):
            started[name].step()
    same, _ = _parity(OPTIONS, loops, started)
    other, _ = _parity(OPTIONS, loops, {OURS: started[OURS], PLAIN: started["faster"]})
    assert same.check_error < same.check_tolerance < other.check_error


def test_the_plain_model_computes_what_ours_does(one_thread):
    torch.manual_seed(0)
    ours = TransformerLM(SMALL).double()
    with torch.no_grad():
        for parameter in ours.parameters():  # biases and norms too, which begin as zeros and ones
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain = with_weights_of(ours)
    tokens = torch.randint(SMALL.vocab_size, (3, 8))
    logits = plain(tokens)
    assert logits.shape[-1] == 128 and not logits[..., 70:].any()
    torch.testing.assert_close(logits[..., :70], ours(tokens), rtol=1e-12, atol=1e-12)
    assert plain.head.weight is plain.tokens.weight


def test_the_roofs_bytes_are_those_of_a_hand_count():
    tokens, D, V = 24, SMALL.width, SMALL.vocab_size
    traffic = least_traffic(SMALL, tokens, "bf16")
    weights = sum(parameter.numel() for parameter in TransformerLM(SMALL).parameters())
    assert traffic["optimizer"] == weights * (4 + 4 + 8 + 4 + 8 + 4)  # w, g, m v read; w, m v written; g written before
    assert traffic["logits"] == tokens * V * 2
    written = D + D + D + D + 4 * D  # input, norm, sum, norm, MLP after GELU
    read_again = D + D + 4 * D  # input, sum, MLP before GELU: what norms and GELU need; products read the others
    assert traffic["activations"] == tokens * (2 * (written + read_again) + (D + D + D)) * 2  # two blocks and the last norm
    in_fp32 = least_traffic(SMALL, tokens, "fp32")
    assert in_fp32["logits"] == 2 * traffic["logits"]
    assert traffic["optimizer"] - in_fp32["optimizer"] == weights * 4, "there a product writes the gradient"


@pytest.mark.slow
def test_products_that_find_no_memory_leave_a_reason(one_thread, tmp_path, monkeypatch):
    def full(*ignored):
        raise torch.OutOfMemoryError("no room for the operands")

    monkeypatch.setattr("hyperion.experiments.baselines.language_training_speed.one_pass", full)
    result = run(toy_context(NAME, SIZES, tmp_path, CEILINGS), lambda *progress: None)
    reasons = {row.value_reason for row in result.rows if row.metric == "share" and row.params["what"] == OWN_ROOF}
    assert reasons == {"out of memory: no room for the operands"}
    assert all(row.value for row in both_loops(result.rows) if row.metric in ("step_time_s", "speedup"))


class EagerGraph:
    """Runs the captured step, where a CPU has no graphs."""

    def __init__(self, step, batch, model, optimizer, sharing=None):
        self.step, self.sharing = step, sharing

    def replay(self, *batch):
        return self.step(*batch)


def with_graphs(monkeypatch, graph) -> None:
    """Let the experiment believe that this device captures steps, as objects of the class `graph`."""
    module = "hyperion.experiments.baselines.language_training_speed"
    monkeypatch.setattr(f"{module}.why_not_captured", lambda *ignored: "")
    monkeypatch.setattr(f"{module}.HAS_TRITON", True)
    monkeypatch.setattr("hyperion.experiments.baselines.plain_loops.StepGraph", graph)


def both_loops(rows: list[Row]) -> list[Row]:
    """Rows of the comparison of both loops, without the plain loop in a graph and without the ladder."""
    return [row for row in rows if "rung" not in row.params and CAPTURED not in row.params.values()]


@pytest.mark.slow
def test_every_rung_is_compared_with_the_one_before_it(one_thread, tmp_path, monkeypatch):
    with_graphs(monkeypatch, EagerGraph)
    result = perform(toy_context(NAME, SIZES, tmp_path, CEILINGS), tmp_path)
    times = {row.params["rung"]: row for row in result.rows if "rung" in row.params and row.metric == "step_time_s"}
    assert list(times) == [PLAIN, CAPTURED, BF16_STREAM, LOSS_KERNEL, OURS]
    assert times[BF16_STREAM].value_reason == "in fp32 the residual stream is not bfloat16"
    ratios = [row for row in result.rows if "rung" in row.params and row.metric == "speedup"]
    steps = [(row.params["over"], row.params["rung"]) for row in ratios]
    assert steps == [(PLAIN, CAPTURED), (CAPTURED, LOSS_KERNEL), (LOSS_KERNEL, OURS)], "no rung is skipped but the absent one"
    for row in ratios:
        assert row.value == pytest.approx(times[row.params["over"]].value / times[row.params["rung"]].value, rel=1e-6)
    captured = {row.metric: row for row in result.rows if row.params.get("loop") == CAPTURED}
    assert captured["step_time_s"].value == times[CAPTURED].value
    assert captured["tokens_per_s"].value == pytest.approx(64 / times[CAPTURED].value)
    (over,) = [row for row in result.rows if row.params.get("over") == CAPTURED and row.params.get("loop") == OURS]
    assert over.value == pytest.approx(times[CAPTURED].value / times[OURS].value, rel=1e-6)
    compared = {row.params["of"]: row for row in result.rows if row.metric == "relative_difference"}
    assert set(compared) == {OURS, CAPTURED, LOSS_KERNEL}
    assert (
        compared[CAPTURED].value < 1e-6 and compared[CAPTURED].check_tolerance == 0.01 and compared[CAPTURED].params["steps"] > 9
    )
    curves = result.samples.query("kind == 'parity'")
    assert not curves.duplicated(["loop", "step"]).any() and set(curves["loop"]) == {OURS, PLAIN, CAPTURED, LOSS_KERNEL}


@pytest.mark.slow
def test_another_update_of_a_rung_is_noticed(one_thread, tmp_path, monkeypatch):
    class Faster(EagerGraph):
        def replay(self, *batch):
            self.step.__self__.optimizer.param_groups[0]["lr"] = 2 * self.step.__self__.optimizer.param_groups[1]["lr"]
            return super().replay(*batch)

    with_graphs(monkeypatch, Faster)
    rows = run(toy_context(NAME, SIZES | {"steps": 40}, tmp_path), lambda *progress: None).rows
    (captured,) = [row for row in rows if row.metric == "relative_difference" and row.params["of"] == CAPTURED]
    assert captured.check_error > captured.check_tolerance


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_refused_capture_is_a_row_with_the_reason(one_thread, tmp_path, monkeypatch, error):
    class Refused:
        def __init__(self, *ignored):
            raise error("operation not permitted when stream is capturing\nmore about it")

    with_graphs(monkeypatch, Refused)
    rows = perform(toy_context(NAME, SIZES, tmp_path), tmp_path).rows
    (over,) = [row for row in rows if row.params.get("over") == CAPTURED]
    begin = "out of memory" if error is torch.OutOfMemoryError else "PyTorch refused the step"
    assert over.value is None and over.value_reason == f"{begin}: operation not permitted when stream is capturing"
    absent = {row.params["rung"] for row in rows if "rung" in row.params and row.value_reason == over.value_reason}
    assert absent == {CAPTURED, LOSS_KERNEL}
    (last,) = [row for row in rows if "rung" in row.params and row.metric == "speedup"]
    assert (last.params["over"], last.params["rung"]) == (PLAIN, OURS)
    assert all(row.value for row in both_loops(rows) if row.metric in ("step_time_s", "speedup"))


@pytest.mark.slow
def test_a_ladder_that_finds_no_memory_costs_no_other_row(one_thread, tmp_path, monkeypatch):
    def full(*ignored, **also):
        raise torch.OutOfMemoryError("five loops are too many")

    with_graphs(monkeypatch, EagerGraph)
    monkeypatch.setattr("hyperion.experiments.baselines.speed_ladder.time_interleaved", full)
    rows = perform(toy_context(NAME, SIZES, tmp_path), tmp_path).rows
    ladder = [row for row in rows if "rung" in row.params]
    assert len(ladder) == 5 and {row.value for row in ladder} == {None}
    (over,) = [row for row in rows if row.metric == "speedup" and row.params["over"] == CAPTURED]
    assert over.value is None and over.value_reason == "out of memory: five loops are too many"
    assert all(row.value for row in both_loops(rows) if row.metric in ("step_time_s", "speedup"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_ladder_on_a_gpu_has_every_rung_and_trains_as_the_plain_loop(tmp_path, compiled):
    rows = perform(toy_context(NAME, SIZES | {"compiled": compiled, "precision": "bf16"}, tmp_path), tmp_path).rows
    times = {row.params["rung"]: row for row in rows if "rung" in row.params and row.metric == "step_time_s"}
    assert all(row.value for row in times.values()), {name: row.value_reason for name, row in times.items()}
    parity = {row.params["of"]: row for row in rows if row.metric == "relative_difference"}
    assert set(parity) == {OURS, CAPTURED, BF16_STREAM, LOSS_KERNEL}
    assert all(row.check_error <= row.check_tolerance for row in parity.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_graphs_that_share_memory_do_not_disturb_each_other():
    """Replays alternate, and each graph computes what it computes alone."""

    def chain(seed: int):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step, model, optimizer

    x = torch.randn(512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    graphs: list[StepGraph] = []
    for seed in (0, 1):
        step, model, optimizer = chain(seed)
        graphs.append(StepGraph(step, (x,), model, optimizer, graphs[0] if graphs else None))
    alternately = [[float(graph.replay(x)) for graph in graphs] for _ in range(6)]
    for seed, shared in zip((0, 1), zip(*alternately, strict=True), strict=True):
        step, *_ = chain(seed)
        assert shared == pytest.approx([float(step(x)) for _ in range(6)], rel=1e-4)


def test_the_forecast_is_the_roof_or_says_what_is_missing(tmp_path):
    foretold = experiment_named(NAME).forecast
    lines = {line.metric: line for line in foretold(toy_context(NAME, SIZES, tmp_path, [COUNTED, *CEILINGS]))}
    work = workload(OPTIONS.sizes.model_copy(update={"vocabulary": 300}))
    products_s = work.least_flops * work.items / 10e12
    moved_s = sum(least_traffic(work.config, work.items, "fp32").values()) / 100e9
    assert lines["tokens_per_s"].ceiling == pytest.approx(work.items / (products_s + moved_s))
    assert lines["speedup"].estimate == 1 and "both loops do the same work" in lines["speedup"].basis
    for rows, missing in (([COUNTED], "no ceilings"), (CEILINGS, "vocabulary")):
        (line,) = foretold(toy_context(NAME, SIZES, tmp_path, rows))
        assert line.estimate is None and missing in line.basis


def _vocabulary(variant: str) -> int:
    return int(variant.rpartition("_v")[2])
