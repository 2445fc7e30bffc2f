"""The experiments on frameworks at toy sizes. The plain loop in this process, with or without a fault, replaces launches."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyperion.engines import Record, Stack, Work, plain, planted
from hyperion.engines.launch import Unavailable, wait_for_turn
from hyperion.engines.observer import Observer
from hyperion.engines.work import distinct_rows
from hyperion.errors import HyperionError
from hyperion.experiments.frameworks import framework_parity, framework_speed, planted_unfairness, trainer_defaults
from hyperion.experiments.frameworks.framework_parity import BITS, WORK
from hyperion.experiments.frameworks.framework_speed import FASTER, RATIO, ranking
from hyperion.results import Estimate
from tests.chapter.toy import by_params, perform, toy_context

pytestmark = pytest.mark.slow
SIZES = {"model": "random_llama_d64_l2", "tokens": "bytes", "sequence_length": 16, "batch_size": 4, "steps": 4}


def here(job, *args, **kwargs) -> dict:
    """Run a job in this process."""
    return job.function(**job.params)


def launched(stack: Stack, work: Work, folder: Path, ranks=None, timeout_s=0.0, turn: Path | str = "") -> Record:
    """Stand in for `launch`: the plain loop under the name of a framework, for some with a fault."""
    if reason := stack.why_absent():
        raise Unavailable(stack, reason)
    if stack.name == "accelerate ddp":
        raise HyperionError("rank 1 was killed by SIGKILL")
    wait_for_turn(turn)
    observer = Observer(work, stack.name, stack.packages, folder)
    if stack.name == "HF Trainer":
        return Record.of(planted.train(work, observer, "weight decay on norms"))
    return Record.of(plain.train(work, observer, fused=stack.name == "hyperion", foreach=stack.name != "hyperion"))


@pytest.fixture
def in_this_process(monkeypatch):
    for module in (framework_parity, planted_unfairness, trainer_defaults):
        monkeypatch.setattr(module, "run_job", here)
    for module in (framework_parity, framework_speed):
        monkeypatch.setattr(module, "launch", launched)
    monkeypatch.setattr(trainer_defaults, "use_one_device", lambda: None)  # it would hide devices from later tests


def test_unequal_failed_and_unavailable_frameworks_have_no_value_and_the_others_do(tmp_path, in_this_process):
    stacks = ["plain loop", "hyperion", "HF Trainer", "accelerate ddp", "NeMo"]
    result = perform(toy_context("framework_parity", SIZES | {"stacks": stacks}, tmp_path), tmp_path)
    gate = {row.variant: row for row in result.rows if row.metric == "loss_difference" and "twin" not in row.params}
    assert [name for name, row in gate.items() if row.value is not None] == ["plain loop", "hyperion"]
    assert gate["plain loop"].value == 0 and gate["hyperion"].value <= gate["hyperion"].check_tolerance < 1e-4
    assert "decay on norms: 0 elements without decay instead of 320" in gate["HF Trainer"].value_reason
    assert gate["accelerate ddp"].value_reason == "failed: rank 1 was killed by SIGKILL"
    assert gate["NeMo"].value_reason.startswith("unavailable")
    facts = by_params(result.rows, "count", what=WORK)["hyperion"].params
    assert facts["other_elements"] == 320 and facts["optimizer_steps"] == 4 and facts["tokens"] == 256
    assert by_params(result.rows, "count", what=BITS)["plain loop"].value > 0
    assert len(result.samples[result.samples["variant"] == "hyperion"]) == 4
    twins = {row.variant: row.value for row in result.rows if "twin" in row.params}
    assert len(twins) == 6 and 0 < twins["attention without a fused kernel"] < 1e-4


def test_each_planted_unfairness_has_a_check_and_a_judge_that_sees_nothing_fails_it(tmp_path, in_this_process, monkeypatch):
    context = toy_context("planted_unfairness", SIZES, tmp_path)
    rows = perform(context, tmp_path).rows
    judged = by_params(rows, "count", what=planted_unfairness.NAMED)
    assert list(judged) == [planted_unfairness.CLEAN, *planted.PLANTED]
    assert {row.check_error for row in judged.values()} == {0}
    assert judged[planted_unfairness.CLEAN].value == 0 and judged["beta2 0.999"].params["named"].startswith("betas: 0.9, 0.999")
    unseen = next(row for row in rows if row.variant == planted_unfairness.UNSEEN)
    assert 5 <= unseen.value <= 8  # five by their nature, and in so few steps perhaps other clipping and rounded gradients
    few = {name: planted.PLANTED[name] for name in ("beta2 0.999", "tokens counted per rank", "gradients reduced in bf16")}
    monkeypatch.setattr(planted_unfairness, "PLANTED", few)
    monkeypatch.setattr(planted_unfairness, "unequal", lambda *arguments: [])
    blind = planted_unfairness.run(context, lambda done, total, note="": None).rows
    assert [row.check_error for row in blind if row.params.get("what") == planted_unfairness.NAMED] == [0, 1, 1, 1]


def test_speed_is_measured_for_equal_work_only(tmp_path, in_this_process):
    stacks = ["plain loop", "hyperion", "HF Trainer", "accelerate", "NeMo"]
    gate = toy_context("framework_parity", SIZES, tmp_path)
    refused = gate.absent_row("accelerate", "loss_difference", "refused, the work is not equal: betas", params={"ranks": 1})
    sizes = SIZES | {"stacks": stacks, "launches": 2, "steps": 6}
    result = perform(toy_context("framework_speed", sizes, tmp_path, [refused]), tmp_path)
    times = {row.variant: row for row in result.rows if row.metric == "step_time_s"}
    assert [name for name, row in times.items() if row.value is not None] == ["plain loop", "hyperion"]
    assert "launch 1 is not equal: decay on norms" in times["HF Trainer"].value_reason
    assert times["accelerate"].value_reason.startswith("not timed: refused")
    assert times["hyperion"].n == 2 and times["hyperion"].check_error <= times["hyperion"].check_tolerance
    rates = {row.variant: row.value for row in result.rows if row.metric == "tokens_per_s"}
    assert rates["plain loop"] == pytest.approx(64 / times["plain loop"].value)
    assert by_params(result.rows, "rate_ratio", what=RATIO).keys() == {"hyperion"}
    assert by_params(result.rows, "count", what=FASTER).keys() == {"plain loop", "hyperion"}


def test_a_framework_with_other_losses_is_not_ranked(tmp_path, in_this_process, monkeypatch):
    def drifting(stack: Stack, *arguments, **options) -> Record:
        record = launched(stack, *arguments, **options)
        later = 1e-3 if stack.name == "accelerate" else 0.0
        return replace(record, losses=[*record.losses[:-1], record.losses[-1] + later])

    monkeypatch.setattr(framework_speed, "launch", drifting)
    sizes = SIZES | {"stacks": ["plain loop", "hyperion", "accelerate"], "launches": 2, "steps": 6}
    rows = perform(toy_context("framework_speed", sizes, tmp_path), tmp_path).rows
    (refused,) = [row for row in rows if row.variant == "accelerate"]
    assert refused.metric == "step_time_s" and refused.value is None
    assert "launch 1 is not equal: its losses differ from those of the plain loop by 0.001 nats" in refused.value_reason
    assert by_params(rows, "rate_ratio", what=RATIO).keys() == {"hyperion"}
    assert by_params(rows, "count", what=FASTER).keys() == {"plain loop", "hyperion"}


def test_without_times_of_the_plain_loop_there_is_no_ratio(tmp_path, in_this_process, monkeypatch):
    def drifting(stack: Stack, *arguments, **options) -> Record:
        record = launched(stack, *arguments, **options)
        drift = 1e-3 if stack.name == "plain loop" and arguments[1].name.endswith("-1") else 0.0
        return replace(record, losses=[*record.losses[:-1], record.losses[-1] + drift])

    monkeypatch.setattr(framework_speed, "launch", drifting)
    sizes = SIZES | {"stacks": ["plain loop", "hyperion"], "launches": 2, "steps": 6}
    rows = perform(toy_context("framework_speed", sizes, tmp_path), tmp_path).rows
    assert [row.variant for row in rows if row.metric == "count"] == ["hyperion"]
    assert not [row for row in rows if row.metric == "rate_ratio"]


def test_intervals_that_overlap_are_ties():
    rates = {"a": Estimate(10, 9, 11, 3), "b": Estimate(9.5, 8.5, 10, 3), "c": Estimate(5, 4, 6, 3)}
    assert ranking(rates) == {"a": 0, "b": 0, "c": 2}


def test_a_default_of_the_trainer_is_named(tmp_path, in_this_process, monkeypatch):
    betas = "betas of its own AdamW"
    changes = {name: trainer_defaults.CHANGES[name] for name in (trainer_defaults.EQUAL, betas)}
    monkeypatch.setattr(trainer_defaults, "CHANGES", changes)
    rows = perform(toy_context("trainer_defaults", SIZES, tmp_path), tmp_path).rows
    named = {row.variant: row.params["named"] for row in rows if row.metric == "count"}
    assert named == {trainer_defaults.EQUAL: "", betas: "betas: 0.9, 0.999 instead of 0.9, 0.95"}
    differences = by_params(rows, "unequal_loss_difference")
    assert differences[trainer_defaults.EQUAL].value < 1e-5 < differences[betas].value


def test_rows_of_tokens_are_different_or_refused():
    with pytest.raises(HyperionError, match="has only 1 different rows"):
        distinct_rows(np.zeros(100, np.uint8), 4, 8)
    chosen = distinct_rows(np.array([1, 2, 3, 1, 2, 4, 5, 6, 7, 0]), 2, 2)
    assert chosen.tolist() == [[1, 2, 3], [5, 6, 7]]
