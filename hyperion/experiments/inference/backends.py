"""Runtimes for a trained model: PyTorch eager, compiled and captured, AOTInductor, ONNX Runtime, and MIGraphX.

`prepare` and `load_package` return a `Prepared`: a function from inputs to logits, the cost of preparing it, and a description of
what it runs.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hyperion.hardware import Device, detect_cpu
from hyperion.measure import FORMATS, matmul_precision
from hyperion.measure.steps.compilation import measure_first_calls, missing_compiler
from hyperion.measure.steps.profiled import is_on_gpu, profiled_events
from hyperion.workloads.onnx_sessions import CPU_PROVIDER, Session, gpu_provider, why_no_gpu_provider, why_no_onnx

EAGER, COMPILED, GRAPH = "eager", "torch.compile", "CUDA graph"
AOTI, ORT_CPU, ORT_GPU, MIGRAPHX = "AOTInductor", "ONNX Runtime CPU", "ONNX Runtime GPU", "MIGraphX"
# These runtimes share one process. AOTInductor runs in a separate process, because loading its package can crash the process.
IN_PROCESS = (EAGER, COMPILED, GRAPH, ORT_CPU, ORT_GPU, MIGRAPHX)
_MOST_EXAMPLES = 4096
# Operators that only change the shape or strides of a tensor, or allocate memory. They launch no kernel.
_NO_WORK = re.compile(
    r"_?(unsafe_)?(view|reshape|transpose|permute|expand|slice|select|narrow|squeeze|unsqueeze|split|unbind|chunk|flatten)\w*"
    r"|t|to|size|alias|detach|lift_fresh|as_strided|contiguous|empty\w*|resize_|result_type|item|_local_scalar_dense|is_nonzero"
    r"|resolve_\w+|_reshape_alias"
)


class Logits(nn.Module):
    """Wrap a model so that its forward method has a single input named `x` and a single output. The exporters require this."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to run in a runtime.

    Attributes:
        call: function from inputs to logits. It returns when the work has been enqueued on the device.
        device: device on which the work runs.
        dtype: number format of weights and activations.
        seconds: a dict that maps the metric of each preparation step to its time in seconds.
        stored_bytes: size of the file that the runtime loads, in bytes. None if there is no such file.
        ran: description of what runs, for example the providers of a session. The rows contain it in their params.
    """

    call: Callable[[Tensor], Tensor]
    device: Device
    dtype: str
    seconds: dict[str, float] = field(default_factory=dict)
    stored_bytes: int | None = None
    ran: dict[str, Any] = field(default_factory=dict)


def why_absent(runtime: str, device: Device) -> str:
    """Return the reason why a runtime cannot be used on this machine, or an empty string if it can."""
    if runtime in (COMPILED, AOTI):
        missing = missing_compiler(device)
        return f"unavailable: {missing}" if missing else ""
    if runtime == GRAPH:
        return "" if device.kind != "cpu" else "unavailable: a CPU has no graphs of kernels"
    if runtime == MIGRAPHX:
        return why_no_migraphx(device)
    if runtime == ORT_CPU:
        return why_no_onnx()
    if runtime == ORT_GPU:
        return why_no_onnx() or why_no_gpu_provider(device)
    return ""


def why_no_migraphx(device: Device, find: Callable[[str], object] = importlib.util.find_spec) -> str:
    """Return the reason why MIGraphX cannot be used, or an empty string if it can.

    MIGraphX is part of ROCm and is not in the Python package index.
    """
    if device.kind != "rocm":
        return f"unavailable: MIGraphX needs an AMD GPU, and this device is of the kind {device.kind}"
    return "" if find("migraphx") else "unavailable: migraphx is not installed; next step: install migraphx with ROCm's packages"


def prepare(
    runtime: str, model: nn.Module, example: Tensor, device: Device, dtype: str, folder: Path, batches: tuple[int, ...] = (1,)
) -> Prepared:
    """Prepare a model for one of the runtimes in `IN_PROCESS`.

    Args:
        runtime: name of the runtime. `why_absent` must return "" for it.
        model: module that maps inputs to logits, in `dtype` on the device. A float32 model cannot be converted here: the method
            `to` would also round buffers that a 16-bit model keeps in float32, for example the frequencies of rotary embeddings.
        example: inputs of at least two examples.
        device: the device.
        dtype: number format for PyTorch's runtimes. ONNX Runtime and MIGraphX run the float32 graph.
        folder: folder for exported files.
        batches: batch sizes for which torch.compile compiles.
    """
    if runtime == EAGER:
        return Prepared(model, device, dtype)
    if runtime == COMPILED:
        compiled = _Compiled(model, batches)
        first = example.to(FORMATS[dtype].storage) if example.is_floating_point() else example
        with torch.no_grad(), matmul_precision(FORMATS[dtype]), _recorded_loops(torch.device(device.torch_device)):
            seconds = measure_first_calls(lambda: compiled(first[:1]), device)
        return Prepared(compiled, device, dtype, {"compile_time_s": seconds}, ran={"compiled_for": list(batches)})
    if runtime == GRAPH:
        return Prepared(_Captured(model), device, dtype)
    path = folder / "model.onnx"
    began = time.perf_counter()
    if not path.exists():
        export_onnx(model, example, path)
    seconds = {"export_time_s": time.perf_counter() - began}
    if runtime == MIGRAPHX:
        return _migraphx(path, device, seconds)
    # Even on a machine with a GPU, the CPU provider is compared with PyTorch on the CPU.
    provider, where = (CPU_PROVIDER, detect_cpu()) if runtime == ORT_CPU else (gpu_provider(device), device)
    session = Session(path, provider)
    return Prepared(session, where, "fp32", seconds, path.stat().st_size, session.ran)


def exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Return the exported graph of a model, for batches of 1 to 4,096 examples."""
    batch = torch.export.Dim("batch", min=1, max=_MOST_EXAMPLES)
    with torch.no_grad():
        return torch.export.export(Logits(model), (example,), dynamic_shapes={"x": {0: batch}})


def export_onnx(model: nn.Module, example: Tensor, path: Path) -> None:
    """Export a float32 model to one ONNX file, for batches of any size."""
    cpu_model, cpu_example = model.to("cpu"), example.to("cpu")
    try:
        program = exported(cpu_model, cpu_example)
        with _without_warnings_of_copies():
            torch.onnx.export(
                program, (), str(path), dynamo=True, external_data=False, input_names=["x"], output_names=["y"], verbose=False
            )
    finally:
        model.to(example.device)


@contextlib.contextmanager
def _without_warnings_of_copies() -> Iterator[None]:
    """Ignore a FutureWarning that PyTorch causes itself, for a class that it still uses, when it copies an exported graph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
        yield


def _recorded_loops(device: torch.device) -> Any:
    """Context manager in which Inductor makes its CPU loops visible to the profiler. Without a profiler, this costs no time.

    On a GPU, the profiler records the kernels without this option, and the option must stay off. It makes PyTorch 2.11 enclose
    each launch in its own scope. The C++ code of a package with a dynamic batch size then does not compile ("was not declared in
    this scope").
    """
    import torch._inductor.config as config

    return config.patch({"cpp.enable_kernel_profile": device.type == "cpu"})


def build_package(model: nn.Module, example: Tensor, path: Path) -> float:
    """Compile a model ahead of time with AOTInductor into a package file, and return the time in seconds."""
    began = time.perf_counter()
    with _recorded_loops(example.device), _without_warnings_of_copies():
        torch._inductor.aoti_compile_and_package(exported(model, example), package_path=str(path))
    return time.perf_counter() - began


def load_package(path: Path, device: Device, dtype: str, build_s: float) -> Prepared:
    """Load a package that `build_package` wrote.

    In some versions of PyTorch, loading a package crashes the process, so call this function in a separate process.
    """
    share_cpp_library()
    began = time.perf_counter()
    package = torch._inductor.aoti_load_package(str(path))
    seconds = {"export_time_s": build_s, "compile_time_s": time.perf_counter() - began}
    return Prepared(package, device, dtype, seconds, path.stat().st_size, {"package": type(package).__name__})


def share_cpp_library() -> None:
    """Make the C++ library of this process visible to shared libraries that are loaded later.

    Some compilers link libstdc++ statically, so a package that they build contains its own copy. When the package is loaded, only
    a part of this copy replaces the library of the process. Loading then fails with std::bad_cast or with SIGSEGV in std::regex.
    If the library of the process is visible, its symbols take precedence over those of the copy.
    """
    with contextlib.suppress(OSError):  # the process uses another C++ library
        ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)


def count_kernels(prepared: Prepared, inputs: Tensor) -> int:
    """Return the number of kernels that one call launches.

    On a CPU, count the innermost operators that compute. An operator that calls other computing operators does not count itself.
    A fused loop of Inductor counts as one operator. For ONNX Runtime, count the nodes that ran.
    """
    if isinstance(prepared.call, Session):
        return len(prepared.call.executed(inputs))
    events = _profiled(prepared, inputs)
    if prepared.device.kind != "cpu":
        return sum(is_on_gpu(event) and not event.name.startswith(("Memcpy", "Memset")) for event in events)
    return sum(_kernels_of(event) for event in events if event.cpu_parent is None)


def _profiled(prepared: Prepared, inputs: Tensor) -> list[Any]:
    """Return the profiler's events for the second call: GPU events if there is a GPU, otherwise CPU events.

    Raises:
        HyperionError: the profiler recorded no kernel on the GPU.
    """
    with torch.no_grad():
        prepared.call(inputs)  # the first call compiles, captures or allocates
        return profiled_events(lambda: prepared.call(inputs), prepared.device)


def _kernels_of(event: Any) -> int:
    """Return the number of computing operators in an event that contain no other computing operator."""
    return sum(map(_kernels_of, event.cpu_children)) or int(_computes(event.name))


def _computes(name: str) -> bool:
    space, _, operator = name.rpartition("::")
    return (space not in ("", "profiler") and not _NO_WORK.fullmatch(operator)) or "cpp_fused" in name


class _Compiled:
    """A model that is compiled for a few batch sizes. Other batches are split into parts of these sizes.

    One compilation takes longer than all other measurements of the model. Without this restriction, each new batch size would
    cause another compilation.
    """

    def __init__(self, model: nn.Module, batches: tuple[int, ...]):
        self._compiled, self._sizes = torch.compile(model, dynamic=False), sorted({1, *batches}, reverse=True)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) in self._sizes:
            return self._compiled(x)
        outputs, first = [], 0
        while first < len(x):
            size = next(size for size in self._sizes if size <= len(x) - first)
            outputs.append(self._compiled(x[first : first + size]))
            first += size
        return torch.cat(outputs)


class _Captured:
    """A model whose kernels are captured once for each input shape and then launched as one graph.

    Each call overwrites the output of the previous call.
    """

    def __init__(self, model: nn.Module):
        self._model, self._graphs = model, {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape not in self._graphs:
            self._graphs[x.shape] = self._capture(x.clone())
        graph, source, output = self._graphs[x.shape]
        source.copy_(x)
        graph.replay()
        return output

    @torch.no_grad()
    def _capture(self, source: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        # Libraries allocate workspaces during the first calls, so do not capture these calls.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._model(source)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._model(source)
        return graph, source, output


def _migraphx(path: Path, device: Device, seconds: dict[str, float], module: ModuleType | None = None) -> Prepared:
    """Prepare an ONNX file for MIGraphX, which compiles it for each input shape.

    Args:
        module: the module `migraphx`. If None, it is imported.
    """
    migraphx: Any = module or importlib.import_module("migraphx")
    programs: dict[tuple[int, ...], Any] = {}

    def call(x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        if shape not in programs:
            programs[shape] = migraphx.parse_onnx(str(path), map_input_dims={"x": list(shape)})
            programs[shape].compile(migraphx.get_target("gpu"))
        (output,) = programs[shape].run({"x": migraphx.argument(x.cpu().numpy())})
        # An argument of MIGraphX has the buffer protocol. Python lists would take longer than the model.
        return torch.from_numpy(np.array(output)).view(*output.get_shape().lens())

    return Prepared(call, device, "fp32", seconds, path.stat().st_size, {"target": "gpu"})
