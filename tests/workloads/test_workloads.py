"""The baselines that precision and memory are measured on: their names, their counts, their batches."""

import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure import bytes_of, state_of
from hyperion.models import parameter_count
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.workloads import workloads
from tests.chapter.toy import toy_context

CPU = detect_cpu()
RATE = {"learning_rate": 1e-3, "warmup_steps": 1}
LANGUAGE = {"model": "lm_d64_h4_l2", "sequence_length": 16, "batch_size": 2} | RATE
IMAGE = {"width": 4, "batch_size": 6} | RATE


def test_a_name_tells_what_differs_from_the_named_model():
    assert workloads.workload("language", LANGUAGE).name == "lm_d64_h4_l2"
    assert workloads.workload("language", LANGUAGE, 50257, 2).name == "lm_d64_h4_l2"
    assert workloads.workload("language", LANGUAGE, 512).name == "lm_d64_h4_l2_v512"
    assert workloads.workload("language", LANGUAGE, 512, 1).name == "lm_d64_h4_l2_v512_cut_to_l1"
    assert workloads.workload("image", IMAGE).name == "resnet18_w4"


@pytest.mark.parametrize("kind, sizes", [("language", LANGUAGE), ("image", IMAGE)])
def test_counts_are_those_of_the_module_and_the_optimizer(kind, sizes):
    torch.set_num_threads(1)
    work = workloads.workload(kind, sizes, 64 if kind == "language" else 0)
    engine = work.engine("fp32", CPU, 0, lambda model: parallelize(model, ParallelPlan(), world()))
    assert work.parameters == parameter_count(engine.model)
    batch = workloads.random_batch(work, CPU, 0)
    engine.train_step(batch)
    assert engine.tokens_seen == work.items and bytes_of(batch) == work.batch_bytes
    held = state_of(engine.model, engine.optimizer)
    standing = bytes_of(held["parameters"]) + bytes_of(held["optimizer state"])
    assert work.standing_bytes == pytest.approx(standing, rel=0.01)
    assert 0 < work.block_flops < work.flops.forward


def test_one_seed_gives_one_set_of_weights_in_every_precision():
    work = workloads.workload("image", IMAGE)
    first, second = (work.engine(dtype, CPU, 3).model.conv1.weight for dtype in ("fp32", "bf16"))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", workloads.KINDS)
def test_prepared_batches_come_back_the_same(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    context = toy_context("toy", {"batches": 3, "language": LANGUAGE, "image": IMAGE}, tmp_path)
    ready = workloads.prepare(context, kind)
    work, batches = workloads.load(kind, context.sizes[kind], ready.file, CPU)
    again = workloads.load(kind, context.sizes[kind], workloads.prepare(context, kind).file, CPU)[1]
    assert len(batches) == 3 and ready.source == "synthetic"
    for first, second in zip(batches, again, strict=True):
        assert all(map(torch.equal, first, second))
    assert len(batches[0][1].flatten()) == work.items
    if kind == "language":
        assert work.config.vocab_size == ready.vocabulary > int(batches[0][0].max())
