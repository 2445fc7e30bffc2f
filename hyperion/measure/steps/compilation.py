"""torch.compile under measurement: what the first calls cost with empty caches, and what the compiler made of the code."""

import contextlib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device

EAGER = "eager"
COMPILED_MODES = ("default", "max-autotune", "reduce-overhead")
MODES = (EAGER, *COMPILED_MODES)
# With CUDA graphs the call after the compiling one records, and the one after that replays for the first time.
_SETTLED_CALLS = 3
_MOST_CALLS = 20
_MOST_GRAPHS = 32  # of one function: a block of a model meets as many kinds of itself as the model has
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# What a generated wrapper calls: loops that Inductor wrote itself, products from its templates, library routines.
_CALL = re.compile(r"^\s+(?:\w+ = )?(cpp_fused\w*|triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Compilation:
    """What came of compiling a function.

    Args:
        mode: a name of COMPILED_MODES.
        compile_time_s: the first calls, until nothing was compiled any more, beyond what as many settled calls take.
        first_calls_s: seconds of each of them.
        graphs: graphs captured for the shapes first seen; 0 where all of the code fell back to Python.
        break_reasons: why a graph had to end early, each with how often the compiler met it.
        recompiles: why a graph was compiled again, one entry a time.
        kernel_calls: calls in the generated code by kind: "fused", "template" (autotuned products) and "library".
        cuda_graphs: "not asked for", "replayed", or why they were skipped.
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
        """Graphs beyond the one that a function without breaks is captured in, as `torch._dynamo.explain` counts them."""
        return max(self.graphs - 1, 0)


def missing_compiler(device: Device) -> str:
    """What Inductor lacks to generate code for this device, in words; "" when it lacks nothing."""
    if device.kind == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            asked = os.environ.get("CXX", "g++")
            return f"no working C++ compiler {asked!r}: install g++, or name another in CXX"
        return ""
    from torch.utils._triton import has_triton

    return "" if has_triton() else "no Triton for this GPU: install the triton that belongs to this build of PyTorch"


@contextlib.contextmanager
def cold_caches() -> Iterator[Path]:
    """Empty caches for Inductor and Triton in a folder of their own, which goes when the context ends."""
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory(prefix="hyperion-compile-", ignore_cleanup_errors=True) as folder:
        os.environ.update(zip(_CACHES, (folder, str(Path(folder) / "triton")), strict=True))
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def probe_vector_instructions(device: Device, folder: Path) -> None:
    """Let Inductor find out which vector instructions the C++ compiler can emit, and keep the answer in `folder`.

    That takes seconds, is asked once a machine and has nothing to do with the function that is compiled. GPUs skip it.
    """
    if device.kind != "cpu":
        return
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    before = os.environ.get(_CACHES[0])
    os.environ[_CACHES[0]] = str(folder)
    try:
        pick_vec_isa()
    finally:
        if before is None:
            del os.environ[_CACHES[0]]
        else:
            os.environ[_CACHES[0]] = before


def measure_compilation(
    function: Callable, arguments: tuple, mode: str, device: Device, search: dict | None = None
) -> tuple[Callable, Compilation]:
    """Compile a function for the shapes of its arguments with cold caches, and call it until nothing is compiled any more.

    An error of the compiler is raised: it never falls back to eager in silence. Importing the compiler is not counted.

    Args:
        mode: a name of COMPILED_MODES.
        search: settings of Inductor that differ from the mode's own, to narrow what max-autotune tries.

    Raises:
        HyperionError: no such mode, or calls that go on compiling.
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    import torch._inductor.compile_fx  # takes seconds the first time
    from torch._dynamo.utils import counters

    if mode not in COMPILED_MODES:
        remedy = f"use one of {', '.join(COMPILED_MODES)}"
        raise HyperionError(f"{mode!r} is no mode of the compiler", where="measure_compilation", next_step=remedy)
    _forget()
    # torch.compile takes a mode or options, so a narrowed mode is passed as the options that it stands for.
    options = torch._inductor.list_mode_options(mode) | (search or {})
    with cold_caches() as folder, _loud_and_quiet():
        compiled = torch.compile(function, options=options or None, dynamic=False)
        seconds = _first_calls(compiled, arguments, device)
        calls = _kernel_calls(folder)
    return compiled, Compilation(
        mode=mode,
        compile_time_s=sum(seconds) - len(seconds) * min(seconds),
        first_calls_s=tuple(seconds),
        graphs=counters["stats"]["unique_graphs"] - len(_recompiles()),
        break_reasons=_break_reasons(),
        recompiles=tuple(_recompiles()),
        kernel_calls=calls,
        cuda_graphs=_cuda_graphs(options, device),
    )


def measure_first_calls(function: Callable, device: Device) -> float:
    """Seconds that the first calls of something with compiled parts take beyond settled ones, caches cold at first.

    An error of the compiler is raised, and so is a part that would be compiled more than 32 times: PyTorch would go on in
    eager mode there, and say so in its log alone. Importing the compiler is not counted.

    Raises:
        HyperionError: calls that go on compiling.
        torch._dynamo.exc.TorchDynamoException: the compiler failed.
    """
    import torch._inductor.compile_fx  # takes seconds the first time

    _forget()
    settings = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, fail_on_recompile_limit_hit=True)
    with cold_caches(), _loud_and_quiet(), settings:
        seconds = _first_calls(function, (), device)
    return sum(seconds) - len(seconds) * min(seconds)


def count_graph_breaks(function: Callable, arguments: tuple) -> tuple[int, dict[str, int]]:
    """How often capturing one call of a function breaks off, and why. What is captured then runs as it is: nothing is
    compiled, so no compiler is needed.
    """
    from torch._dynamo.utils import counters

    _forget()
    torch.compile(function, backend="eager", dynamic=False)(*arguments)
    return max(counters["stats"]["unique_graphs"] - 1, 0), _break_reasons()


def _forget() -> None:
    """Drop what was captured and counted before."""
    from torch._dynamo.utils import clear_compilation_metrics, counters

    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()


def _first_calls(compiled: Callable, arguments: tuple, device: Device) -> list[float]:
    """Seconds of each call up to and including the last of three in a row that compiled nothing."""
    seconds: list[float] = []
    settled = 0
    while settled < _SETTLED_CALLS:
        if len(seconds) == _MOST_CALLS:
            raise HyperionError(
                f"after {_MOST_CALLS} calls with the same arguments the function is still being compiled",
                next_step="look for what changes from call to call: TORCH_LOGS=recompiles",
            )
        before, started = _frames_compiled(), time.perf_counter()
        compiled(*arguments)
        if device.kind != "cpu":
            torch.cuda.synchronize(device.torch_device)
        seconds.append(time.perf_counter() - started)
        settled = settled + 1 if _frames_compiled() == before else 0
    return seconds


@contextlib.contextmanager
def _loud_and_quiet() -> Iterator[None]:
    """A failure of the compiler is an error, whatever the environment says; autotuning prints no tables."""
    import torch._inductor.config

    with torch._dynamo.config.patch(suppress_errors=False), torch._inductor.config.patch(autotune_num_choices_displayed=0):
        yield


def _frames_compiled() -> int:
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


def _recompiles() -> list[str]:
    from torch._dynamo.utils import get_compilation_metrics

    return [told.recompile_reason for told in get_compilation_metrics() if told.recompile_reason]


def _break_reasons() -> dict[str, int]:
    """The first line of each reason; which of the two counters holds one depends on PyTorch's version and on the reason."""
    from torch._dynamo.utils import counters

    reasons: Counter = Counter()
    for name in ("graph_break", "unimplemented"):
        for reason, times in counters[name].items():
            reasons[str(reason).splitlines()[0]] += times
    return dict(reasons)


def _kernel_calls(folder: Path) -> dict[str, int]:
    """Calls in the wrappers that Inductor wrote into its cache folder."""
    calls: Counter = Counter(fused=0, template=0, library=0)
    for path in folder.rglob("*.py"):
        source = path.read_text()
        if "async_compile.wait(" not in source:  # a kernel of its own, not a wrapper
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
    told = [getattr(metrics, "cudagraph_skip_reason", None) for metrics in get_compilation_metrics()]
    return "skipped: " + (next(filter(None, told), "") or "TORCH_LOGS=cudagraphs says why")
