"""Mapped and managed memory: a CPU has a reason; on GPUs, played here by a runtime in Python, calls, values and limits are right.

No GPU runs here: `tensor_at` is replaced, so torch's view of a device pointer is not tested.
"""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from hyperion.chapter import Context, experiment_named
from hyperion.experiments.hardware import mapped_memory
from hyperion.experiments.hardware.mapped_memory import (
    MANAGED,
    MAPPED,
    READ,
    WRITE,
    MappedMemoryOptions,
    RuntimeCallError,
    allocated,
    array_bytes,
    measure_access,
)
from hyperion.hardware import detect, detect_cpu
from hyperion.measure import time_function
from hyperion.results import Row
from hyperion.units import GIB, MIB
from tests.chapter.toy import perform, toy_context
from tests.hardware.machines import facts

MEMORY_GB_S = 6016 / 8 * 6.402  # of an H200: bits of the bus x transfers
NAMES = {
    "cuda": ("cudaHostAlloc", "cudaFreeHost", "cudaMallocManaged", "cudaFree", "cudaHostGetDevicePointer", "cudaGetLastError"),
    "rocm": ("hipHostMalloc", "hipHostFree", "hipMallocManaged", "hipFree", "hipHostGetDevicePointer", "hipGetLastError"),
}


class Runtime:
    """A runtime whose memory is that of this process. It records its calls, and refuses the functions in `refused`."""

    def __init__(self, kind: str, refused: str = ""):
        self.calls, self.buffers, self.refused = [], {}, refused
        host_alloc, host_free, managed, free, device_pointer, last_error = NAMES[kind]
        for name in (host_alloc, managed):
            setattr(self, name, lambda result, size, flags, name=name: self.allocate(name, result, size.value, flags.value))
        for name in (host_free, free):
            setattr(self, name, lambda pointer, name=name: self.free(name, pointer.value))
        setattr(self, device_pointer, lambda result, host, flags: self.translate(device_pointer, result, host.value))
        setattr(self, last_error, lambda: self.calls.append(last_error))

    def allocate(self, name: str, result, size: int, flags: int) -> int:
        self.calls.append((name, size, flags))
        if name == self.refused:
            return 2
        buffer = (ctypes.c_byte * size)()
        result._obj.value = ctypes.addressof(buffer)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return 0

    def translate(self, name: str, result, host: int) -> int:
        self.calls.append(name)
        result._obj.value = host
        return 801 if name == self.refused else 0

    def free(self, name: str, pointer: int) -> None:
        self.calls.append(name)
        del self.buffers[pointer]


def on_host(pointer: int, count: int, device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_int32 * count).from_address(pointer), dtype=torch.int32)


@pytest.fixture
def context(tmp_path):
    return toy_context("mapped_memory", {"mib": 1, "time_limit_s": 0.01}, tmp_path)


@pytest.fixture
def gpu(monkeypatch):
    """Play a GPU of a machine with `free` bytes, whose kernels run on this host."""

    def play(machine: str, runtime: Runtime, free: int = 8 * GIB):
        device = detect(facts(machine))
        monkeypatch.setattr(Context, "device", property(lambda self: device))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (free, device.memory_bytes))
        monkeypatch.setattr(torch.cuda, "device", lambda where: contextlib.nullcontext())
        monkeypatch.setattr(mapped_memory, "load_runtime", lambda device: runtime)
        monkeypatch.setattr(mapped_memory, "tensor_at", on_host)
        monkeypatch.setattr(mapped_memory, "time_function", lambda f, _, **options: time_function(f, detect_cpu(), **options))

    return play


def test_a_cpu_has_no_second_memory_and_says_so(context, tmp_path):
    rows = perform(context, tmp_path).rows
    assert {(row.variant, row.params["access"]) for row in rows} == {(m, a) for m in (MAPPED, MANAGED) for a in (READ, WRITE)}
    assert all(row.value is None and row.value_reason.startswith("unsupported: ") for row in rows)
    assert all("one memory" in forecast.basis for forecast in experiment_named("mapped_memory").forecast(context))


@pytest.mark.parametrize(("machine", "kind"), [("H200", "cuda"), ("MI250X", "rocm")])
def test_each_vendors_functions_are_called_and_everything_is_freed(context, gpu, tmp_path, machine, kind):
    runtime = Runtime(kind)
    gpu(machine, runtime)
    rows = perform(context, tmp_path).rows
    host_alloc, host_free, managed, free, device_pointer, _ = NAMES[kind]
    mapped = [(host_alloc, MIB, 2), device_pointer, host_free]
    assert runtime.calls == 2 * mapped + 2 * [(managed, MIB, 1), free] and runtime.buffers == {}
    assert [(row.params["bytes"], row.check_error) for row in rows] == [(MIB, 0)] * 4
    assert all(row.value > 0 for row in rows)


def test_only_managed_memory_has_the_limit_of_the_device(context, gpu, tmp_path):
    gpu("H200", Runtime("cuda"), free=64 * GIB)
    limits = {row.variant: row.limit_source for row in perform(context, tmp_path).rows}
    assert "belongs to the machine" in limits[MAPPED] and "may stay in the cache" in limits[MANAGED]
    device = detect(facts("H200"))
    assert mapped_memory._limit(device, MANAGED, GIB)[0] == pytest.approx(MEMORY_GB_S / 2)


@pytest.mark.parametrize("refused", ["cudaMallocManaged", "cudaHostGetDevicePointer"])
def test_a_refused_call_is_a_row_with_the_reason_and_stops_nothing_else(context, gpu, tmp_path, refused):
    runtime = Runtime("cuda", refused)
    gpu("H200", runtime)
    rows = perform(context, tmp_path).rows
    other = MAPPED if refused == "cudaMallocManaged" else MANAGED
    assert {row.variant for row in rows if row.value is not None} == {other} and len(rows) == 4
    assert {row.value_reason for row in rows if row.value is None} == {
        f"unavailable: {refused} returned the error {2 if other == MAPPED else 801}"
    }
    # PyTorch would otherwise raise the error in its next call. The memory of the host is freed, too.
    assert runtime.calls.count("cudaGetLastError") == 2 and runtime.buffers == {}


def test_without_the_runtimes_library_the_rows_say_so(context, gpu, tmp_path, monkeypatch):
    original = mapped_memory.load_runtime  # this process has no GPU, so PyTorch has loaded neither library
    gpu("MI250X", Runtime("rocm"))
    monkeypatch.setattr(mapped_memory, "load_runtime", original)
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this PyTorch loads the runtime of a GPU")
    reasons = {row.value_reason for row in perform(context, tmp_path).rows}
    assert reasons == {"unavailable: PyTorch has not loaded libamdhip64 as a shared library"}


def test_an_array_takes_at_most_a_sixteenth_of_the_free_memory():
    options = MappedMemoryOptions(mib=512, time_limit_s=1.0)
    assert array_bytes(options, 100 * GIB, 100 * GIB) == 512 * MIB
    assert array_bytes(options, 160 * MIB + 16, 100 * GIB) == array_bytes(options, 100 * GIB, 160 * MIB + 16) == 10 * MIB
    assert array_bytes(options, 16 * 7, GIB) == 4


@pytest.mark.parametrize("access", [READ, WRITE])
def test_a_device_that_sees_other_numbers_is_refused(access):
    cpu, host = detect_cpu(), torch.empty(1000, dtype=torch.int32)
    assert measure_access(access, host, host, cpu, 0.01)[1].passed
    # Another memory at the address of the device.
    _, verification = measure_access(access, host, torch.zeros(1000, dtype=torch.int32), cpu, 0.01)
    assert not verification.passed and verification.error > 0.99


def test_memory_is_freed_if_its_use_fails(monkeypatch):
    runtime = Runtime("cuda")
    monkeypatch.setattr(mapped_memory, "tensor_at", on_host)
    with pytest.raises(ZeroDivisionError), allocated(MANAGED, 64, detect(facts("H200")), runtime):
        raise ZeroDivisionError
    assert runtime.calls[-1] == "cudaFree" and runtime.buffers == {}
    null = SimpleNamespace(cudaMallocManaged=lambda *_: 0, cudaGetLastError=lambda: 0)
    with pytest.raises(RuntimeCallError, match="cudaMallocManaged"), allocated(MANAGED, 64, detect(facts("H200")), null):
        pass


def test_mapped_memory_is_predicted_from_pinned_copies_and_managed_memory_from_a_stream(context, gpu):
    gpu("H200", Runtime("cuda"))
    context.sizes["mib"] = 512

    def copy(direction: str, memory: str, rate: float | None) -> Row:
        params = {"memory": memory, "bytes": 1}
        reason = "" if rate else "out of memory: no room"
        return context.row(direction, "bandwidth_gb_s", rate, value_reason=reason, params=params)

    inward, outward = "host to device", "device to host"
    copies = [copy(inward, "pinned", 50.0), copy(inward, "pinned", 55.0), copy(inward, "pageable", 60.0)]
    copies += [copy(outward, "pinned", 40.0), copy(outward, "pinned", None)]
    none = experiment_named("mapped_memory").forecast(context)[0]
    assert none.estimate is None and "04_limits_explained" in none.basis
    context.upstream.extend(Row(**{**vars(row), "experiment": "transfers"}) for row in copies)
    read, write, managed, _ = experiment_named("mapped_memory").forecast(context)
    assert (read.estimate, read.low, read.high, write.estimate) == (55, 27.5, 110, 40)
    assert managed.ceiling == pytest.approx(MEMORY_GB_S / 2) and managed.low < managed.estimate < managed.ceiling
