"""Collectives on two real ranks: every operation and format exact, every planted fault seen, the slowest rank's time kept."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.hardware.telemetry import unreadable
from hyperion.measure import COLLECTIVES, Collective, Timing, Verification, collective_bytes, measure_collective
from hyperion.measure.collectives.collectives import ALL_COLLECTIVES, DTYPES, Buffers, CollectiveOverlap, memory_needed, root_of
from hyperion.processes import Job, RankError, RollCall, World, run_ranks
from hyperion.results import Row, Run, rows_from_csv
from tests.measure import collective_ranks
from tests.measure.collective_ranks import ELEMENTS, EXPERIMENT, FAULTS, SIZES, TOO_LARGE


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each of two ranks wrote down, and the error that the job ended with."""
    folder = tmp_path_factory.mktemp("collectives")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        environment.setenv("HIP_VISIBLE_DEVICES", "")
        with pytest.raises(RankError) as ended:
            job = Job(collective_ranks.checks, {"folder": str(folder)}, timeout_s=120, ranks=2)
            run_ranks(job, on_line=lambda line: None)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], ended.value


@pytest.fixture(scope="module")
def rows(launched) -> list[Row]:
    """The rows of the experiment `collectives`, from the same launch: rank 0 has those of all, and other ranks none."""
    assert rows_from_csv(launched[0][1]["rows"]) == []
    return rows_from_csv(launched[0][0]["rows"])


@pytest.mark.process
@pytest.mark.parametrize("name", ALL_COLLECTIVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_is_exact_in_every_format_on_every_rank(launched, name, dtype):
    for size in SIZES:
        ranks = [report["sound"][f"{name} {dtype} {size}"] for report in launched[0]]
        assert [rank["error"] for rank in ranks] == [0, 0]
        assert ranks[0]["bytes"] == collective_bytes(size, dtype, 2) >= size


@pytest.mark.process
def test_all_ranks_hold_the_same_samples_those_of_the_slowest(launched):
    for cell, report in launched[0][0]["sound"].items():
        assert report["samples"] == launched[0][1]["sound"][cell]["samples"]
        assert len(report["samples"]) >= 30 and min(report["samples"]) > 0


@pytest.mark.process
def test_busbw_of_one_second_is_the_bytes_that_cross_a_link(launched):
    factors = {"all_reduce": 1, "broadcast": 1, "all_gather": 1 / 2, "reduce_scatter": 1 / 2, "all_to_all": 1 / 2}
    factors |= {"reduce": 1, "send_recv": 1}
    assert set(factors) == set(ALL_COLLECTIVES)
    for name, factor in factors.items():
        report = launched[0][0]["sound"][f"{name} fp32 10007"]
        assert report["busbw"] == pytest.approx(factor * report["bytes"] / 1e9)


@pytest.mark.process
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen_on_the_ranks_that_have_it(launched, fault):
    wrong = [report["broken"][fault] for report in launched[0]]
    assert tuple(rank for rank in range(2) if wrong[rank]) == FAULTS[fault][3]
    assert all(count <= ELEMENTS for count in wrong)


@pytest.mark.process
def test_an_all_reduce_is_timed_beside_a_computation_and_is_right_afterwards(launched):
    ranks = [report["overlap"] for report in launched[0]]
    for name in ("a sleep", "products"):
        # Samples are the slowest rank's, so what is made of them is the same everywhere.
        assert ranks[0][name] == ranks[1][name] and ranks[0][name]["error"] == 0
        assert ranks[0][name]["low"] <= ranks[0][name]["share"] <= ranks[0][name]["high"]
        assert all(len(samples) >= 10 and min(samples) > 0 for samples in ranks[0][name]["samples"])
    assert min(ranks[0]["a sleep"]["samples"][0]) >= 0.01
    assert "2 ranks" in ranks[0]["products"]["words"]


@pytest.mark.process
def test_the_computation_begins_while_the_all_reduce_is_under_way(launched):
    for report in launched[0]:
        alone, beside = report["overlap"]["begun"]
        assert alone and beside


@pytest.mark.process
def test_a_wrong_value_ends_the_job_and_names_the_rank(launched):
    error = launched[1]
    assert error.rank == 1 and error.exit_code == 1
    assert "rank 1: 1 of 2,048 values of all_reduce, bf16, 4,096 bytes are wrong before it was timed: element 3" in error.what


@pytest.mark.process
@pytest.mark.parametrize("name", ["reduce", "send_recv"])
def test_the_rank_with_a_wrong_value_says_which_one_it_is(launched, name):
    """The error that ends a job, as for the all_reduce above."""
    others, message = (rank["wrong value"][name] for rank in launched[0])
    expected = f"rank 1: 1 of 2,048 values of {name}, bf16, 4,096 bytes are wrong before it was timed: element 3"
    assert message.startswith(expected) and others == ""


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_the_factor_of_an_all_reduce(ranks, factor):
    assert COLLECTIVES["all_reduce"].bus_factor(ranks) == factor
    assert COLLECTIVES["all_gather"].bus_factor(ranks) == factor / 2


CPU = detect_cpu()


def world_of(ranks: int, rank: int = 0) -> World:
    return World(rank, ranks, rank, "gloo", CPU)


def simulated(collective: Collective, dtype: str, ranks: int, size: int) -> list[Buffers]:
    """Every rank's buffers, with what a sound collective would leave: computed here, from all inputs, on one process."""
    buffers = [Buffers(collective, size, dtype, world_of(ranks, rank), RollCall()) for rank in range(ranks)]
    inputs = [b.input for b in buffers]
    for rank, b in enumerate(buffers):
        b.prepare()
        parts = [given.chunk(ranks) for given in inputs]
        b.output.copy_(
            {
                "all_reduce": lambda: torch.stack(inputs).sum(0),
                "reduce": lambda: torch.stack(inputs).sum(0),
                "send_recv": lambda rank=rank: inputs[rank - 1],
                "broadcast": lambda: inputs[root_of(ranks)],
                "all_gather": lambda: torch.cat(inputs),
                "reduce_scatter": lambda parts=parts, rank=rank: torch.stack([p[rank] for p in parts]).sum(0),
                "all_to_all": lambda parts=parts, rank=rank: torch.cat([p[rank] for p in parts]),
            }[collective.name]()
        )
    return buffers


@pytest.mark.parametrize("name", ALL_COLLECTIVES)
@pytest.mark.parametrize(("dtype", "ranks"), [("bf16", 8), ("fp16", 16), ("fp32", 3), ("int64", 12)])
def test_what_is_expected_holds_for_more_ranks_than_this_machine_has(name, dtype, ranks):
    """Sums of eight ranks in bf16 are exact too: the inputs are small enough."""
    for buffers in simulated(ALL_COLLECTIVES[name], dtype, ranks, 5000):
        assert buffers.wrong() == (0, None)


def test_what_is_reduced_is_compared_on_the_root_alone():
    """The others' outputs are undefined: NCCL leaves them, gloo may use them."""
    ranks = simulated(ALL_COLLECTIVES["reduce"], "fp32", 3, 5000)
    for rank in ranks:
        rank.output[5] += 1
    assert [rank.wrong()[0] for rank in ranks] == [0, 0, 1]


def test_a_collective_needs_its_two_buffers_and_room_for_checking():
    assert memory_needed(8 << 30) == 18 << 30
    assert memory_needed(4096) < 1 << 20


def test_inputs_differ_by_rank_and_by_element():
    first, second = (Buffers(COLLECTIVES["all_gather"], 80_000, "bf16", world_of(2, r), RollCall()).input for r in range(2))
    assert (first == second).float().mean() < 0.02
    assert all((first == first.roll(by)).float().mean() < 0.02 for by in (1, 2, 64, 256, 4096))
    assert first.min() >= 1 and len(first.unique()) > 200


@pytest.mark.parametrize(("ranks", "dtype", "why"), [(1, "fp32", "at least two ranks"), (200, "bf16", "sums of 200 ranks")])
def test_what_cannot_be_checked_is_refused(ranks, dtype, why):
    with pytest.raises(HyperionError, match=why):
        measure_collective(COLLECTIVES["all_reduce"], 64, dtype, world_of(ranks), RollCall())


@pytest.mark.parametrize(("wanted", "dtype", "ranks", "bytes"), [(8, "bf16", 4, 8), (8, "fp32", 4, 16), (1000, "fp32", 3, 1008)])
def test_sizes_are_whole_elements_for_every_rank(wanted, dtype, ranks, bytes):
    assert collective_bytes(wanted, dtype, ranks) == bytes


@pytest.mark.process
def test_the_experiment_has_a_checked_row_for_every_cell_and_they_can_be_stored(rows, tmp_path):
    Run.create(tmp_path / "run", {}).record("toy", "collectives", rows, pd.DataFrame({"x": [1]}), input_hash="toy")
    rates = [row for row in rows if row.metric == "busbw_gb_s" and row.value is not None]
    # Of 1 and 8 bytes both become an element for each of two ranks.
    sizes = [("fp32", size) for size in (8, 4096, 65_536)] + [("bf16", 64)]
    cells = [(name, *cell) for name in ALL_COLLECTIVES for cell in sizes]
    assert [(r.variant, r.dtype, r.params["bytes"]) for r in rates] == cells
    assert all(row.check_error == 0 == row.check_tolerance and row.params["ranks"] == 2 for row in rates)
    assert all(row.limit is None and "loopback" in row.limit_source and "gloo" in row.limit_source for row in rates)


@pytest.mark.process
def test_the_rows_of_a_cell_agree_with_each_other(rows):
    by_key = {(r.metric, r.variant, r.dtype, r.params.get("bytes")): r for r in rows}
    for (metric, name, dtype, size), row in by_key.items():
        if metric == "busbw_gb_s" and row.value is not None:
            algbw = by_key["algbw_gb_s", name, dtype, size].value
            assert algbw == pytest.approx(size / by_key["collective_time_s", name, dtype, size].value / 1e9)
            assert row.value == pytest.approx(algbw * ALL_COLLECTIVES[name].bus_factor(2))


@pytest.mark.process
def test_what_does_not_fit_is_a_row_with_the_reason_and_is_not_tried(rows):
    absent = [row for row in rows if row.metric == "busbw_gb_s" and row.value is None]
    assert [(row.variant, row.params["bytes"]) for row in absent] == [("all_reduce", TOO_LARGE)]
    assert "GiB" in absent[0].value_reason


@pytest.mark.process
def test_each_collective_is_fitted_in_the_swept_format(rows):
    for metric in ("latency_s", "recommended_bytes"):
        assert {row.variant for row in rows if row.metric == metric} == set(ALL_COLLECTIVES)
    assert {row.dtype for row in rows if row.metric == "fit_deviation"} == {EXPERIMENT["dtype"]}
    assert all(row.value >= 0 for row in rows if row.metric == "latency_s")


@pytest.mark.process
def test_an_overlaps_rows_are_its_three_times_and_what_they_make(rows):
    beside = [row for row in rows if row.variant == "overlap"]
    seconds = {row.params["what"]: row.value for row in beside if row.metric == "call_time_s"}
    (hidden,) = (row for row in beside if row.metric == "overlap_share")
    (exposed,) = (row for row in beside if row.metric == "share")
    compute, alone, both = (seconds[what] for what in ("products", "all_reduce", "both at once"))
    assert hidden.value == pytest.approx((compute + alone - both) / min(compute, alone)) and hidden.check_error == 0
    assert exposed.value == pytest.approx((both - compute) / alone) and hidden.n >= 30


@pytest.mark.process
def test_gloo_names_no_algorithm_and_the_row_says_so(rows):
    (kernel,) = (row for row in rows if row.params.get("what") == "kernels")
    assert kernel.value is None and "gloo does not report which algorithm" in kernel.value_reason


@pytest.mark.process
def test_peers_are_counted_where_there_are_gpus(rows):
    peers = next(row for row in rows if row.variant == "topology")
    assert peers.value is None and "no GPUs" in peers.value_reason


def overlap(compute: float, collective: float, both: float, noise: float = 0.0) -> CollectiveOverlap:
    random = np.random.default_rng(0)
    timings = (
        Timing(seconds * random.lognormal(0, noise, 40), (seconds,), True, False, "interval", unreadable("made up"))
        for seconds in (compute, collective, both)
    )
    return CollectiveOverlap(1 << 20, "bf16", 4, *timings, Verification("exact", 0.0, 0.0))


@pytest.mark.parametrize(
    ("compute", "collective", "both", "share", "exposed"),
    [
        (10e-3, 4e-3, 10e-3, 1.0, 0.0),  # hidden wholly
        (10e-3, 4e-3, 14e-3, 0.0, 1.0),  # in turns
        (4e-3, 10e-3, 12e-3, 0.5, 0.8),  # the computation is the shorter one
        (10e-3, 4e-3, 16e-3, -0.5, 1.5),  # worse than in turns
    ],
)
def test_shares_are_those_of_the_three_times(compute, collective, both, share, exposed):
    measured = overlap(compute, collective, both)
    assert measured.share.value == pytest.approx(share)
    assert measured.exposed_share.value == pytest.approx(exposed)


def test_noise_is_in_the_interval():
    measured = overlap(10e-3, 4e-3, 12e-3, noise=0.02)
    assert measured.share.ci_low < 0.5 < measured.share.ci_high and measured.share.n == 40
    assert measured.share.ci_high - measured.share.ci_low > 0.01


def test_it_says_all_three_times():
    text = str(overlap(10e-3, 4e-3, 12e-3))
    assert "all_reduce of 1,048,576 bytes, bf16, 4 ranks: 4 ms alone; computation: 10 ms alone; both overlapped: 12 ms" in text
    assert "the overlap hides 50% of the shorter one (95 % CI 50% to 50%)" in text
