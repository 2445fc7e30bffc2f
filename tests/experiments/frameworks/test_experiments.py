"""The experiments on frameworks at toy sizes. The plain loop in this process, with or without a fault, replaces launches."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyperion.chapter import Context
from hyperion.engines import Record, Stack, Work, plain, planted, stack_named
from hyperion.engines.launch import Outcome, Unavailable, wait_for_turn
from hyperion.engines.observer import Observer
from hyperion.engines.work import distinct_rows
from hyperion.errors import HyperionError
from hyperion.experiments.frameworks import framework_parity, framework_speed, planted_unfairness, trainer_defaults
from hyperion.experiments.frameworks.figures import flat_tables
from hyperion.experiments.frameworks.framework_parity import BITS, WORK
from hyperion.experiments.frameworks.framework_speed import (
    FASTER,
    RATIO,
    TRACED,
    FrameworkSpeedOptions,
    explained_difference,
    part_table,
    ranking,
)
from hyperion.experiments.frameworks.works import loss_difference, loss_tolerance
from hyperion.hardware import detect, detect_cpu
from hyperion.measure.steps.step_parts import PARTS, StepParts
from hyperion.models.llama import llama_flops_per_token, random_llama_shape
from hyperion.results import Estimate, Row
from tests.chapter.toy import by_params, perform, toy_context
from tests.hardware.machines import facts

pytestmark = pytest.mark.slow
UNCHECKED = {"limit_source": "no limit: made up", "n": 1, "ci_low": 0.0, "ci_high": 1.0}
NO_RECORD = {
    **dict.fromkeys(("stack", "engine", "device", "initial_sha256"), ""),
    **{name: [] for name in ("losses", "norms", "clipped_norms", "rows", "groups")},
    **{"ranks": 1, "versions": {}, "counted_tokens": 0, "optimizer_steps": 0, "reduced": {}, "peak_memory_gib": None},
}
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
    traced = by_params(result.rows, "traced_step_time_s", traced_steps=2)
    assert traced.keys() == by_params(result.rows, "tracing_slowdown").keys() == {"plain loop", "hyperion"}
    parts = {part: by_params(result.rows, "part_time_s", part=part) for part in PARTS}
    for name, row in traced.items():
        assert sum(parts[part][name].value for part in PARTS) == pytest.approx(row.value, rel=row.check_tolerance)
        assert row.check_error <= row.check_tolerance and parts["matrix products"][name].value > 0
        kernels = [row for row in result.rows if row.metric == "kernel_time_s" and row.variant == name]
        assert len(kernels) == 13 and kernels[-1].params["kernel"] == "all other kernels"
    differences = {part: by_params(result.rows, "part_difference_s", part=part) for part in PARTS}
    assert all(found.keys() == {"hyperion"} for found in differences.values())
    between = parts["loss"]["hyperion"].value - parts["loss"]["plain loop"].value
    assert differences["loss"]["hyperion"].value == pytest.approx(between)
    assert list(part_table(result.rows).columns) == ["part", "plain loop", "hyperion", "hyperion - plain loop"]
    assert list(flat_tables([result.rows])["frameworks/kernels.csv"]["framework"].unique()) == ["plain loop", "hyperion"]


def test_a_framework_that_is_not_traced_is_timed_and_has_the_reason(tmp_path, in_this_process, monkeypatch):
    def untraced(stack: Stack, work: Work, *arguments, **options) -> Record:
        assert work.traced == (2 if stack.name in ("plain loop", "hyperion") else 0)  # and not in the twins
        record = launched(stack, replace(work, traced=0), *arguments, **options)
        return replace(record, unreadable={"trace": "not traced: RuntimeError: CUPTI"} | record.unreadable)

    monkeypatch.setattr(framework_speed, "launch", untraced)
    sizes = SIZES | {"stacks": ["plain loop", "hyperion"], "launches": 1, "steps": 6}
    rows = perform(toy_context("framework_speed", sizes, tmp_path), tmp_path).rows
    assert by_params(rows, "step_time_s").keys() == {"plain loop", "hyperion"}
    (row,) = [row for row in rows if row.metric in TRACED and row.variant == "hyperion"]
    assert row.value is None and row.value_reason == "not traced: RuntimeError: CUPTI"
    assert explained_difference(rows) == "" and part_table(rows).empty


def test_the_parts_that_explain_the_difference_of_the_fastest_framework_are_named():
    def row(name: str, metric: str, value: float, **params) -> Row:
        return Row(
            notebook="n", experiment="framework_speed", variant=name, metric=metric, value=value, params=params, **UNCHECKED
        )

    seconds = {"plain loop": 0.25, "slow": 0.3, "fast": 0.2}
    rows = [row(name, "step_time_s", value, n=1) for name, value in seconds.items()]
    changes = {"attention": -0.020, "idle": 0.014, "copies and casts": -0.012, "loss": -0.013}
    rows += [row("fast", "part_difference_s", value, part=part) for part, value in changes.items()]
    rows += [row("slow", "part_difference_s", 0.05, part="idle")]
    assert explained_difference(rows) == (
        "A traced step of fast takes 31 ms less than one of the plain loop. "
        "Most of this difference is in: attention (-20 ms), loss (-13 ms)."
    )
    slow = [row for row in rows if row.variant != "fast"]
    assert "slow takes 50 ms more than one of the plain loop. Most of this difference is in: idle (+50 ms)." in (
        explained_difference(slow)
    )


def test_on_an_accelerator_the_traced_kernels_must_fit_into_a_timed_step():
    cpu = detect_cpu()
    record = Record(**NO_RECORD, step_times_s=[9, 0.1, 0.1, 0.11])

    def check(busy_s: float, kind: str = "cuda") -> dict:
        parts = dict.fromkeys(PARTS, 0.0) | {"matrix products": busy_s, "idle": 0.05}
        return framework_speed._busy_check(replace(cpu, kind=kind), record, StepParts(2, busy_s + 0.05, 1e-6, parts, []))

    assert check(0.1)["check_error"] == 0 and check(0.1)["check_tolerance"] == pytest.approx(0.02 + 0.01 / 0.105)
    assert check(0.2)["check_error"] == pytest.approx(0.2 / 0.105 - 1)
    assert check(0.2, "cpu") == {}


def test_a_framework_with_other_losses_is_not_ranked(tmp_path, in_this_process, monkeypatch):
    def drifting(stack: Stack, *arguments, **options) -> Record:
        record = launched(stack, *arguments, **options)
        later = 1e-3 if stack.name == "accelerate" else 0.0
        return replace(record, losses=[*record.losses[:-1], record.losses[-1] + later])

    monkeypatch.setattr(framework_speed, "launch", drifting)
    sizes = SIZES | {"stacks": ["plain loop", "hyperion", "accelerate"], "launches": 2, "steps": 6, "traced_steps": 0}
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
    sizes = SIZES | {"stacks": ["plain loop", "hyperion"], "launches": 2, "steps": 6, "traced_steps": 0}
    rows = perform(toy_context("framework_speed", sizes, tmp_path), tmp_path).rows
    assert [row.variant for row in rows if row.metric == "count"] == ["hyperion"]
    assert not [row for row in rows if row.metric == "rate_ratio"]


def test_each_round_of_launches_starts_with_another_framework(tmp_path, monkeypatch):
    orders = []

    def in_turn(stacks, launch_one, folder):
        orders.append([stack.name for stack in stacks])
        steps = {name: [1.0, 1.0] for name in ("losses", "norms", "clipped_norms", "step_times_s")}
        record = Record(**NO_RECORD | steps)
        return [Outcome(name, replace(record, stack=name)) for name in orders[-1]]

    monkeypatch.setattr(framework_speed, "launch_in_turn", in_turn)
    monkeypatch.setattr(framework_speed, "_refusal", lambda *given: "refused: made up")
    monkeypatch.setattr(Stack, "why_absent", lambda self: "")
    stacks = ["plain loop", "hyperion", "accelerate"]
    context = toy_context("framework_speed", SIZES | {"stacks": stacks, "launches": 4}, tmp_path)
    framework_speed.run(context, lambda done, total, note="": None)
    twins = [framework_speed.TWIN, framework_speed.OTHER_TWIN]
    assert orders == [[*twins, *stacks], [*stacks[1:], *stacks[:1]], [*stacks[2:], *stacks[:2]], stacks]


def test_frameworks_on_different_numbers_of_devices_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(FrameworkSpeedOptions, "device_count", lambda self, context: 8)
    stacks = ["plain loop", "deepspeed zero-1"]  # the second one has two ranks
    context = toy_context("framework_speed", SIZES | {"stacks": stacks, "launches": 1}, tmp_path)
    options = FrameworkSpeedOptions.of(context)
    assert {options.ranks_of(context, stack_named(name)) for name in stacks} == {1}
    context = toy_context("framework_speed", SIZES | {"stacks": stacks, "launches": 1, "ranks": 2}, tmp_path)
    with pytest.raises(HyperionError, match="different numbers of devices") as error:
        framework_speed.run(context, lambda done, total, note="": None)
    assert "'deepspeed zero-1': 2" in error.value.what and "set ranks to 1" in (error.value.next_step or "")


def test_losses_that_are_no_numbers_are_never_equal():
    one, other = (Record(**NO_RECORD | {"losses": losses}, step_times_s=[]) for losses in ([1.0, 2.0, float("nan")], [1.0] * 3))
    assert math.isnan(loss_difference(one, other)) and math.isnan(loss_difference(other, one))
    assert math.isnan(loss_tolerance([other, one], other))


def test_the_first_half_of_the_steps_of_a_launch_is_warm_up():
    runs = [Record(**NO_RECORD, step_times_s=times) for times in ([9, 9, 1, 1], [9, 9, 3, 3], [9, 9, 2, 2])]
    assert framework_speed._over_launches(runs[:1]).value == 1
    assert framework_speed._over_launches(runs).value == 2


def test_a_framework_with_half_the_step_time_is_twice_as_fast_as_the_plain_loop(tmp_path):
    context = toy_context("framework_speed", SIZES | {"stacks": ["plain loop", "hyperion"], "launches": 2}, tmp_path)
    runs = {
        name: [Record(**NO_RECORD, step_times_s=[time_s] * 4)] * 2 for name, time_s in (("plain loop", 2.0), ("hyperion", 1.0))
    }
    rows = framework_speed._comparison_rows(context, FrameworkSpeedOptions.of(context), runs, "synthetic")
    assert [(row.variant, row.metric, row.value) for row in rows] == [
        ("plain loop", "count", 1),
        ("hyperion", "count", 0),
        ("hyperion", "rate_ratio", 2),
    ]


def test_the_peak_of_two_devices_is_twice_that_of_one(tmp_path, monkeypatch):
    gpu = detect(facts("H100 SXM"))
    monkeypatch.setattr(Context, "device", property(lambda of_context: gpu))
    context = toy_context("framework_speed", SIZES | {"stacks": ["plain loop"], "launches": 1, "dtype": "bf16"}, tmp_path)
    options, shape = FrameworkSpeedOptions.of(context), random_llama_shape(SIZES["model"], 256)

    def mfu(ranks: int) -> float:
        unreadable = {"peak_memory_gib": "made up"}
        record = Record(**NO_RECORD | {"ranks": ranks, "unreadable": unreadable}, step_times_s=[1.0, 1.0])
        rows = framework_speed._speed_rows(context, options, shape, stack_named("plain loop"), [record], {}, "synthetic")
        return next(row.value for row in rows if row.metric == "mfu")

    # A step of 4 rows of 16 tokens takes 1 s, and the vendor publishes 989.4 TFLOPS.
    flops = llama_flops_per_token(shape, 16).forward_backward * 4 * 16
    assert mfu(1) == pytest.approx(flops / 989.4e12) and mfu(2) == pytest.approx(flops / (2 * 989.4e12))


def test_the_ranking_uses_the_intervals_of_the_rows_that_it_compares(tmp_path):
    """The medians of the launches are disjoint. With the variation within launches, the intervals of the rates overlap."""
    context = toy_context("framework_speed", SIZES | {"stacks": ["plain loop", "hyperion"], "launches": 2}, tmp_path)
    noise = [0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2]
    runs = {
        name: [Record(**NO_RECORD, step_times_s=[*noise, *(median_s * factor for factor in noise)]) for median_s in medians]
        for name, medians in (("plain loop", (1.02, 1.03)), ("hyperion", (1.0, 1.01)))
    }
    rows = framework_speed._comparison_rows(context, FrameworkSpeedOptions.of(context), runs, "synthetic")
    assert [row.value for row in rows if row.metric == "count"] == [0, 0]


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
