"""Measuring a passport: the ceilings of this machine within a few minutes, the most telling ones first."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

import hyperion
from hyperion.doctor import FloorReport, judge
from hyperion.doctor.floor_modes import measure_floor
from hyperion.doctor.machine_rows import all_reduce_row, gemm_rows, launch_rows, named, stream_rows, transfer_rows
from hyperion.errors import HyperionError
from hyperion.hardware import Device, Facts, Floor, collect_facts, detect, fingerprint, floors_for
from hyperion.hardware.floors import STREAMS
from hyperion.measure import FORMATS
from hyperion.passport.form import SCHEMA, FloorSection, FloorVerdict, hashes_of, private_text, row_to_json
from hyperion.passport.sizes import gemm_size, stream_bytes
from hyperion.processes import Job, RankError, roll_call, run_ranks, world
from hyperion.results import Row, write_atomically

_LONGEST_CELL_S = 5.0
# A cell warms up for half of its time limit besides, makes its operands and verifies its output.
_CELL_OVERHEAD = 3.0
_TRANSFER_BYTES = 256 << 20
_ALL_REDUCE_BYTES = 1 << 30
_HANG_S = 120.0
_STREAM_DTYPES = ("fp32", "fp64", "fp16", "bf16")


@dataclass(frozen=True)
class Cell:
    """Something to measure: its name, and a function of the seconds it may take that returns rows."""

    name: str
    measure: Callable[[float], list[Row]]
    absent: Row


def measure_passport(time_limit_s: float = 300.0, on_line: Callable[[str], object] = print) -> dict:
    """This machine's passport, as JSON that `write_passport` writes and `verify_passport` holds to its rules.

    Args:
        time_limit_s: about how long it may take; what the time did not suffice for is a row without a value that says so.
        on_line: told what is being measured.
    """
    deadline = time.monotonic() + time_limit_s
    facts = collect_facts()
    device, devices = detect(facts), max(1, len(facts.gpus))
    floors, unknown = floors_for(device, devices)
    rows = _all_reduces(floors, devices, device, on_line)
    cells = _cells(device, floors)
    for done, cell in enumerate(cells):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            reason = f"the time limit of {time_limit_s:g} s ended before it"
            rows.append(replace(cell.absent, value_reason=reason))
            continue
        on_line(f"{done + 1} of {len(cells)}: {cell.name}")
        rows += cell.measure(min(_LONGEST_CELL_S, left_s / (len(cells) - done) / _CELL_OVERHEAD))
    rows = list({row.key: row for row in rows}.values())
    for row in rows:
        row.validate()
    report = FloorReport(device.name, tuple(judge(floors, rows)), unknown)
    return passport_of(facts, device, devices, rows, report)


def write_passport(content: dict, path: Path) -> None:
    """Write a passport whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def passport_name(content: dict) -> str:
    """A file name by device: cpu-2-cores.json, nvidia-h200-x4.json."""
    fingerprint_of, devices = content["fingerprint"], content["devices"]
    if not fingerprint_of["gpus"]:
        return f"cpu-{fingerprint_of['cpu']['cores']}-cores.json"
    words = "".join(letter if letter.isalnum() else " " for letter in content["device"].lower()).split()
    return "-".join(words) + (f"-x{devices}" if devices > 1 else "") + ".json"


def _cells(device: Device, floors: list[Floor]) -> list[Cell]:
    """What to measure, in the order of what it tells."""
    formats = sorted(FORMATS, key=lambda name: name != "fp32")
    streams = [(operation, dtype) for dtype in _STREAM_DTYPES for operation in STREAMS]
    # An all-reduce is of all devices together.
    own = [floor for floor in floors if floor.quantity != "all_reduce"]
    cells = [_gemm_cell(device, formats[0]), *(_stream_cell(device, *stream) for stream in streams[: len(STREAMS)])]
    cells += [_floor_cell(device, floor) for floor in own]
    cells += [_gemm_cell(device, name) for name in formats[1:]]
    cells += _host_cells(device)
    return cells + [_stream_cell(device, *stream) for stream in streams[len(STREAMS) :]]


def _gemm_cell(device: Device, dtype: str) -> Cell:
    absent = _absent("gemm", "torch.mm", "gemm_tflops", dtype)

    def measure(limit_s: float) -> list[Row]:
        supported, how = device.supports(dtype)
        if not supported:
            return [replace(absent, value_reason=f"unsupported: {how}")]
        return gemm_rows(device, dtype, gemm_size(device, dtype, limit_s), cold=True, time_limit_s=limit_s)

    return Cell(f"product in {dtype}", measure, absent)


def _stream_cell(device: Device, operation: str, dtype: str) -> Cell:
    def measure(limit_s: float) -> list[Row]:
        elements = stream_bytes(device, operation, dtype, limit_s) // FORMATS[dtype].bytes
        return stream_rows(device, operation, dtype, elements, time_limit_s=limit_s)

    return Cell(f"{operation} in {dtype}", measure, _absent("bandwidth", operation, "bandwidth_gb_s", dtype))


def _floor_cell(device: Device, floor: Floor) -> Cell:
    variant, experiment = ("torch.mm", "gemm") if floor.quantity == "gemm" else (floor.quantity, "bandwidth")
    absent = replace(_absent(experiment, variant, floor.metric, floor.dtype), params={"floor": floor.size})
    return Cell(
        f"{floor.quantity} in {floor.dtype} as its floor asks for", lambda limit_s: measure_floor(floor, device, limit_s), absent
    )


def _host_cells(device: Device) -> list[Cell]:
    cells = [
        Cell(
            "launches", lambda limit_s: launch_rows(device, time_limit_s=limit_s), _absent("launch", "eager", "launch_time_s", "")
        )
    ]
    for direction in ("host to device", "device to host"):
        for pinned in (True, False):
            absent = replace(_absent("transfer", direction, "bandwidth_gb_s", ""), params={"pinned": pinned})

            def measure(limit_s: float, direction=direction, pinned=pinned) -> list[Row]:
                return transfer_rows(device, direction, _TRANSFER_BYTES, pinned=pinned, time_limit_s=limit_s)

            cells.append(Cell(f"{direction}, {'pinned' if pinned else 'pageable'}", measure, absent))
    return cells


def _absent(experiment: str, variant: str, metric: str, dtype: str) -> Row:
    return Row(notebook="machine", experiment=experiment, variant=variant, metric=metric, value=None, dtype=dtype)


def _all_reduces(floors: list[Floor], devices: int, device: Device, on_line: Callable[[str], object]) -> list[Row]:
    """All-reduces over all GPUs, in processes of their own; on one device a row that says why there is none."""
    row = _absent("collectives", "all_reduce", "busbw_gb_s", "fp32")
    if devices < 2 or device.kind == "cpu":
        return [replace(row, params={"ranks": 1}, value_reason="one device: a collective takes at least two ranks")]
    sizes = {_ALL_REDUCE_BYTES} | {f.size for f in floors if f.quantity == "all_reduce" and f.ranks == devices}
    on_line(f"all-reduce on {devices} devices")
    job = Job(all_reduces_on_rank, {"sizes": sorted(sizes)}, timeout_s=240.0, ranks=devices)
    try:
        answers = run_ranks(job, on_line=on_line)
    except RankError as error:
        return [replace(row, params={"ranks": devices}, value_reason=f"failed: {error.what.splitlines()[0]}")]
    return [Row(**entry) for entry in answers[0]["rows"]]


def all_reduces_on_rank(sizes: list[int]) -> dict:
    """A rank's side; samples are the slowest rank's, so that all ranks have the same rows."""
    here = world()
    with roll_call(_HANG_S) as roll:
        rows = [all_reduce_row(here, roll, "fp32", size, time_limit_s=2.0) for size in sizes]
        roll.step("the end of the measurement")
        torch.distributed.barrier()
    return {"rows": [asdict(row) for row in named(rows)]}


def passport_of(facts: Facts, device: Device, devices: int, rows: list[Row], report: FloorReport) -> dict:
    """The passport of a machine: its facts, what was measured on it, and what became of the floors."""
    verdicts = tuple(
        FloorVerdict(**asdict(v.floor), outcome=v.outcome, measured=None if v.row is None else v.row.value, note=v.note)
        for v in report.verdicts
    )
    content = {
        "schema": SCHEMA,
        "hyperion": hyperion.__version__,
        "created": datetime.now(UTC).date().isoformat(),
        "device": device.name,
        "devices": devices,
        "fingerprint": shareable_fingerprint(facts),
        "ceilings": [row_to_json(row) for row in rows],
        "floors": asdict(FloorSection(report.unknown, verdicts)),
    }
    content = json.loads(json.dumps(content, allow_nan=False))  # tuples become lists, as they will be when read
    if place := private_text(content, "passport"):
        raise HyperionError(f"{place} names a path of this machine", next_step="report this: a passport must not")
    return content | {"hashes": hashes_of(content)}


def shareable_fingerprint(facts: Facts) -> dict:
    """The fingerprint, in which visible devices named otherwise than by numbers (UUIDs) are left out as well."""
    content = fingerprint(facts)
    plain = {name: value for name, value in content["visible_devices"].items() if value.replace(",", "").isdigit()}
    return content | {"visible_devices": plain}
