"""Measure torch.compile: the compile time with empty caches, and the numbers of graphs, graph breaks and kernel calls."""

import contextlib
import logging
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperion.environ import variables_set
from hyperion.errors import HyperionError
from hyperion.hardware import Device

EAGER = "eager"
COMPILED_MODES = ("default", "max-autotune", "reduce-overhead")
MODES = (EAGER, *COMPILED_MODES)
# Number of calls in a row that must compile nothing. With CUDA graphs, the first call compiles, the second records the graph, and
# the third is the first replay.
_SETTLED_CALLS = 3
_MOST_CALLS = 20
# Maximum number of graphs of one function. A block is compiled once for each of its variants in the model.
_MOST_GRAPHS = 32
_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Matches the calls in the wrapper code of Inductor: fused loops, matrix products from templates, and library routines.
_CALL = re.compile(r"^\s+(?:\w+ = )?(cpp_fused\w*|triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Compilation:
    """The result of compiling a function.

    Args:
        mode: an element of COMPILED_MODES.
        compile_time_s: compile time in seconds: the total time of the first calls, minus the time of the same number of calls
            without compilation.
        first_calls_s: seconds of each of the first calls. The last three of them compile nothing.
        graphs: number of graphs for the first shapes. 0 if the compiler captured no graph, so that all code ran in Python.
        break_reasons: a dict that maps the reason for a graph break to the number of graph breaks for this reason.
        recompiles: the reason for each recompilation.
        kernel_calls: a dict that maps the kind of a kernel call in the generated code to the number of such calls. The kinds are
            "fused", "template" (autotuned matrix products) and "library".
        cuda_graphs: "not asked for", "replayed", or the reason why CUDA graphs were skipped.
    """

    mode: str
    compile_time_s: float
    first_calls_s: tuple[float, ...]
    graphs: int
    break_reasons: dict[str, int]
    recompiles: tuple[str, ...]
    kernel_calls: dict[str, int]
    cuda_graphs: str

    @property
    def graph_breaks(self) -> int:
        """Number of graph breaks: the number of graphs minus 1, as in `torch._dynamo.explain`."""
        return max(self.graphs - 1, 0)


def missing_compiler(device: Device) -> str:
    """Return an error message if Inductor cannot find the compiler that it needs for this device. Otherwise, return ""."""
    if device.kind == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            compiler = os.environ.get("CXX", "g++")
            return f"no working C++ compiler {compiler!r}: install g++, or name another in CXX"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else "no Triton for this GPU: install the triton that belongs to this build of PyTorch"


@contextlib.contextmanager
def cold_caches() -> Iterator[Path]:
    """Context manager in which Inductor and Triton use empty caches in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="hyperion-compile-", ignore_cleanup_errors=True) as folder,
        variables_set({_INDUCTOR_CACHE: folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}),
    ):
        yield Path(folder)


def probe_vector_instructions(device: Device, folder: Path) -> None:
    """Let Inductor detect the vector instructions that the C++ compiler supports, and cache the result in `folder`.

    The detection takes seconds and depends only on the machine, so it must not count as compilation of the measured function.
    Do nothing for a GPU.
    """
    if device.kind != "cpu":
        return
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with variables_set({_INDUCTOR_CACHE: str(folder)}):
        pick_vec_isa()


def measure_compilation(
    function: Callable, arguments: tuple, mode: str, device: Device, search: dict | None = None
) -> tuple[Callable, Compilation]:
    """Compile a function for the shapes of its arguments, starting with empty caches, and measure the compilation.

    The function is called until three calls in a row compile nothing. Compiler errors are raised, so there is no silent fallback
    to eager mode. Importing the compiler is not timed.

    Args:
        function: the function to compile.
        arguments: arguments of every call.
        mode: an element of COMPILED_MODES.
        device: device of the arguments.
        search: Inductor settings that replace the settings of the mode, for example to restrict the search of max-autotune.

    Returns:
        The compiled function and the measurement.

    Raises:
        HyperionError: the mode is unknown, or even after 20 calls, a call still triggers a compilation.
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    import torch._inductor.compile_fx  # not timed: the first import takes seconds
    from torch._dynamo.utils import counters

    if mode not in COMPILED_MODES:
        remedy = f"use one of {', '.join(COMPILED_MODES)}"
        raise HyperionError(f"{mode!r} is not a mode of the compiler", where="measure_compilation", next_step=remedy)
    _forget()
    # torch.compile accepts either a mode or options, so pass the options of the mode with some of them replaced.
    options = torch._inductor.list_mode_options(mode) | (search or {})
    with cold_caches() as folder, _loud_and_quiet():
        compiled = torch.compile(function, options=options or None, dynamic=False)
        seconds = _first_calls(compiled, arguments, device)
        calls = _kernel_calls(folder)
    return compiled, Compilation(
        mode=mode,
        # The fastest of the first calls compiled nothing.
        compile_time_s=sum(seconds) - len(seconds) * min(seconds),
        first_calls_s=tuple(seconds),
        # A recompilation for other shapes creates another graph of the same code, which is not counted.
        graphs=counters["stats"]["unique_graphs"] - _recompiled_graphs(),
        break_reasons=_break_reasons(),
        recompiles=tuple(_recompiles()),
        kernel_calls=calls,
        cuda_graphs=_cuda_graphs(options, device),
    )


def measure_first_calls(function: Callable, device: Device) -> float:
    """Return the compile time in seconds of a function that contains compiled parts, starting with empty caches.

    Compiler errors are raised. An error is also raised if a part would be compiled more than 32 times. By default, PyTorch only
    logs such a part and runs it in eager mode. Importing the compiler is not timed.

    Raises:
        HyperionError: even after 20 calls, a call still triggers a compilation.
        torch._dynamo.exc.TorchDynamoException: the compiler failed, or a part would be compiled more than 32 times.
    """
    import torch._inductor.compile_fx  # not timed: the first import takes seconds

    _forget()
    settings = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, fail_on_recompile_limit_hit=True)
    with cold_caches(), _loud_and_quiet(), settings:
        seconds = _first_calls(function, (), device)
    return sum(seconds) - len(seconds) * min(seconds)


def count_graph_breaks(function: Callable, arguments: tuple) -> tuple[int, dict[str, int]]:
    """Call a function once with torch.compile, and count its graph breaks.

    The captured graphs run in eager mode, so no compiler is needed.

    Returns:
        The number of graph breaks, and a dict that maps the reason for a graph break to the number of graph breaks for this
        reason.
    """
    from torch._dynamo.utils import counters

    _forget()
    # With dynamic=False, every shape is a constant, as in `measure_compilation`.
    torch.compile(function, backend="eager", dynamic=False)(*arguments)
    return max(counters["stats"]["unique_graphs"] - 1, 0), _break_reasons()


def _forget() -> None:
    """Delete all compiled graphs of this process and reset the counters of the compiler."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()


def _first_calls(compiled: Callable, arguments: tuple, device: Device) -> list[float]:
    """Call the function until three calls in a row compile nothing, and return the seconds of each call."""
    seconds: list[float] = []
    settled = 0
    while settled < _SETTLED_CALLS:
        if len(seconds) == _MOST_CALLS:
            raise HyperionError(
                f"after {_MOST_CALLS} calls with the same arguments the function is still being compiled",
                next_step="set TORCH_LOGS=recompiles to find out what changes from call to call",
            )
        before, started = _frames_compiled(), time.perf_counter()
        compiled(*arguments)
        if device.kind != "cpu":
            # Launches are asynchronous. Without synchronisation, the timing would stop before the work is done.
            torch.cuda.synchronize(device.torch_device)
        seconds.append(time.perf_counter() - started)
        settled = settled + 1 if _frames_compiled() == before else 0
    return seconds


@contextlib.contextmanager
def _loud_and_quiet() -> Iterator[None]:
    """Context manager in which compiler errors are always raised and autotuning prints nothing.

    Environment variables that suppress compiler errors have no effect inside the context.
    """
    import torch._inductor.config

    # For each candidate kernel that needs more shared memory than the device has, autotuning logs a traceback and continues.
    autotuning = logging.getLogger("torch._inductor.select_algorithm")
    level = autotuning.level
    autotuning.setLevel(logging.CRITICAL)
    try:
        with torch._dynamo.config.patch(suppress_errors=False), torch._inductor.config.patch(autotune_num_choices_displayed=0):
            yield
    finally:
        autotuning.setLevel(level)


def _frames_compiled() -> int:
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


def _recompiles() -> list[str]:
    from torch._dynamo.utils import get_compilation_metrics

    return [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]


def _recompiled_graphs() -> int:
    """Return the number of graphs that recompilations created. Code without a graph, such as that before a break, has none."""
    from torch._dynamo.utils import get_compilation_metrics

    return sum(bool(metrics.recompile_reason and metrics.graph_op_count) for metrics in get_compilation_metrics())


def _break_reasons() -> dict[str, int]:
    """Return a dict that maps the first line of the reason for a graph break to the number of graph breaks for this reason.

    PyTorch records the reasons in two counters. Which one it uses depends on the version of PyTorch and on the reason.
    """
    from torch._dynamo.utils import counters

    reasons: Counter = Counter()
    for name in ("graph_break", "unimplemented"):
        for reason, times in counters[name].items():
            reasons[str(reason).splitlines()[0]] += times
    return dict(reasons)


def _kernel_calls(folder: Path) -> dict[str, int]:
    """Count the kernel calls in the code that Inductor has written to its cache folder. See `Compilation.kernel_calls`."""
    calls: Counter = Counter(fused=0, template=0, library=0)
    for path in folder.rglob("*.py"):
        source = path.read_text()
        if "async_compile.wait(" not in source:  # the file contains a kernel and no wrapper
            continue
        for name in _CALL.findall(source):
            library = name.startswith(("extern_kernels", "torch.ops"))
            calls["library" if library else "template" if name.startswith("triton_tem") else "fused"] += 1
    return dict(calls)


def _cuda_graphs(options: dict, device: Device) -> str:
    from torch._dynamo.utils import counters, get_compilation_metrics

    if not options.get("triton.cudagraphs"):
        return "not asked for"
    if not counters["inductor"]["cudagraph_skips"]:
        return "replayed"
    if device.kind == "cpu":
        return "skipped: a CPU has no CUDA graphs"
    reasons = [getattr(metrics, "cudagraph_skip_reason", None) for metrics in get_compilation_metrics()]
    return "skipped: " + (next(filter(None, reasons), "") or "TORCH_LOGS=cudagraphs says why")
