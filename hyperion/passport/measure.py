"""Measure the ceilings of this machine within a few minutes, and return them as a passport.

The ceilings are the measured rates of matrix products, memory, launches, copies and all-reduces. The most important ceilings are
measured first.
"""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

import hyperion
from hyperion.chapter.rows import CACHE_MULTIPLE
from hyperion.doctor import FloorReport, judge
from hyperion.doctor.floors import measure_floor
from hyperion.doctor.machine_rows import all_reduce_row, gemm_rows, launch_rows, stream_rows, transfer_rows, with_params
from hyperion.errors import HyperionError
from hyperion.hardware import Device, Floor, MachineFacts, collect_facts, detect, fingerprint, floors_for
from hyperion.hardware.floors import STREAMS
from hyperion.measure import FORMATS, Gemm, matmul_precision
from hyperion.measure.traffic.bandwidth import OPERATIONS, REDUCTIONS
from hyperion.passport.verify import SCHEMA, FloorSection, FloorVerdict, hashes_of, private_text
from hyperion.processes import Job, RankError, roll_call, run_ranks, world
from hyperion.results import Row, write_atomically
from hyperion.results.rows import COLUMNS

_LONGEST_MEASUREMENT_S = 5.0
# Duration of a measurement divided by its time limit. A measurement takes longer than its limit, because it also warms up,
# creates its operands and verifies its output. The warm-up alone can take half of the time limit.
_OVERHEAD = 3.0
_TRANSFER_BYTES = 256 << 20
_ALL_REDUCE_BYTES = 1 << 30
_HANG_S = 120.0
_LARGEST_GEMM, _SMALLEST_GEMM = 8192, 256
# Approximate duration of a measurement divided by the duration of one call. A measurement consists of the warm-up, thirty
# samples, and cache flushes that take about as long as a call.
_CALLS = 45
_PROBES = 3
_LARGEST_STREAM, _SMALLEST_STREAM = 1 << 30, 8 << 20
_STREAM_DTYPES = ("fp32", "fp64", "fp16", "bf16")


@dataclass(frozen=True)
class PlannedMeasurement:
    """A measurement for a passport. It gets a share of the remaining time.

    Args:
        name: name of the measurement in progress lines.
        measure: function that takes a time limit in seconds and returns rows.
        absent: a row without a value, which is stored with the reason if no time is left for the measurement.
    """

    name: str
    measure: Callable[[float], list[Row]]
    absent: Row


def measure_passport(time_limit_s: float = 300.0, on_line: Callable[[str], object] = print) -> dict:
    """Measure this machine, and return its passport as JSON values for `write_passport`.

    Args:
        time_limit_s: approximate duration in seconds. If no time is left for a measurement, its row has no value and states the
            reason.
        on_line: function that is called with one line of text about each measurement.
    """
    deadline = time.monotonic() + time_limit_s
    facts = collect_facts()
    device, devices = detect(facts), max(1, len(facts.gpus))
    floors, unknown = floors_for(device, devices)
    # The all-reduces come first, in their own processes, before this process allocates memory on a GPU.
    rows = _all_reduces(floors, devices, device, on_line)
    plan = _planned(device, floors)
    for done, planned in enumerate(plan):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            reason = f"the time limit of {time_limit_s:g} s ended before it"
            rows.append(replace(planned.absent, value_reason=reason))
            continue
        on_line(f"{done + 1} of {len(plan)}: {planned.name}")
        # The remaining time is shared equally among the remaining measurements.
        rows += planned.measure(min(_LONGEST_MEASUREMENT_S, left_s / (len(plan) - done) / _OVERHEAD))
    # A floor may have the same size as a planned measurement. Of two rows with the same key, the later one is kept.
    rows = list({row.key: row for row in rows}.values())
    for row in rows:
        row.validate()
    report = FloorReport(device.name, tuple(judge(floors, rows)), unknown)
    return passport_of(facts, device, devices, rows, report)


def write_passport(content: dict, path: Path) -> None:
    """Write a passport to a new file. Missing parent folders are created.

    Raises:
        HyperionError: there is already a file at `path`. It is not changed.
    """
    if path.exists():
        raise HyperionError("there is already a file with this name", where=path, next_step="choose another name: --output FILE")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def passport_name(content: dict) -> str:
    """Return the file name of a passport, which names the device, such as cpu-2-cores.json or nvidia-h200-x4.json."""
    fingerprint_of, devices = content["fingerprint"], content["devices"]
    if not fingerprint_of["gpus"]:
        return f"cpu-{fingerprint_of['cpu']['cores']}-cores.json"
    words = "".join(letter if letter.isalnum() else " " for letter in content["device"].lower()).split()
    return "-".join(words) + (f"-x{devices}" if devices > 1 else "") + ".json"


def new_passport_path(content: dict, folder: Path) -> Path:
    """Return a path in `folder` for a new passport. If the name is already used, -2, -3 and so on is appended to it."""
    first = folder / passport_name(content)
    numbered = (first.with_stem(f"{first.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], numbered) if not path.exists())


def not_measured(content: dict) -> list[str]:
    """Return lines of text about the ceilings without a value in a passport.

    Each line contains a reason and the names of all ceilings to which it applies.
    """
    missing: dict[str, dict[str, None]] = {}
    for row in content["ceilings"]:
        if row["value"] is None:
            name = " ".join(filter(None, (row["experiment"], row["variant"], row["dtype"])))
            missing.setdefault(row["value_reason"], {})[name] = None
    return [f"not measured, because {reason}: {', '.join(names)}" for reason, names in missing.items()]


def passport_of(facts: MachineFacts, device: Device, devices: int, rows: list[Row], report: FloorReport) -> dict:
    """Return the passport of a machine as JSON values.

    Args:
        facts: facts about the machine.
        device: its first device.
        devices: number of devices.
        rows: rows that were measured on the machine.
        report: the results for the floors of the device.
    """
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
        "fingerprint": fingerprint(facts),
        "ceilings": [{column: getattr(row, column) for column in COLUMNS} for row in rows],
        "floors": asdict(FloorSection(report.unknown, verdicts)),
    }
    content = json.loads(json.dumps(content, allow_nan=False))  # tuples become lists, as in a passport that is read from a file
    if place := private_text(content, "passport"):
        raise HyperionError(
            f"{place} contains a path of this machine", next_step="report this error, because a passport must not contain paths"
        )
    return content | {"hashes": hashes_of(content)}


def _planned(device: Device, floors: list[Floor]) -> list[PlannedMeasurement]:
    """Return the planned measurements of a passport, the most important ones first."""
    # False sorts before True, so fp32 comes first, and the others keep their order.
    formats = sorted(FORMATS, key=lambda name: name != "fp32")
    streams = [(operation, dtype) for dtype in _STREAM_DTYPES for operation in STREAMS]
    # All-reduces use all devices. They are measured separately, by `_all_reduces`.
    own = [floor for floor in floors if floor.quantity != "all_reduce"]
    plan = [_planned_gemm(device, formats[0]), *(_planned_stream(device, *stream) for stream in streams[: len(STREAMS)])]
    plan += [_planned_floor(device, floor) for floor in own]
    plan += [_planned_gemm(device, name) for name in formats[1:]]
    plan += _planned_host(device)
    return plan + [_planned_stream(device, *stream) for stream in streams[len(STREAMS) :]]


def _planned_gemm(device: Device, dtype: str) -> PlannedMeasurement:
    absent = _absent("gemm", "torch.mm", "gemm_tflops", dtype)

    def measure(limit_s: float) -> list[Row]:
        supported, how = device.supports(dtype)
        if not supported:
            return [replace(absent, value_reason=f"unsupported: {how}")]
        return gemm_rows(device, dtype, gemm_size(device, dtype, limit_s), cold=True, time_limit_s=limit_s)

    return PlannedMeasurement(f"matrix product in {dtype}", measure, absent)


def _planned_stream(device: Device, operation: str, dtype: str) -> PlannedMeasurement:
    def measure(limit_s: float) -> list[Row]:
        elements = stream_bytes(device, operation, dtype, limit_s) // FORMATS[dtype].bytes
        return stream_rows(device, operation, dtype, elements, time_limit_s=limit_s)

    return PlannedMeasurement(f"{operation} in {dtype}", measure, _absent("bandwidth", operation, "bandwidth_gb_s", dtype))


def _planned_floor(device: Device, floor: Floor) -> PlannedMeasurement:
    variant, experiment = ("torch.mm", "gemm") if floor.quantity == "gemm" else (floor.quantity, "bandwidth")
    absent = replace(_absent(experiment, variant, floor.metric, floor.dtype), params={"floor": floor.size})
    return PlannedMeasurement(
        f"{floor.quantity} in {floor.dtype} for its floor", lambda limit_s: measure_floor(floor, device, limit_s), absent
    )


def _planned_host(device: Device) -> list[PlannedMeasurement]:
    plan = [
        PlannedMeasurement(
            "launches", lambda limit_s: launch_rows(device, time_limit_s=limit_s), _absent("launch", "eager", "launch_time_s", "")
        )
    ]
    for direction in ("host to device", "device to host"):
        for pinned in (True, False):
            absent = replace(_absent("transfer", direction, "bandwidth_gb_s", ""), params={"pinned": pinned})

            # Default arguments bind the values of this iteration. A closure would use those of the last one.
            def measure(limit_s: float, direction=direction, pinned=pinned) -> list[Row]:
                return transfer_rows(device, direction, _TRANSFER_BYTES, pinned=pinned, time_limit_s=limit_s)

            plan.append(PlannedMeasurement(f"{direction}, {'pinned' if pinned else 'pageable'}", measure, absent))
    return plan


def _absent(experiment: str, variant: str, metric: str, dtype: str) -> Row:
    return Row(notebook="machine", experiment=experiment, variant=variant, metric=metric, value=None, dtype=dtype)


def _all_reduces(floors: list[Floor], devices: int, device: Device, on_line: Callable[[str], object]) -> list[Row]:
    """Measure all-reduces over all GPUs in separate processes. With one device, return a row with the reason and no value."""
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
    """Measure all-reduces of these sizes in bytes. Every rank must call this function.

    A sample is the time of the slowest rank, so all ranks return the same rows.
    """
    here = world()
    with roll_call(_HANG_S) as roll:
        rows = [all_reduce_row(here, roll, "fp32", size, time_limit_s=2.0) for size in sizes]
        roll.step("the end of the measurement")
        torch.distributed.barrier()
    return {"rows": [asdict(row) for row in with_params(rows)]}


def gemm_size(device: Device, dtype: str, limit_s: float) -> int:
    """Return the size M = N = K of the matrix product to measure, a power of two from 256 to 8192.

    This is the largest size for which the measurement takes at most `limit_s` seconds, and the matrices occupy at most an eighth
    of the memory.
    """
    size = _SMALLEST_GEMM
    while size < _LARGEST_GEMM:
        doubled = 2 * size
        needed_bytes = 3 * doubled**2 * max(4, FORMATS[dtype].bytes)
        # Doubling the size multiplies the work by eight.
        if needed_bytes > device.memory_bytes / 8 or 8 * _CALLS * _gemm_s(device, dtype, size) > limit_s:
            break
        size = doubled
    return size


def stream_bytes(device: Device, operation: str, dtype: str, limit_s: float) -> int:
    """Return the size in bytes of each array that a memory stream reads or writes.

    The array is larger than the caches, or smaller if measuring such an array would take longer than `limit_s` seconds.
    """
    cache = device.last_level_cache_bytes or 0
    # A copy's traffic is twice the size of an array. If more of it stayed in the cache, the copy would measure the cache.
    array_bytes = max(CACHE_MULTIPLE * cache // 2, _LARGEST_STREAM if device.kind != "cpu" else 64 << 20)
    array_bytes = min(array_bytes, device.memory_bytes // 16)
    while array_bytes > _SMALLEST_STREAM and _CALLS * _stream_s(device, operation, dtype, array_bytes) > limit_s:
        array_bytes //= 2
    return array_bytes // 4096 * 4096


def _gemm_s(device: Device, dtype: str, size: int) -> float:
    try:
        product = Gemm(size, size, size, dtype, device)
        with matmul_precision(FORMATS[dtype]):
            return _call_s(product, device)
    except (HyperionError, RuntimeError):
        return float("inf")  # prevents larger sizes from being tried; the measurement itself will report the reason


def _stream_s(device: Device, operation: str, dtype: str, count: int) -> float:
    # Time an eighth of the array. For arrays larger than the caches, the time is proportional to the size.
    chosen, storage = (OPERATIONS | REDUCTIONS)[operation], FORMATS[dtype].storage
    options = {"dtype": storage, "device": device.torch_device}
    inputs = [torch.zeros(count // 8 // storage.itemsize, **options) for _ in range(chosen.inputs)]
    output = torch.empty_like(inputs[0]) if operation in OPERATIONS else torch.empty((), **options)
    return 8 * _call_s(lambda: chosen.run(output, *inputs), device)


def _call_s(function: Callable[[], object], device: Device) -> float:
    """Time a few calls, and return the time of the fastest call in seconds.

    The minimum is used, because other processes may slow down some calls. The first call is not timed, because it loads libraries
    and allocates memory.
    """
    synchronize = (lambda: None) if device.kind == "cpu" else lambda: torch.cuda.synchronize(device.torch_device)
    function()
    synchronize()
    fastest = float("inf")
    for _ in range(_PROBES):
        started = time.perf_counter()
        function()
        synchronize()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
