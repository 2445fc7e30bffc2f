"""Communication is a share only where it is one: exposed time from a trace, and a difference with its sign beside it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from hyperion.chapter import variants
from hyperion.chapter.context import Context, Result
from hyperion.errors import HyperionError
from hyperion.experiments.scaling import rank_steps, scaling
from hyperion.experiments.scaling.efficiency_forecast import flops_and_bytes
from hyperion.experiments.scaling.figures import COMPUTING, LEAST_EXPOSED, MEAN_EXPOSED
from hyperion.experiments.scaling.scaled_training import MODES, ScalingOptions, lm_config
from hyperion.experiments.scaling.scaling_rows import EXPOSED, _difference_rows, _exposed_rows, _ratio, step_times, workload_rows
from hyperion.hardware import detect, detect_cpu
from hyperion.hardware.cpu import usable_cpus
from hyperion.measure.clock.timing import device_clock
from hyperion.measure.steps.trace import COMMUNICATION, GAPS, GEMM, MEMORY, Event, Trace
from hyperion.models import TransformerLM, layout_of
from hyperion.processes import JobError, process_group, run_ranks, world
from hyperion.results import BUSY_GPU, Row
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

SMALL = {"model": "lm_d64_h4_l2", "batch_per_device": 2, "sequence_length": 16, "vocabulary": 128}
SIZES = {
    "counts": [1, 2],
    "precision": "fp32",
    "warmup_steps": 1,
    "steps": 6,
    "traced_steps": 2,
    "learning_rate": 1e-4,
    "parity_steps": 3,
    "parity_batch": 4,
    "parity_length": 8,
    "timeout_s": 300,
    "workloads": [{"name": f"language_{strategy}", "strategy": strategy} | SMALL for strategy in ("ddp", "fsdp")],
}
IMAGES = {"name": "image_ddp", "model": "resnet18", "strategy": "ddp", "batch_per_device": 4, "width": 4}
NAMES = ("language_ddp", "language_fsdp", "image_ddp")


@pytest.mark.parametrize(
    ("workload", "missing"),
    [({"model": "lm_d64_h4_l2", "vocabulary": 128}, "sequence_length"), ({"model": "resnet18", "vocabulary": 128}, "width")],
)
def test_a_workload_without_the_sizes_of_its_model_is_refused(workload, missing):
    sizes = SIZES | {"workloads": [{"name": "other", "strategy": "ddp", "batch_per_device": 2} | workload]}
    with pytest.raises(HyperionError, match=f"workload 'other' .* needs {missing} of at least 1"):
        ScalingOptions.parse(sizes, "scaling")


@pytest.fixture(scope="module")
def result(ranks_stay, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    return perform(toy_context("scaling", SIZES | {"workloads": [*SIZES["workloads"], IMAGES]}, folder), folder)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="two ranks need two cores")
@pytest.mark.long
def test_exposed_communication_of_two_gloo_ranks_is_a_share_from_a_trace(result):
    both = [row for row in result.rows if row.params.get("what") == EXPOSED]
    exposed, least = ([row for row in both if row.params["of"] == of] for of in (MEAN_EXPOSED, LEAST_EXPOSED))
    assert {(row.variant, row.params["mode"]) for row in exposed} == {(name, mode) for name in NAMES for mode in MODES}
    assert all(row.params["ranks"] == 2 and 0 < row.value < 1 and row.n == 2 for row in exposed)
    traced = result.samples.query("kind == 'traced'")
    assert len(traced) == 2 * len(exposed) and set(traced["rank"]) == {0, 1} and (traced["ranks"] == 2).all()
    (row,) = [row for row in exposed if (row.variant, row.params["mode"]) == ("language_ddp", "weak")]
    own = traced.query("workload == 'language_ddp' and mode == 'weak'")
    assert row.value == pytest.approx((own["exposed_ns"] / own["window_ns"]).mean())
    (row,) = [row for row in least if (row.variant, row.params["mode"]) == ("language_ddp", "weak")]
    assert row.value == pytest.approx((own["exposed_ns"] / own["window_ns"]).min())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="two ranks need two cores")
def test_every_difference_has_its_interval_and_no_share_is_negative(result):
    differences = [row for row in result.rows if row.metric == "alone_difference"]
    shares = {(row.variant, row.params["mode"]): row for row in result.rows if row.metric == "communication_share"}
    assert len(differences) == len(shares) == 2 * len(NAMES)
    for row in differences:
        share = shares[row.variant, row.params["mode"]]
        assert row.ci_low <= row.value <= row.ci_high and share.params == row.params
        assert (share.value == row.value) if row.ci_low > 0 else (share.value is None and "no share" in share.value_reason)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="two ranks need two cores")
def test_images_are_counted_and_have_the_losses_of_one_rank_that_runs_the_parts_of_both(result):
    rows = [row for row in result.rows if row.variant == "image_ddp"]
    images = {(r.params["ranks"], r.params["mode"]): r.params["images"] for r in rows if r.metric == "images_per_s"}
    assert images == {(1, "weak"): 4, (2, "weak"): 8, (2, "strong"): 4}
    (parity,) = [row for row in rows if row.metric == "relative_difference"]
    assert parity.value <= 1e-6 and parity.params["steps"] == 3
    # Batch normalization makes the losses depend on the number of ranks, so one rank with the whole batch has other losses.
    losses = (
        result.samples.query("workload == 'image_ddp' and kind == 'parity' and rank == 0").groupby("ranks")["loss"].apply(list)
    )
    assert np.abs(np.array(losses[2]) / losses[1] - 1).max() > 1e-3


def test_the_prediction_for_images_counts_the_gradients_of_the_whole_network(tmp_path):
    context = toy_context("scaling", SIZES | {"workloads": [IMAGES | {"width": 64}]}, tmp_path)
    training = ScalingOptions.of(context).workloads[0]
    flops, sent = flops_and_bytes(training, 4, "bf16")
    # 11,173,962 parameters; an all-reduce sends twice 3/4 of their float32 gradients. The network has 0.56 GFLOPs of
    # multiply-adds per image forward, and the backward pass has twice as many.
    assert sent == 2 * 3 / 4 * 4 * 11_173_962
    assert flops == pytest.approx(3 * 2 * 0.556e9, rel=0.01)


def test_what_fsdp_keeps_gathered_is_gathered_once(tmp_path):
    sizes = {"name": "fsdp", "model": "lm_d128_h4_l2", "strategy": "fsdp", "batch_per_device": 4}
    sizes |= {"sequence_length": 64, "vocabulary": 2048}
    training = ScalingOptions.of(toy_context("scaling", SIZES | {"workloads": [sizes]}, tmp_path)).workloads[0]
    with torch.device("meta"):
        model = TransformerLM(lm_config(training))
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    names = layout_of(model).blocks
    again = sum(number for name, number in count.items() if any(name.startswith(f"{block}.") for block in names[:-1]))
    total = sum(count.values())
    assert 0 < again < total
    # 3/4 of the bf16 parameters, of those of all blocks but the last twice, and of the float32 gradients.
    assert flops_and_bytes(training, 4, "bf16")[1] == 3 / 4 * (2 * (total + again) + 4 * total)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_a_batch_is_divided_among_any_number_of_ranks(ranks, tmp_path):
    context = toy_context("scaling", SIZES, tmp_path)
    training = ScalingOptions.of(context).workloads[0]
    here = world()
    parts = [rank_steps._batch(context, training, 8, 16, replace(here, rank=rank, size=ranks), 0)[0] for rank in range(ranks)]
    assert min(map(len, parts)) > 0
    assert torch.equal(torch.cat(parts), rank_steps._batch(context, training, 8, 16, here, 0)[0])


@pytest.mark.parametrize(("machine", "exposed_ns"), [("H200", 60), ("cpu", 60)])
def test_only_communication_that_runs_alone_is_exposed(monkeypatch, machine, exposed_ns):
    device = detect_cpu() if machine == "cpu" else detect(facts(machine))
    spans = [("nccl", 10, 90, COMMUNICATION), ("gemm", 0, 20, GEMM), ("adam", 40, 50, MEMORY), ("step", 0, 100, GAPS)]
    trace = Trace([Event(name, start, end, name, kind) for name, start, end, kind in spans], 0, 120, 2)
    monkeypatch.setattr(rank_steps, "trace_steps", lambda step, data, device, steps: trace)
    (found,) = rank_steps._traced(lambda: None, device, 2).to_dict("records")
    assert (found["exposed_ns"], found["window_ns"], found["share"]) == (exposed_ns, 120, 0.5)
    assert found["busy_ns"] == 90  # from the start of the product to the end of the collective, without the gap after it


def cells(tmp_path, together, alone):
    """The rows of the difference for given step times in milliseconds."""
    context = toy_context("scaling", SIZES, tmp_path)
    training = ScalingOptions.of(context).workloads[0]
    params = {"model": training.model, "strategy": "ddp", "mode": "weak", "ranks": 2}
    index = {"workload": training.name, "ranks": 2, "mode": "weak"}
    frame = pd.DataFrame({"index": range(len(alone)), "time_s": np.array(alone) / 1e3, "kind": "alone", "rank": 0}).assign(
        **index
    )
    rows = _difference_rows(context, "fp32", training, frame, np.array(together) / 1e3, params)
    return *rows, *_exposed_rows(context, "fp32", training, frame, params)


@pytest.mark.parametrize(("alone", "is_share"), [(8.0, True), (9.95, False), (10.0, False), (11.0, False)])
def test_a_difference_that_may_be_zero_or_less_is_no_share(tmp_path, alone, is_share):
    scatter = np.linspace(-0.3, 0.3, 20)
    difference, share, *exposed = cells(tmp_path, 10 + scatter, alone + scatter[::-1])
    assert difference.value == pytest.approx(1 - alone / 10, abs=0.02)
    assert (
        (share.value == difference.value) if is_share else (share.value is None and share.value_reason.startswith("no share: "))
    )
    assert [(row.value, row.value_reason) for row in exposed] == [(None, "no step was profiled")] * 2


def test_without_the_step_alone_there_is_neither(tmp_path):
    difference, share, *_ = cells(tmp_path, [10.0] * 5, [])
    assert difference.value is None and share.value is None and "does not fit" in difference.value_reason


def samples_of(step_s: dict[tuple[int, str], list[float]], losses: dict[int, list[float]], busy_s: float = 0.06) -> pd.DataFrame:
    """Made-up samples of one workload. An item has 1e12 FLOPs, and the batch is 4 items per device in weak scaling, or in total.

    Args:
        busy_s: busy time of the first rank's device in a profiled step. On each further rank it is 10 ms longer.
        step_s: time of every step on each rank, by number of ranks and mode.
        losses: losses of the parity check, by number of ranks.
    """
    frames = []
    for (ranks, mode), seconds in step_s.items():
        items = 4 * (ranks if mode == "weak" else 1)
        about = {"kind": "step", "ranks": ranks, "mode": mode, "items": items, "least_flops": items * 1e12}
        for rank, time_s in enumerate(seconds):
            frames.append(pd.DataFrame({"index": range(6), "time_s": time_s}).assign(rank=rank, **about))
            traced = {"index": 0, "busy_ns": 3e9 * (busy_s + 0.01 * rank), "exposed_ns": 3e7, "steps": 3}
            traced["share"] = 0.1 + 0.2 * rank
            frames.append(pd.DataFrame([traced | about | {"kind": "traced", "rank": rank}]))
    for ranks, curve in losses.items():
        for rank in range(ranks):
            frame = pd.DataFrame({"index": range(len(curve)), "loss": curve})
            frames.append(frame.assign(kind="parity", ranks=ranks, rank=rank))
    return pd.concat(frames, ignore_index=True)


STEPS_S = {(1, "weak"): [0.1], (2, "weak"): [0.125, 0.125], (2, "strong"): [0.08, 0.08]}
LOSSES = {1: [4.0, 3.0, 2.0], 2: [4.0, 3.0, 2.0]}


def rows_of_samples(tmp_path, own: pd.DataFrame, dtype: str = "fp32") -> list[Row]:
    """The rows on one and on two ranks."""
    context = toy_context("scaling", SIZES, tmp_path)
    training = ScalingOptions.of(context).workloads[0]
    return [row for ranks in (1, 2) for row in workload_rows(context, dtype, training, own, ranks, "")]


def test_a_step_takes_as_long_as_on_its_slowest_rank():
    own = samples_of({(2, "weak"): [0.3, 0.4]}, {})
    own.loc[own["index"] == 5, "time_s"] = [0.9, 0.2]  # another rank is the slowest in the last step
    assert step_times(own, "weak", 2).tolist() == [0.4] * 5 + [0.9]


def test_speedup_is_work_per_time_relative_to_one_device(tmp_path):
    rows = rows_of_samples(tmp_path, samples_of(STEPS_S, LOSSES))
    found = {(row.metric, row.params["mode"]): row.value for row in rows if row.metric in ("speedup", "scaling_efficiency")}
    # Weak: twice the work in 1.25 times the time. Strong: the same work in 0.8 times the time.
    assert found == pytest.approx(
        {
            ("speedup", "weak"): 1.6,
            ("scaling_efficiency", "weak"): 0.8,
            ("speedup", "strong"): 1.25,
            ("scaling_efficiency", "strong"): 0.625,
        }
    )


def test_other_losses_on_two_ranks_than_on_one_are_refused(tmp_path):
    for last, refused in ((2.0, False), (2.002, True)):
        rows = rows_of_samples(tmp_path, samples_of(STEPS_S, LOSSES | {2: [4.0, 3.0, last]}))
        (parity,) = [row for row in rows if row.metric == "relative_difference"]
        assert parity.value == pytest.approx(last / 2 - 1) and parity.without_failed_value().is_unexpected is refused


def test_the_limit_of_a_step_counts_the_work_of_one_device(monkeypatch, tmp_path):
    monkeypatch.setattr(Context, "device", detect(facts("H100 SXM")))
    rows = rows_of_samples(tmp_path, samples_of(STEPS_S, LOSSES), "bf16")
    limits = {(row.params["ranks"], row.params["mode"]): row.limit for row in rows if row.metric == "step_time_s"}
    one = limits[1, "weak"]
    # 4e12 FLOPs on one device, at a peak of about 1 PFLOPS.
    assert one == pytest.approx(4e-3, rel=0.1) and limits == {(1, "weak"): one, (2, "weak"): one, (2, "strong"): one / 2}
    rates = {(row.params["ranks"], row.params["mode"]): row.limit for row in rows if row.metric == "tokens_per_s"}
    assert rates == pytest.approx({(1, "weak"): 4 / one, (2, "weak"): 8 / one, (2, "strong"): 8 / one})


def test_the_busy_time_of_the_gpus_is_a_share_of_the_step_that_was_not_profiled(monkeypatch, tmp_path):
    samples = samples_of(STEPS_S, LOSSES)
    assert not [row for row in rows_of_samples(tmp_path, samples) if BUSY_GPU.items() <= row.params.items()]  # a CPU is the host
    monkeypatch.setattr(Context, "device", detect(facts("H100 SXM")))
    rows = [row for row in rows_of_samples(tmp_path, samples, "bf16") if BUSY_GPU.items() <= row.params.items()]
    found = {(row.params["ranks"], row.params["mode"]): row.value for row in rows}
    # Without 10 ms of exposed communication: 50 ms on the first rank and 60 ms on the second, of 100, 125 and 80 ms.
    assert found == pytest.approx({(1, "weak"): 0.5, (2, "weak"): 0.055 / 0.125, (2, "strong"): 0.055 / 0.08})
    assert all(row.limit == 1 and row.n == 3 for row in rows)
    assert [row.params.get("of") for row in rows] == [None, COMPUTING, COMPUTING]
    # The profiler slows the host down, so the GPUs can be busy for longer than a step takes without it.
    slow = rows_of_samples(tmp_path / "slow", samples_of(STEPS_S, LOSSES, busy_s=0.2), "bf16")
    assert {row.value for row in slow if BUSY_GPU.items() <= row.params.items()} == {1.0}


def test_intervals_are_wider_if_each_step_is_like_the_step_before():
    alike, mixed = np.repeat([0.10, 0.11, 0.105, 0.115], 5), np.tile([0.10, 0.11, 0.105, 0.115], 5)
    flat = 0.1 + np.tile([0.0, 0.001], 10)
    narrow, wide = (_ratio(times, flat) for times in (mixed, alike))
    assert narrow.value == pytest.approx(wide.value) and narrow.ci_low > wide.ci_low > 0 and narrow.ci_high < wide.ci_high


def test_an_interval_of_very_different_steps_stays_within_the_ratios_of_the_extremes():
    slow, flat = np.repeat([0.01, 0.3], 6), np.linspace(0.0100, 0.0101, 12)
    ratio = _ratio(slow, flat)
    assert 0.0100 / 0.3 <= ratio.ci_low <= ratio.value <= ratio.ci_high <= 0.0101 / 0.01


def test_exposed_communication_is_the_mean_of_the_ranks_and_the_least(tmp_path):
    rows = [row for row in rows_of_samples(tmp_path, samples_of(STEPS_S, LOSSES)) if row.params.get("what") == EXPOSED]
    found = {(row.params["mode"], row.params["of"]): row.value for row in rows}
    assert found == pytest.approx({(mode, of): v for mode in MODES for of, v in ((MEAN_EXPOSED, 0.2), (LEAST_EXPOSED, 0.1))})


@pytest.mark.parametrize(("machine", "kind", "profiled"), [("H200", "step", 1), ("H200", "alone", 0), ("cpu", "step", 0)])
def test_on_one_gpu_a_step_is_profiled_too(monkeypatch, tmp_path, machine, kind, profiled):
    monkeypatch.setattr(Context, "device", detect_cpu() if machine == "cpu" else detect(facts(machine)))
    clock = SimpleNamespace(sample=lambda functions, flush, count: [[0.1] * count])
    engine = SimpleNamespace(model=None, optimizer=None, train_step=print)
    traced = pd.DataFrame([{"kind": "traced", "busy_ns": 1}])
    for name, value in (("device_clock", clock), ("_engine", (engine, 1.0)), ("_batch", None), ("_traced", traced)):
        monkeypatch.setattr(rank_steps, name, lambda *_, value=value: value)
    context = toy_context("scaling", SIZES, tmp_path)
    options = ScalingOptions.of(context)
    precision = rank_steps.Precision("fp32", "test")
    frames = rank_steps._mode_times(context, options, options.workloads[0], ["weak"], kind, world(), precision)
    assert [frame["kind"].iloc[0] for frame in frames] == [kind, *["traced"] * profiled]


@pytest.fixture
def on_one_gpu(monkeypatch, tmp_path):
    """A function that runs the experiment on a CPU that claims to be a GPU: the steps are real, and their trace is not.

    Its argument returns the trace of a number of steps. The result is a pair: (forecasts, rows).
    """
    cpu = detect_cpu()
    monkeypatch.setattr(Context, "device", replace(cpu, kind="cuda", arch="sm_90"))
    monkeypatch.setattr(rank_steps, "device_clock", lambda _: device_clock(cpu))
    monkeypatch.setattr(ScalingOptions, "device_count", lambda *_: 1)
    monkeypatch.setattr(
        scaling, "run_on_ranks", lambda context, report, function, params, ranks: [function(context, report, **params)]
    )

    def run(trace):
        monkeypatch.setattr(rank_steps, "trace_steps", lambda step, data, device, steps: (step(), trace(steps))[1])
        context = toy_context("scaling", SIZES, tmp_path)
        with process_group(backend="gloo"):
            return scaling.forecast(context), perform(context, tmp_path).rows

    return run


def busy_and_times(rows):
    busy = {row.variant: row for row in rows if BUSY_GPU.items() <= row.params.items()}
    times = {row.variant: row for row in rows if row.metric == "step_time_s"}
    assert set(busy) == set(times) == {"language_ddp", "language_fsdp"}
    return busy, times


@pytest.mark.slow
def test_on_one_gpu_the_busy_time_comes_from_the_samples_that_a_rank_takes(on_one_gpu):
    def trace(steps):  # 1 us for each step
        return Trace([Event("gemm", 0, 1000 * steps, 7, GEMM)], 0, 10_000 * steps, steps)

    forecasts, rows = on_one_gpu(trace)
    busy, times = busy_and_times(rows)
    for name, row in busy.items():
        assert row.value == pytest.approx(1e-6 / times[name].value) and row.params == times[name].params | BUSY_GPU
    # Without another device there is no efficiency to predict, and the row of two devices says so, too.
    found = {(row.variant, tuple(row.params.items())): row.value_reason for row in rows if row.metric == "scaling_efficiency"}
    assert {found[one.variant, tuple(one.params.items())] for one in forecasts} == {"this machine has one device"}
    assert {(one.estimate, one.basis) for one in forecasts} == {(None, "no estimate: this machine has one device")}


@pytest.mark.slow
def test_a_profiler_without_permission_costs_the_busy_time_and_nothing_else(on_one_gpu):
    def trace(steps):
        raise HyperionError("the profiler recorded no kernel on the GPU")

    busy, times = busy_and_times(on_one_gpu(trace)[1])
    assert {(row.value, row.value_reason) for row in busy.values()} == {(None, "the profiler recorded no kernel on the GPU")}
    assert all(row.value > 0 for row in times.values())


def test_on_one_device_no_losses_are_compared(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_steps, "_parity", lambda *_: pytest.fail("no other launch has losses to compare with"))
    monkeypatch.setattr(rank_steps, "_timed", lambda *_: [pd.DataFrame({"kind": ["step"]})])
    monkeypatch.setattr(ScalingOptions, "device_count", lambda options, context: 1)
    result = rank_steps.measure_on_rank(toy_context("scaling", SIZES, tmp_path), lambda *_: None, ["language_ddp"])
    assert list(result.samples["kind"]) == ["step"]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.skipif(len(usable_cpus()) < 2, reason="two ranks need two cores")
def test_a_number_of_devices_on_which_ranks_fail_leaves_the_others_measured(standing_ranks, monkeypatch, tmp_path):
    # Two ranks of which one fails are launched; one rank is this process.
    monkeypatch.setattr(
        variants, "run_ranks", lambda job, **options: (run_ranks if job.ranks == 2 else standing_ranks.run)(job, **options)
    )
    # A parity batch of one sequence cannot be divided, so that rank 1 raises an error.
    result = perform(toy_context("scaling", SIZES | {"parity_batch": 1, "workloads": SIZES["workloads"][:1]}, tmp_path), tmp_path)
    times = [row for row in result.rows if row.metric == "step_time_s"]
    assert [(row.params["ranks"], row.value > 0) for row in times] == [(1, True)]
    failed = [row for row in result.rows if row.params["ranks"] == 2]
    assert [(row.metric, row.value, row.params["mode"]) for row in failed] == [("scaling_efficiency", None, m) for m in MODES]
    assert all(row.value_reason.startswith("the launch failed: a tensor of the batch is empty") for row in failed)


def launches(monkeypatch, tmp_path, fault: JobError) -> tuple[list, Result | None]:
    """Run the experiment with launches in which the FSDP training fails on two ranks. Return (launches, result)."""
    made = []

    def launch(context, report, function, params, ranks):
        made.append((ranks, *params["names"]))
        if ranks == 2 and "language_fsdp" in params["names"]:
            raise fault
        index = pd.MultiIndex.from_product([params["names"], MODES, ["step", "alone"], range(5)])
        frame = index.to_frame(index=False, name=["workload", "mode", "kind", "index"])
        frame = frame.assign(time_s=0.01, items=64, least_flops=1.0)
        parity = frame.query("mode == 'weak' and kind == 'step'").assign(kind="parity", loss=3.0)
        return [Result([], pd.concat([frame, parity]).assign(ranks=ranks, rank=rank)) for rank in range(ranks)]

    monkeypatch.setattr(scaling, "run_on_ranks", launch)
    context = toy_context("scaling", SIZES, tmp_path)
    return made, None if fault.exit_code == 75 else scaling.run(context, lambda done, total, note="": None)


def test_a_training_that_fails_on_two_ranks_takes_no_other_with_it(monkeypatch, tmp_path):
    made, result = launches(monkeypatch, tmp_path, JobError("rank 1 died: planted\nits log"))
    both = ("language_ddp", "language_fsdp")
    assert made == [(1, *both), (2, *both), (2, "language_ddp"), (2, "language_fsdp")]
    efficiencies = [row for row in result.rows if row.metric == "scaling_efficiency"]
    assert [(row.variant, row.value) for row in efficiencies] == [
        (both[0], 1.0),
        (both[0], 0.5),
        (both[1], None),
        (both[1], None),
    ]
    assert {row.value_reason for row in efficiencies[2:]} == {"the launch failed: rank 1 died: planted"}


def test_a_launch_that_was_stopped_stops_the_experiment(monkeypatch, tmp_path):
    launches(monkeypatch, tmp_path, stopped := JobError("stopped by SIGTERM", exit_code=75))
    with pytest.raises(JobError) as error:
        scaling.run(toy_context("scaling", SIZES, tmp_path), lambda done, total, note="": None)
    assert error.value is stopped
