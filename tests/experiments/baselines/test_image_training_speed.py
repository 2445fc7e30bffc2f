"""Our training path beside the plain one: the same work, and a check that notices when it is not."""

import pytest
import torch

from hyperion.data import channel_statistics
from hyperion.experiments.baselines.image_training_speed import (
    CAPTURED,
    FUSED,
    OUR_LOADER,
    OURS,
    PLAIN,
    UNCOMPILED,
    ImageTrainingSpeedOptions,
    _climbed,
    _Pair,
    _parity,
    run,
)
from hyperion.experiments.baselines.plain_loops import CapturedImageLoop, PlainImageLoop, copy_weights, plain_model
from hyperion.hardware import detect_cpu
from hyperion.models import resnet18
from hyperion.training import Precision
from hyperion.workloads import datasets
from tests.chapter.toy import perform, toy_context

SIZES = {
    "width": 4,
    "batches": [8],
    "train_images": 64,
    "learning_rate": 0.05,
    "precision": "fp32",
    "compiled": False,
    "plain_compiled": False,
    "parity_steps": 4,
    "steps_in_a_row": 1,
    "time_limit_s": 0.05,
    "ladder_s": 0.02,
}


@pytest.fixture(scope="module", autouse=True)
def own_data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(tmp_path_factory.mktemp("speed") / "data"))
        yield


@pytest.mark.slow
def test_both_do_the_same_work_and_take_turns(one_thread, tmp_path):
    result = perform(toy_context("image_training_speed", SIZES, tmp_path), tmp_path)
    ladder = [row for row in result.rows if "rung" in row.params]
    both = [row for row in result.rows if row not in ladder]
    by_metric = {metric: [row for row in both if row.metric == metric] for metric in ("images_per_s", "speedup")}
    ours, plain = by_metric["images_per_s"]
    assert (ours.params["loop"], plain.params["loop"]) == (OURS, PLAIN) and ours.n == plain.n >= 30
    speedup, over_captured = by_metric["speedup"]
    assert over_captured.params["over"] == CAPTURED and over_captured.value_reason == "a CPU has no graphs"
    assert speedup.params["over"] == PLAIN and not speedup.params["replayed"]
    assert speedup.value == pytest.approx(ours.value / plain.value, rel=1e-6)
    times = {row.params["rung"]: row for row in ladder if row.metric == "step_time_s"}
    assert list(times) == [PLAIN, CAPTURED, OUR_LOADER, FUSED, OURS]
    reasons = {name: row.value_reason for name, row in times.items() if row.value is None}
    assert reasons == dict.fromkeys((CAPTURED, OUR_LOADER, FUSED), "a CPU has no graphs")
    (whole,) = [row for row in ladder if row.metric == "speedup"]
    assert (whole.params["over"], whole.params["rung"]) == (PLAIN, OURS)
    assert whole.value == pytest.approx(speedup.value) and whole.n == speedup.n, "nothing is timed twice"
    for row, step in zip((row for row in result.rows if row.metric == "share"), (ours, plain), strict=True):
        alone_s = row.params["convolutions_s"] + row.params["classifier_s"]
        assert row.value == pytest.approx(alone_s * step.value / 8, rel=1e-3) and row.ci_low < row.value < row.ci_high
    assert result.samples.query("kind == 'a product alone'").groupby("params").size().min() >= 3
    compared = [row for row in result.rows if row.metric == "relative_difference"]
    assert [(row.params["of"], row.params["window"]) for row in compared] == [
        (loop, window) for loop in (OURS, PLAIN) for window in ("early", "late")
    ]
    assert all(row.check_error == row.value < 1e-4 for row in compared)
    assert result.samples.query("kind == 'parity'").groupby("loop").size().to_dict() == {OURS: 4, PLAIN: 4, UNCOMPILED: 4}


@pytest.mark.slow
def test_products_that_find_no_memory_leave_a_reason(one_thread, tmp_path, monkeypatch):
    def full(*ignored):
        raise torch.OutOfMemoryError("no room for the operands")

    monkeypatch.setattr("hyperion.experiments.baselines.image_training_speed.time_alone", full)
    result = run(toy_context("image_training_speed", SIZES, tmp_path), lambda *progress: None)
    reasons = [row.value_reason for row in result.rows if row.metric == "share"]
    assert reasons == ["out of memory: no room for the operands"] * 2
    both = [row for row in result.rows if "rung" not in row.params and row.params.get("over") != CAPTURED]
    timed = [row for row in both if row.metric in ("images_per_s", "speedup")]
    assert len(timed) == 3 and all(row.value for row in timed)


@pytest.mark.slow
def test_other_work_is_noticed(one_thread, tmp_path):
    context = toy_context("image_training_speed", SIZES, tmp_path)
    pair = _Pair.build(context, ImageTrainingSpeedOptions.of(context), *datasets.images(context), batch=8)
    for loop, optimizer in ((PLAIN, pair.plain.optimizer), (OURS, pair.engine.optimizer)):
        optimizer.param_groups[0]["momentum"] = 0.5
        rows = [row for row in _parity(pair, []) if row.metric == "relative_difference"]
        assert loop in {row.params["of"] for row in rows if row.check_error > row.check_tolerance}


def test_torchvisions_resnet_is_ours_under_other_names():
    torch.manual_seed(0)
    ours, (published, name) = resnet18(), plain_model(64)
    copy_weights(ours, published)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(published.eval()(images), ours.eval()(images), rtol=1e-4, atol=1e-4)
    assert name == "torchvision"


def test_the_plain_loop_shows_every_image_once_an_epoch_shifted_and_mirrored():
    images = torch.zeros(40, 3, 32, 32, dtype=torch.uint8)
    images[:, :, 16, 10] = torch.arange(1, 41, dtype=torch.uint8)[:, None]  # one bright pixel tells image and place
    model, _ = plain_model(4)
    loop = PlainImageLoop(
        model,
        images.numpy(),
        torch.arange(40).numpy() % 10,
        channel_statistics(images.numpy()),
        ("crop", "flip"),
        10,
        0.1,
        Precision("fp32", "test"),
        detect_cpu(),
        compiled=False,
    )
    shown, places = [], set()
    for _ in range(4):
        batch, labels = loop.next_batch()
        assert batch.is_contiguous(memory_format=loop.memory_format)
        peaks = (batch[:, 0] - batch[:, 0].amin(dim=(1, 2), keepdim=True)).flatten(1).argmax(dim=1)
        places |= {(int(at) // 32, int(at) % 32) for at in peaks}
        shown += labels.tolist()
    assert sorted(shown) == sorted(i % 10 for i in range(40))
    rows, columns = zip(*places, strict=True)
    assert min(rows) >= 12 and max(rows) <= 20 and {c < 16 for c in columns} == {True, False}


class EagerGraph:
    """Runs the captured step, where a CPU has no graphs."""

    def __init__(self, step, batch, model, optimizer, sharing=None):
        self.replay = step


def pair_with_graphs(monkeypatch, tmp_path) -> _Pair:
    """Return both loops, and let the experiment believe that this device captures steps."""
    monkeypatch.setattr("hyperion.experiments.baselines.image_training_speed.why_not_captured", lambda *ignored: "")
    monkeypatch.setattr("hyperion.experiments.baselines.plain_loops.StepGraph", EagerGraph)
    context = toy_context("image_training_speed", SIZES, tmp_path)
    return _Pair.build(context, ImageTrainingSpeedOptions.of(context), *datasets.images(context), batch=8)


@pytest.mark.slow
def test_each_rung_is_compared_with_the_one_before_it(one_thread, tmp_path, monkeypatch):
    rows = _climbed(pair_with_graphs(monkeypatch, tmp_path), {}, [])
    times = {row.params["rung"]: row for row in rows if row.metric == "step_time_s"}
    assert list(times) == [PLAIN, CAPTURED, OUR_LOADER, FUSED, OURS]
    ratios = {(row.params["over"], row.params["rung"]): row for row in rows if row.metric == "speedup"}
    assert list(ratios) == [(PLAIN, CAPTURED), (CAPTURED, OUR_LOADER), (OUR_LOADER, FUSED), (FUSED, OURS)]
    for (before, rung), row in ratios.items():
        assert row.value == pytest.approx(times[before].value / times[rung].value, rel=1e-6) and row.n >= 5


def test_each_rung_uses_the_loop_and_the_loader_that_it_names(one_thread, tmp_path, monkeypatch):
    """Every step of a rung is recorded: its graph, its loader and the kind of its update."""
    pair, seen = pair_with_graphs(monkeypatch, tmp_path), []

    def time_rungs(device, rungs, *ignored):
        for rung in rungs:
            seen.append(f"rung {rung.name}")
            rung.step()
        raise RuntimeError("not timed here")

    def noted(name, method):
        return lambda *args: (seen.append(name), method(*args))[1]

    def update(optimizer):
        seen.append("fused" if optimizer.param_groups[0]["fused"] else "default")

    monkeypatch.setattr("hyperion.experiments.baselines.image_training_speed.time_rungs", time_rungs)
    monkeypatch.setattr(CapturedImageLoop, "train_on", noted("graph", CapturedImageLoop.train_on))
    monkeypatch.setattr(type(pair.batches), "next_batch", noted("our loader", type(pair.batches).next_batch))
    monkeypatch.setattr(PlainImageLoop, "next_batch", noted("plain loader", PlainImageLoop.next_batch))
    monkeypatch.setattr(torch.optim.SGD, "step", update)
    rows = _climbed(pair, {}, [])
    assert " ".join(seen).split("rung ") == [
        "our loader graph fused ",  # the first step of the new loop
        f"{PLAIN} plain loader default ",
        f"{CAPTURED} plain loader graph default ",
        f"{OUR_LOADER} our loader graph default ",
        f"{FUSED} our loader graph fused ",
        f"{OURS} our loader fused",
    ]
    assert {row.value_reason for row in rows} == {"PyTorch refused the step: not timed here"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_ladder_on_a_gpu_has_every_rung(tmp_path):
    rows = perform(toy_context("image_training_speed", SIZES, tmp_path), tmp_path).rows
    times = {row.params["rung"]: row for row in rows if "rung" in row.params and row.metric == "step_time_s"}
    assert list(times) == [PLAIN, CAPTURED, OUR_LOADER, FUSED, OURS]
    assert all(row.value for row in times.values()), {name: row.value_reason for name, row in times.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_plain_step_in_a_graph_trains_as_the_plain_loop(tmp_path, compiled):
    context = toy_context("image_training_speed", SIZES | {"plain_compiled": compiled, "parity_steps": 20}, tmp_path)
    pair = _Pair.build(context, ImageTrainingSpeedOptions.of(context), *datasets.images(context), batch=8)
    rows = [row for row in _parity(pair, []) if row.metric == "relative_difference" and row.params["of"] == CAPTURED]
    assert rows and all(row.check_error <= row.check_tolerance for row in rows)
    first, second = float(pair.captured.step()), float(pair.captured.step())
    assert first != second, "each replay trains on a new batch"
