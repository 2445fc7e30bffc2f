"""The baselines that precision and memory are measured on: their names, their counts, their batches."""

import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure import bytes_of, state_of
from hyperion.models import parameter_count
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.workloads.workloads import KINDS, ImageSizes, LanguageSizes, load_batches, random_batch, store_batches, workload
from tests.chapter.toy import toy_context

CPU = detect_cpu()
RATE = {"learning_rate": 1e-3, "warmup_steps": 1}
LANGUAGE = LanguageSizes(model="lm_d64_h4_l2", sequence_length=16, batch_size=2, **RATE)
IMAGE = ImageSizes(width=4, batch_size=6, **RATE)


def test_a_name_tells_what_differs_from_the_named_model():
    for changes, name in (
        ({}, "lm_d64_h4_l2"),
        ({"vocabulary": 50257, "layers": 2}, "lm_d64_h4_l2"),
        ({"vocabulary": 512}, "lm_d64_h4_l2_v512"),
        ({"vocabulary": 512, "layers": 1}, "lm_d64_h4_l2_v512_cut_to_l1"),
    ):
        assert workload(LANGUAGE.model_copy(update=changes)).name == name
    assert workload(IMAGE).name == "resnet18_w4"


@pytest.mark.parametrize("sizes", [LANGUAGE.model_copy(update={"vocabulary": 64}), IMAGE], ids=KINDS)
def test_counts_are_those_of_the_module_and_the_optimizer(sizes):
    torch.set_num_threads(1)
    work = workload(sizes)
    engine = work.engine("fp32", CPU, 0, lambda model: parallelize(model, ParallelPlan(), world()))
    assert work.parameters == parameter_count(engine.model)
    batch = random_batch(work, CPU, 0)
    engine.train_step(batch)
    assert engine.tokens_seen == work.items
    held = state_of(engine.model, engine.optimizer)
    standing = bytes_of(held["parameters"]) + bytes_of(held["optimizer state"])
    assert work.standing_bytes == pytest.approx(standing, rel=0.01)
    assert 0 < work.block_flops < work.flops.forward


def test_one_seed_gives_one_set_of_weights_in_every_precision():
    work = workload(IMAGE)
    first, second = (work.engine(dtype, CPU, 3).model.conv1.weight for dtype in ("fp32", "bf16"))
    assert torch.equal(first, second)


@pytest.mark.parametrize("sizes", [LANGUAGE, IMAGE], ids=KINDS)
def test_stored_batches_come_back_the_same(sizes, tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    context = toy_context("toy", {}, tmp_path)
    stored = store_batches(context, sizes, 3)
    work, batches = load_batches(sizes, stored.file, CPU)
    again = load_batches(sizes, store_batches(context, sizes, 3).file, CPU)[1]
    assert len(batches) == 3 and stored.source == "synthetic"
    for first, second in zip(batches, again, strict=True):
        assert all(map(torch.equal, first, second))
    assert len(batches[0][1].flatten()) == work.items
    if sizes is LANGUAGE:
        assert work.config.vocab_size == stored.vocabulary > int(batches[0][0].max())
