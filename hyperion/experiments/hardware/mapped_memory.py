"""How fast does a kernel read and write memory that both the host and the device can access?

Mapped memory is pinned host memory that a kernel accesses over the link between host and device. Managed memory is a single
allocation that both can access. Most drivers move each page of managed memory to the side that uses it, so a kernel that uses
the same pages again finds them in device memory.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import torch
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_stream
from hyperion.chapter.rows import all_samples, bandwidth_limit, out_of_memory_reason, sample_frame, timed_row
from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.measure import DIRECTIONS, Timing, Verification, time_function, transfer_refusal
from hyperion.results import Row
from hyperion.units import MIB

MAPPED, MANAGED = "mapped", "managed"
READ, WRITE = "read", "write"
_CELLS = tuple(product((MAPPED, MANAGED), (READ, WRITE)))
METRIC, DTYPE = "bandwidth_gb_s", "int32"
# Name of the runtime library, prefix of its functions, and names of the functions that allocate and free pinned memory.
_RUNTIMES = {
    "cuda": ("libcudart", "cuda", "cudaHostAlloc", "cudaFreeHost"),
    "rocm": ("libamdhip64", "hip", "hipHostMalloc", "hipHostFree"),
}
_HOST_ALLOC_MAPPED, _MEM_ATTACH_GLOBAL = 2, 1  # flags of both runtimes
# Largest share of the free memory that one array may take. Up to six arrays exist at a time. If managed memory exceeds the free
# memory of the device, the whole machine can hang.
_SHARE_OF_FREE = 1 / 16


class MappedMemoryOptions(Options):
    """Options for the `mapped_memory` experiment.

    Args:
        mib: size in MiB of each array, at most a sixteenth of the free memory of the device and of the host.
        time_limit_s: timing budget in seconds for each kind of memory and access.
    """

    mib: int
    time_limit_s: float


class RuntimeCallError(HyperionError):
    """Raised if the CUDA or HIP runtime is not found, or if one of its functions fails."""


def forecast(context: Context) -> list[Forecast]:
    """Predict the bandwidth of mapped and managed memory.

    Mapped memory is predicted to be as fast as a copy of pinned memory. Managed memory is predicted to be as fast as device
    memory, because its pages are assumed to move to the device.
    """
    if reason := transfer_refusal(context.device):
        return [Forecast(memory, METRIC, None, reason, DTYPE, {"access": access}) for memory, access in _CELLS]
    forecasts = []
    for direction, access in zip(DIRECTIONS, (READ, WRITE), strict=True):
        rows = [row for row in context.upstream if (row.experiment, row.variant) == ("transfers", direction)]
        rates = [row.value for row in rows if row.params.get("memory") == "pinned" and row.value is not None]
        rate, low, high = (max(rates), max(rates) / 2, max(rates) * 2) if rates else (None, None, None)
        basis = f"this run's fastest copy of pinned memory, {direction}; the interval is a factor of 2"
        basis = basis if rates else "this run has no copies of pinned memory (04_limits_explained)"
        forecasts.append(Forecast(MAPPED, METRIC, rate, basis, DTYPE, {"access": access}, low=low, high=high))
    # The rate of a copy counts the bytes read and the bytes written. Here only the bytes of the shared array count: half of them.
    managed = expected_stream(context, "copy", "fp32", 2 * MappedMemoryOptions.of(context).mib * MIB)
    managed = replace(managed, ceiling=None if managed.ceiling is None else managed.ceiling / 2)
    managed = managed.divided_by(2, "half of a copy, if the pages move to the device")
    return forecasts + [managed.forecast(MANAGED, METRIC, DTYPE, {"access": access}) for access in (READ, WRITE)]


def run(context: Context, report: Report) -> Result:
    """Time kernels that read and write each kind of memory, and check that host and device see the same numbers."""
    rows, frames = [], []
    for done, (memory, access) in enumerate(_CELLS):
        report(done, len(_CELLS), f"{memory}, {access}")
        row, new_frames = _measure(context, memory, access)
        rows.append(row)
        frames += new_frames
    report(len(_CELLS), len(_CELLS), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=MappedMemoryOptions, forecast_reads=("bandwidth", "transfers"))


def _measure(context: Context, memory: str, access: str) -> tuple[Row, list[pd.DataFrame]]:
    """Measure one kind of access to one kind of memory. Return its row and samples.

    The bandwidth counts each byte of the shared array once.
    """
    options, device = MappedMemoryOptions.of(context), context.device
    absent: dict = {"dtype": DTYPE, "params": {"access": access}}
    if reason := transfer_refusal(device):
        return context.absent_row(memory, METRIC, f"unsupported: {reason}", **absent), []
    try:
        size = array_bytes(options, torch.cuda.mem_get_info(device.torch_device)[0], psutil.virtual_memory().available)
        with torch.cuda.device(device.torch_device), allocated(memory, size, device, load_runtime(device)) as (host, array):
            timing, verification = measure_access(access, host, array, device, options.time_limit_s)
    except RuntimeCallError as error:
        return context.absent_row(memory, METRIC, f"unavailable: {error.what}", **absent), []
    except torch.OutOfMemoryError as error:
        return context.absent_row(memory, METRIC, out_of_memory_reason(error), **absent), []
    params = {"access": access, "bytes": size, "cache": "cold"}
    rate = timing.estimate.map(lambda seconds: size / seconds / 1e9)
    limit = _limit(device, memory, size)
    row = timed_row(context, memory, METRIC, rate, timing, verification, limit, dtype=DTYPE, params=params)
    return row, [sample_frame(timing, memory, DTYPE, params)]


def _limit(device: Device, memory: str, size: int) -> tuple[float | None, str]:
    if memory == MAPPED:
        return None, "no limit: no datasheet value: the link to the host belongs to the machine, not to the device"
    limit, source = bandwidth_limit(device, 2 * size)
    # The kernel also reads or writes an array of the same size in device memory, so the shared array gets half of the bandwidth.
    return (None, source) if limit is None else (limit / 2, f"half of {source}")


def array_bytes(options: MappedMemoryOptions, device_free: int, host_free: int) -> int:
    """Return the size of an array in bytes, a multiple of 4. The free memory in bytes of device and host limits the size."""
    return int(min(options.mib * MIB, device_free * _SHARE_OF_FREE, host_free * _SHARE_OF_FREE)) // 4 * 4


def measure_access(access: str, host: Tensor, array: Tensor, device: Device, time_limit_s: float) -> tuple[Timing, Verification]:
    """Time a kernel that adds 1 to each number, and check the result.

    The kernel reads one array and writes another. One of them is the shared array, and the other is in device memory.

    Args:
        access: READ if the kernel reads from the shared array, WRITE if it writes to it.
        host, array: int32 tensors over the same memory, on the CPU and on the device.
        device: the device.
        time_limit_s: see `time_function`.
    """
    numbers = torch.arange(host.numel(), dtype=torch.int32)
    host.copy_(numbers if access == READ else torch.zeros_like(numbers))
    source, target = (array, torch.zeros_like(array)) if access == READ else (numbers.to(array.device), array)
    timing = time_function(lambda: torch.add(source, 1, out=target), device, time_limit_s=time_limit_s)
    # Some devices do not allow the host to access managed memory while kernels run. The timing ends with a synchronisation.
    result = target.cpu() if access == READ else host
    wrong = torch.count_nonzero(result != numbers + 1).item() / numbers.numel()
    return timing, Verification("host and device see the same numbers", wrong, 0.0)


@contextlib.contextmanager
def allocated(memory: str, size: int, device: Device, library: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Allocate mapped or managed memory, and free it when the `with` block ends.

    Args:
        memory: MAPPED or MANAGED.
        size: number of bytes, a multiple of 4.
        device: the current device, a GPU.
        library: the loaded runtime of CUDA or HIP.

    Yields:
        Two int32 tensors over the same memory: one on the CPU, and one on the device.

    Raises:
        RuntimeCallError: the runtime refuses the allocation.
    """
    _, prefix, host_alloc, host_free = _RUNTIMES[device.kind]
    allocate, free, flag = host_alloc, host_free, _HOST_ALLOC_MAPPED
    if memory == MANAGED:
        allocate, free, flag = f"{prefix}MallocManaged", f"{prefix}Free", _MEM_ATTACH_GLOBAL
    host = there = _pointer_of(library, prefix, allocate, ctypes.c_size_t(size), ctypes.c_uint(flag))
    try:
        if memory == MAPPED:
            there = _pointer_of(library, prefix, f"{prefix}HostGetDevicePointer", ctypes.c_void_p(host), ctypes.c_uint(0))
        bytes_of_host = (ctypes.c_byte * size).from_address(host)
        yield torch.frombuffer(bytes_of_host, dtype=torch.int32), tensor_at(there, size // 4, device)
    finally:
        getattr(library, free)(ctypes.c_void_p(host))


def _pointer_of(library: Any, prefix: str, function: str, *arguments: Any) -> int:
    """Call a function of the runtime that writes a pointer to its first argument, and return this pointer."""
    pointer = ctypes.c_void_p()
    code = getattr(library, function)(ctypes.byref(pointer), *arguments)
    if code == 0 and pointer.value:
        return pointer.value
    getattr(library, f"{prefix}GetLastError")()  # otherwise PyTorch would report this error in its next call
    raise RuntimeCallError(f"{function} returned the error {code}", next_step=f"look it up in the enumeration {prefix}Error_t")


def load_runtime(device: Device) -> ctypes.CDLL:
    """Return the CUDA or HIP runtime library that PyTorch has loaded into this process.

    Raises:
        RuntimeCallError: PyTorch has not loaded it as a shared library.
    """
    name = _RUNTIMES[device.kind][0]
    paths = [mapping.path for mapping in psutil.Process().memory_maps() if Path(mapping.path).name.startswith(name)]
    if not paths:
        raise RuntimeCallError(f"PyTorch has not loaded {name} as a shared library", next_step="use an official wheel of PyTorch")
    return ctypes.CDLL(paths[0])


def tensor_at(pointer: int, count: int, device: Device) -> Tensor:
    """Return a tensor of `count` int32 numbers that uses the memory at the address `pointer`, which the device can access."""
    interface = {"shape": (count,), "typestr": "<i4", "data": (pointer, False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device.torch_device)
