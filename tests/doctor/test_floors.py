"""Verdicts about floors: on injected devices and rows, on a stored run, and on rows of this CPU.

Then the modes in which devices work at the same time.
"""

from dataclasses import asdict, replace

import pandas as pd
import pytest
from rich.console import Console

from hyperion.doctor import check_floors, floor_frame, floor_table, floors_of, floors_of_run, judge
from hyperion.doctor.floors import (
    ALL,
    IMPOSSIBLE,
    MET,
    MODULE,
    NOT_MEASURED,
    NOT_MET,
    ONE,
    WRONG,
    FloorReport,
    _Together,
    measure_on_rank,
    modes_of,
)
from hyperion.doctor.machine_rows import gemm_rows, stream_rows
from hyperion.errors import HyperionError
from hyperion.hardware import Floor, detect, detect_cpu, fingerprint, floors_for
from hyperion.processes import Job
from hyperion.results import Row, Run
from tests.hardware.machines import facts, gpu

ADDRESSES = ("0000:11:00.0", "0000:14:00.0", "0000:32:00.0", "0000:35:00.0")
NODE = facts(gpus=tuple(gpu("MI250X", pci_address=address) for address in ADDRESSES))
GCD = detect(NODE)
FLOORS = floors_for(GCD, 8)[0]


def row(quantity: str, value: float | None, **changes) -> Row:
    """A row as the chapters store it, of a GCD."""
    experiment, metric, variant, dtype, params = {
        "gemm": ("gemm", "gemm_tflops", "torch.mm", "fp32", {"m": 4000, "n": 4000, "k": 4000, "cache": "hot"}),
        "all_reduce": ("collectives", "busbw_gb_s", "all_reduce", "fp32", {"bytes": 2**33, "ranks": 8}),
    }.get(quantity, ("bandwidth", "bandwidth_gb_s", quantity, "fp64", {"elements": 2**28, "cache": "cold"}))
    fields = {
        "notebook": "n",
        "experiment": experiment,
        "variant": variant,
        "metric": metric,
        "value": value,
        "dtype": dtype,
        "params": params,
        "check": "float64 slice",
        "check_error": 0.0,
        "check_tolerance": 1e-6,
        "limit_source": "sheet",
    }
    if value is not None:
        fields |= {"n": 40, "ci_low": value * 0.99, "ci_high": value * 1.01}
    return Row(**fields | changes)


GOOD = {"copy": 1350, "scale": 1340, "add": 1250, "triad": 1260, "dot": 1400, "gemm": 38, "all_reduce": 140}


def healthy(**changes) -> list[Row]:
    return [row(quantity, value) for quantity, value in (GOOD | changes).items()]


def outcomes(verdicts) -> dict[str, str]:
    return {f"{v.floor.quantity} {v.floor.dtype}": v.outcome for v in verdicts}


def test_a_gcd_that_reaches_all_of_amds_floors_is_healthy():
    report = FloorReport(GCD.name, tuple(judge(FLOORS, healthy())))
    assert [v.outcome for v in report.verdicts if not v.floor.ours] == [MET] * 7
    assert report.healthy and "healthy, all 7 measured floors" in report.conclusion and "1 not measured" in report.conclusion


def test_a_copy_of_1150_is_not_met_and_amds_floor_is_cited():
    report = FloorReport(GCD.name, tuple(judge(FLOORS, healthy(copy=1150))))
    failed = [verdict for verdict in report.verdicts if verdict.outcome == NOT_MET]
    assert [v.floor.quantity for v in failed] == ["copy"] and failed[0].row.value == 1150
    assert failed[0].floor.value == 1200 and "mi250.md" in failed[0].floor.source
    assert report.healthy is False and "NOT healthy, 1 of 7" in report.conclusion
    console = Console(width=200, record=True)
    console.print(floor_table(report))
    text = console.export_text()
    assert "not met" in text and "1150 [1138.5, 1161.5] n=40" in text and "AMD, System acceptance" in text
    frame = floor_frame(report)
    assert len(frame) == len(FLOORS) and frame["measured [95 % CI]"][0] == "1150 [1138.5, 1161.5] n=40"
    assert list(frame["verdict"]) == [v.outcome + (f": {v.note}" if v.note else "") for v in report.verdicts]


@pytest.mark.parametrize("quantity", [*GOOD])
def test_every_floor_can_fail_by_itself(quantity):
    least = next(floor.value for floor in FLOORS if floor.quantity == quantity)
    dtype = "fp64" if quantity not in ("gemm", "all_reduce") else "fp32"
    for value, outcome in ((least * 0.999, NOT_MET), (least, MET)):
        assert outcomes(judge(FLOORS, healthy(**{quantity: value})))[f"{quantity} {dtype}"] == outcome


def test_a_value_above_its_limit_is_a_failed_measurement_and_not_met():
    rows = [row("copy", 1700.0, limit=1638.4)]
    report = FloorReport(GCD.name, tuple(judge(FLOORS[:1], rows)))
    assert report.verdicts[0].outcome == IMPOSSIBLE and report.healthy is False


def test_a_fast_but_wrong_output_is_not_met():
    for error in (1.0, float("nan")):
        report = FloorReport(GCD.name, tuple(judge(FLOORS[:1], [row("copy", 1350.0, check_error=error)])))
        assert report.verdicts[0].outcome == WRONG and report.healthy is False and "1 of 1" in report.conclusion


def test_another_size_or_format_than_the_floors_is_told():
    other = row("copy", 1300.0, dtype="fp32", params={"elements": 500_000_000, "cache": "cold"})
    assert judge(FLOORS[:1], [other])[0].note == "measured at size 500,000,000 and fp32"
    assert judge(FLOORS[5:6], [row("gemm", 35.0, params={"m": 4096, "n": 4096, "k": 4096})])[0].note == "measured at size 4,096"
    assert judge(FLOORS[:1], [row("copy", 1300.0)])[0].note == ""


def test_what_was_not_measured_says_why_and_is_not_healthy():
    verdicts = judge(
        FLOORS,
        [row("copy", None, value_reason="out of memory: 6 GiB"), row("all_reduce", 100.0, params={"bytes": 2**33, "ranks": 4})],
    )
    assert {v.outcome for v in verdicts} == {NOT_MEASURED}
    notes = {v.floor.quantity: v.note for v in verdicts}
    assert notes["copy"] == "out of memory: 6 GiB" and "on 8 devices; measured numbers of devices: 4" in notes["all_reduce"]
    assert "4000" in judge(FLOORS, [])[5].note
    assert FloorReport("x", tuple(verdicts)).healthy is None


@pytest.mark.parametrize(
    "wrong",
    [
        row("copy", 5000.0, params={"elements": 2**28, "cache": "hot"}),
        row("gemm", 99.0, dtype="bf16"),
        row("gemm", 99.0, params={"m": 4000, "n": 4000, "k": 64}),
        row("gemm", 99.0, params={"m": 4000, "n": 4000, "k": 4000, "data": "zeros"}),
        row("all_reduce", 500.0, params={"bytes": 2**20, "ranks": 8}),
    ],
)
def test_rows_under_other_conditions_do_not_count(wrong):
    assert {v.outcome for v in judge([f for f in FLOORS if not f.ours], [wrong])} == {NOT_MEASURED}


def test_the_largest_arrays_count_and_the_slowest_device():
    small = row("copy", 3000.0, params={"elements": 10**6, "cache": "cold"})
    assert outcomes(judge(FLOORS[:1], [small, row("copy", 1150.0)])) == {"copy fp64": NOT_MET}
    of_devices = [row("copy", value, rank=rank) for rank, value in enumerate((1300.0, 1190.0, 1310.0))]
    verdict = judge(FLOORS[:1], of_devices)[0]
    assert (verdict.outcome, verdict.row.rank) == (NOT_MET, 1) and "interval includes the floor" in verdict.note


def test_modes_are_judged_apart():
    rows = [
        row("copy", value, rank=0, params={"elements": 2**28, "cache": "cold", "mode": mode})
        for mode, value in ((ONE, 1300.0), (MODULE, 1100.0))
    ]
    assert [judge(FLOORS[:1], rows, mode)[0].outcome for mode in (ONE, MODULE)] == [MET, NOT_MET]


def test_a_run_is_judged_by_the_device_it_was_measured_on(tmp_path):
    def stored(name: str, copy: float, **information) -> Run:
        run = Run.create(tmp_path / name, {"environment": fingerprint(NODE)} | information)
        rows = [replace(r, notebook="nb", experiment="bandwidth") for r in healthy(copy=copy)]
        run.record("nb", "bandwidth", rows, pd.DataFrame({"x": [0]}), input_hash="h")
        return run

    assert floors_of_run(stored("good", 1300.0)).healthy
    report = floors_of_run(stored("bad", 1150.0))
    assert report.device == "AMD Instinct MI250X/MI250" and report.healthy is False
    assert floors_of(fingerprint(NODE), healthy(copy=1150.0)).healthy is False
    with pytest.raises(HyperionError, match="this run is a replay"):
        floors_of_run(stored("again", 1300.0, profile="replay"))


def test_this_cpu_has_no_floor_and_that_is_said():
    report = check_floors()
    assert report.healthy is None and report.verdicts == () and floor_frame(report).empty
    assert report.conclusion.startswith(f"no floor is known for {detect_cpu().name}")


def test_rows_of_this_cpu_keep_the_rules():
    cpu = detect_cpu()
    rows = [
        *gemm_rows(cpu, "fp32", 64, cold=True, time_limit_s=0.05),
        *gemm_rows(cpu, "tf32", 64, cold=True, time_limit_s=0.05),
        *stream_rows(cpu, "triad", "fp64", 1 << 18, time_limit_s=0.05),
    ]
    for measured in rows:
        measured.validate()
    by_metric = {(r.metric, r.dtype): r for r in rows}
    assert by_metric["gemm_tflops", "fp32"].value > 0 and "unsupported" in by_metric["gemm_tflops", "tf32"].value_reason
    assert by_metric["energy_j_per_tflop", "fp32"].value is None and by_metric["energy_j_per_gb", "fp64"].value_reason


def node(root) -> None:
    """A sysfs tree that shows the four dies of two modules."""
    for address in ADDRESSES:
        (root / "sys/bus/pci/devices" / address).mkdir(parents=True)
        (root / "sys/bus/pci/devices" / address / "device").write_text("0x7408\n")


def test_an_mi250x_works_by_one_die_by_a_module_and_by_all(tmp_path):
    node(tmp_path)
    dies = [detect(NODE, index) for index in range(4)]
    assert modes_of(dies, tmp_path) == {ONE: [0], MODULE: [0, 1], ALL: [0, 1, 2, 3]}
    assert modes_of(dies[:2], tmp_path) == {ONE: [0], MODULE: [0, 1]}
    assert modes_of(dies[:1], tmp_path) == {ONE: [0]}
    # Torch may count them in another order than the bus, and a second die may be the first one visible.
    moved = [replace(die, index=3 - index) for index, die in enumerate(dies)]
    assert modes_of(moved, tmp_path)[MODULE] == [3, 2]
    assert modes_of([replace(dies[1], index=0), replace(dies[2], index=1)], tmp_path) == {ONE: [0], ALL: [0, 1]}


def test_other_gpus_have_no_modules(tmp_path):
    h200 = facts(gpus=(gpu("H200"), gpu("H200")))
    assert modes_of([detect(h200, index) for index in range(2)], tmp_path) == {ONE: [0], ALL: [0, 1]}


def test_a_device_is_kept_busy_until_the_slowest_one_has_measured_and_the_first_rows_count():
    done, calls = iter([False, False, True]), []

    class Barrier:
        def wait(self, name, ranks):
            calls.append(f"wait {name} {ranks}")

        def arrive(self, name):
            calls.append(f"arrive {name}")

        def is_complete(self, name, ranks):
            return next(done)

    def measure():
        calls.append("measure")
        return [f"row {calls.count('measure')}"]

    assert _Together(Barrier(), "all/0", 2).measure_with_others(measure, heat_s=0.0) == ["row 1"]
    assert calls == ["wait all/0/start 2", "measure", "arrive all/0/done", "measure", "measure"]


@pytest.mark.process
def test_processes_measure_alone_and_at_once_and_reduce_together(standing_ranks):
    small = [
        Floor("gemm", "fp32", 64, 1e-9, "TFLOPS", "small", "ours"),
        Floor("gemm", "fp64", 64, 1e-9, "TFLOPS", "small", "ours"),
        Floor("all_reduce", "fp32", 1 << 16, 1e-6, "GB/s", "small", "ours", ranks=2),
    ]
    params = {"floors": [asdict(floor) for floor in small], "modes": {ONE: [0], ALL: [0, 1]}, "time_limit_s": 0.05, "heat_s": 0.0}
    job = Job(measure_on_rank, params, timeout_s=100, ranks=2)
    rows = [Row(**entry) for answer in standing_ranks.run(job) for entry in answer["rows"]]
    for measured in rows:
        measured.validate()
    assert sorted({(r.params["mode"], r.rank) for r in rows if r.metric != "busbw_gb_s"}) == [(ALL, 0), (ALL, 1), (ONE, 0)]
    for mode, verdict in [(m, v) for m in (ONE, ALL) for v in judge(small[:2], rows, m)] + [("", judge(small, rows)[2])]:
        assert verdict.outcome == MET, (mode, verdict)
