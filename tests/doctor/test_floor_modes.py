"""Which devices work at once, and that their processes do: alone, together, and in an all-reduce."""

from dataclasses import asdict, replace

import pytest

from hyperion.doctor import judge
from hyperion.doctor.floors import ALL, MET, MODULE, ONE, measure_on_rank, modes_of
from hyperion.hardware import Floor, detect
from hyperion.processes import Job, run_ranks
from hyperion.results import Row
from tests.doctor.test_floors import ADDRESSES, NODE
from tests.hardware.machines import facts, gpu


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


@pytest.mark.process
def test_processes_measure_alone_and_at_once_and_reduce_together():
    small = [
        Floor("gemm", "fp32", 64, 1e-9, "TFLOPS", "small", "ours"),
        Floor("gemm", "fp64", 64, 1e-9, "TFLOPS", "small", "ours"),
        Floor("all_reduce", "fp32", 1 << 16, 1e-6, "GB/s", "small", "ours", ranks=2),
    ]
    params = {"floors": [asdict(floor) for floor in small], "modes": {ONE: [0], ALL: [0, 1]}, "time_limit_s": 0.05, "heat_s": 0.0}
    job = Job(measure_on_rank, params, timeout_s=100, ranks=2)
    rows = [Row(**entry) for answer in run_ranks(job, on_line=lambda line: None) for entry in answer["rows"]]
    for measured in rows:
        measured.validate()
    assert sorted({(r.params["mode"], r.rank) for r in rows if r.metric != "busbw_gb_s"}) == [(ALL, 0), (ALL, 1), (ONE, 0)]
    for mode, verdict in [(m, v) for m in (ONE, ALL) for v in judge(small[:2], rows, m)] + [("", judge(small, rows)[2])]:
        assert verdict.outcome == MET, (mode, verdict)
