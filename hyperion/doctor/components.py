"""The components of the stack by layer, the tests of each component, and the process that runs the tests.

Each test runs in a worker process, so that a package that crashes or hangs during its import does not stop the other tests.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hyperion.doctor import checks, probes
from hyperion.doctor.checks import CheckResult
from hyperion.doctor.floors import MET, NOT_MEASURED, check_floors
from hyperion.doctor.numerics import check_numerics
from hyperion.doctor.report import LEVELS, Item, Layer, Level
from hyperion.hardware import Device, MachineFacts, collect_facts, detect
from hyperion.processes.isolated import IsolatedError, IsolatedProcess
from hyperion.units import GIB

TIMEOUT_S = 90.0
_FLOORS = "not run: use `hyperion doctor --floors`"
_NO_FLOOR = "no least rate is published for this component"
_NO_PROBE = "imported only: no test compares its results"


@dataclass(frozen=True)
class Check:
    """One test of a component.

    Args:
        tested: what the test does.
        run: function that runs the test. It must be picklable.
    """

    tested: str
    run: Callable[[], CheckResult]


@dataclass(frozen=True)
class Component:
    """One component with its tests.

    Args:
        layer: its layer.
        name: its name.
        tests: one test for each level that has one.
        untested: for each level without a test, the reason why there is none.
    """

    layer: Layer
    name: str
    tests: dict[Level, Check]
    untested: dict[Level, str] = field(default_factory=dict)


def components(facts: MachineFacts, numerics: bool = False, floors: bool = False) -> list[Component]:
    """Return the components in the order of the layers, with every device of the machine.

    Args:
        facts: facts about the machine.
        numerics: whether the tests of training numbers are included. They take a minute or more.
        floors: whether the tests of rates are included.
    """
    device = detect(facts)
    devices = [detect(facts, index) for index in range(len(facts.gpus))] or [device]
    count, where = len(facts.gpus), device.torch_device
    found = [_device(one, numerics, floors) for one in devices]
    found += [
        Component(
            "hardware",
            "peer copies",
            {"correctness": Check("1 MiB between every two GPUs, all bytes", functools.partial(probes.probe_peers, count))},
            {"import": "part of every device"},
        ),
        _single("system", "python", "import", "version against the oldest that Hyperion supports", checks.check_python),
        _single("system", "driver and devices", "import", "devices that torch can open", checks.check_accelerator),
        _single("system", "results folder", "correctness", "a file is written", checks.check_results_folder),
        _single("system", "disk space", "import", "free space against that of a full run", checks.check_disk_space),
        _single("system", "caches", "correctness", "a file is written in each cache folder", checks.check_caches),
        Component(
            "framework",
            "PyTorch",
            {
                "import": Check("build against driver and GPU", checks.check_torch_build),
                "correctness": Check("50 training steps, closed form", functools.partial(probes.probe_training, where)),
            },
        ),
        Component(
            "framework",
            "torchvision",
            {
                "import": Check("import", checks.check_torchvision),
                "correctness": Check("flip and normalise by value", probes.probe_torchvision),
            },
        ),
        _package("framework", "Triton", "triton", ("triton", "pytorch-triton-rocm"), "a kernel by value", probes.probe_triton),
        _package(
            "framework",
            "ONNX Runtime",
            "onnxruntime",
            ("onnxruntime", "onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-migraphx"),
            "MatMul and Relu by value",
            probes.probe_onnxruntime,
        ),
        _package("framework", "MIGraphX", "migraphx", ("migraphx",)),
        _package(
            "framework", "JAX", "jax", ("jax",), "a product against float64", functools.partial(probes.probe_product, "jax")
        ),
        _package(
            "framework",
            "TensorFlow",
            "tensorflow",
            ("tensorflow", "tensorflow-cpu", "tensorflow-rocm"),
            "a product against float64",
            functools.partial(probes.probe_product, "tensorflow"),
        ),
        _package(
            "model",
            "transformers",
            "transformers",
            ("transformers",),
            "causality of a small Llama",
            probes.probe_transformers,
            required=True,
        ),
        _package("model", "peft", "peft", ("peft",), "a merged LoRA adapter by value", probes.probe_peft, required=True),
        _single(
            "model",
            "attention",
            "correctness",
            "output and gradients against float64",
            functools.partial(probes.probe_attention, where),
        ),
        _package("model", "Megatron-LM", "megatron.core", ("megatron-core",)),
        _package("model", "vLLM", "vllm", ("vllm",)),
        _package("model", "DeepSpeed", "deepspeed", ("deepspeed",)),
        _collectives(count),
        Component(
            "communication",
            "MPI",
            {"correctness": Check("allreduce, bcast, scatter, gather under mpirun -n 2", probes.probe_mpi)},
            {"import": "the correctness test finds mpirun and mpi4py"},
        ),
        _package("extension", "Flash Attention", "flash_attn", ("flash-attn", "flash_attn")),
        _package(
            "extension",
            "bitsandbytes",
            "bitsandbytes",
            ("bitsandbytes",),
            "NF4 and back, error and bytes",
            functools.partial(probes.probe_bitsandbytes, where),
        ),
        _single(
            "extension",
            "NVML" if device.kind == "cuda" else "ROCm SMI" if device.kind == "rocm" else "CPU telemetry",
            "correctness",
            "one reading, each value within physical bounds",
            functools.partial(probes.probe_telemetry, device),
        ),
        _single("extension", "PyTorch Profiler", "correctness", "three products in table and trace", probes.probe_profiler),
        _package(
            "extension", "TensorBoard", "tensorboard", ("tensorboard",), "values written and read back", probes.probe_tensorboard
        ),
        _package("extension", "Weights & Biases", "wandb", ("wandb",)),
        _single("extension", "notebook kernel", "correctness", "a kernel starts in this Python", checks.check_notebook_kernel),
        _single("extension", "data source", "import", "mirror or cache holds data", checks.check_data_source),
    ]
    return found


def _device(device: Device, numerics: bool, floors: bool) -> Component:
    tests: dict[Level, Check] = {
        "import": Check("properties that torch reports", functools.partial(_describe, device)),
        "correctness": Check(
            "1 MiB to the device and back, and a product against float64",
            functools.partial(checks.check_arithmetic, device.torch_device),
        ),
    }
    if numerics:
        tests["correctness"] = Check(
            "copies, a product, and two training runs in every precision against float64", functools.partial(_numbers, device)
        )
    if floors:
        tests["floor"] = Check("rates against the least rates of a healthy device", _floors)
    return Component("hardware", f"{device.torch_device}: {device.name}", tests, {} if floors else {"floor": _FLOORS})


def _describe(device: Device) -> CheckResult:
    evidence = f"{device.arch}, {device.compute_units} units, {device.memory_bytes / GIB:.0f} GiB"
    return CheckResult("device", "ok", evidence, version=device.arch)


def _numbers(device: Device) -> CheckResult:
    arithmetic, report = checks.check_arithmetic(device.torch_device), check_numerics(device)
    if arithmetic.status == "ok" and report.passed:
        return CheckResult("numerics", "ok", f"{arithmetic.evidence}; {report.conclusion}")
    remedy = arithmetic.remedy or "do not use results of this device: run `hyperion doctor --numerics` for the wrong tensor"
    return CheckResult("numerics", "fail", report.conclusion if arithmetic.status == "ok" else arithmetic.evidence, remedy)


# All devices are measured in one call, because some floors hold while all devices work.
@functools.cache
def _floors() -> CheckResult:
    report = check_floors(on_line=lambda line: None)
    if report.healthy is None:
        return CheckResult("floors", "skip", report.conclusion)
    if report.healthy:
        return CheckResult("floors", "ok", report.conclusion)
    missed = [v for v in report.verdicts if v.outcome not in (MET, NOT_MEASURED)]
    evidence = "; ".join(f"{v.floor.quantity} {v.floor.dtype}: {v.outcome}" for v in missed)
    return CheckResult(
        "floors", "fail", f"{report.conclusion}: {evidence}", "see `hyperion doctor --floors`, then cool the device"
    )


def _single(layer: Layer, name: str, level: Level, tested: str, run: Callable[[], CheckResult]) -> Component:
    other: Level = "correctness" if level == "import" else "import"
    why = "the import test covers this" if level == "import" else "the correctness test covers this"
    return Component(layer, name, {level: Check(tested, run)}, {other: why})


def _package(
    layer: Layer,
    name: str,
    module: str,
    packages: tuple[str, ...],
    tested: str = "",
    run: Callable[[], CheckResult] | None = None,
    required: bool = False,
) -> Component:
    load = Check(f"import {module}", functools.partial(probes.probe_import, module, packages, required))
    tests: dict[Level, Check] = {"import": load}
    if run is not None:
        tests["correctness"] = Check(tested, run)
    return Component(layer, name, tests, {} if run else {"correctness": _NO_PROBE})


def _collectives(count: int) -> Component:
    backend = "nccl" if count else "gloo"
    run = functools.partial(probes.probe_collectives, count or 2, backend)
    tested = "all-reduce, all-gather and broadcast by value, one process for each rank"
    return _single("communication", "NCCL or RCCL" if count else "gloo", "correctness", tested, run)


def run_components(chosen: Iterable[Component], workers: int = 2, timeout_s: float = TIMEOUT_S) -> list[Item]:
    """Run the tests of all components, and return the report items: one for each component and level.

    Args:
        chosen: the components.
        workers: number of worker processes.
        timeout_s: time limit of each test in seconds.
    """
    chosen = list(chosen)
    # The tests of the communication layer start several processes and take longest, so they are started first.
    queue = iter(sorted(chosen, key=lambda component: component.layer != "communication"))
    lock, done = threading.Lock(), {}

    def work() -> None:
        with IsolatedProcess(timeout_s, _prepare) as worker:
            while True:
                with lock:
                    component = next(queue, None)
                if component is None:
                    return
                done[id(component)] = _items(component, worker)

    with ThreadPoolExecutor(workers) as threads:
        for future in [threads.submit(work) for _ in range(workers)]:
            future.result()
    return [item for component in chosen for item in done[id(component)]]


def _items(component: Component, worker: IsolatedProcess) -> list[Item]:
    items, blocked, found, version = [], "", True, ""
    for level in LEVELS:
        test, seconds = component.tests.get(level), 0.0
        if test is None:
            reason = component.untested.get(level, _NO_FLOOR if level == "floor" else "there is no test")
            result = CheckResult(component.name, "skip", reason)
        elif blocked:
            result = CheckResult(component.name, "skip", blocked)
        else:
            result, seconds = _run(worker, test.run)
        found &= result.found
        version = result.version or version
        if test is not None and not blocked and result.status in ("fail", "absent"):
            blocked = f"not run, because the level {level} is {result.status!r}"
        ran = test is not None and result.status not in ("skip", "absent")
        tested = test.tested if test is not None and ran else ""
        where = (component.layer, component.name, level)
        items.append(Item(*where, found, version, tested, result.status, result.evidence, result.remedy, seconds))
    return items


def _run(worker: IsolatedProcess, test: Callable[[], CheckResult]) -> tuple[CheckResult, float]:
    """Run a test, and return its result and its duration in seconds. An exception, a crash or a timeout is a failure."""
    worker.start()  # started before the clock, so that the import of torch is not counted
    started_s = time.monotonic()
    try:
        result = worker.run(test)
    except Exception as error:
        evidence = error.what if isinstance(error, IsolatedError) else f"{type(error).__name__}: {error}"
        result = CheckResult("test", "fail", evidence[:600], "report this message with the output of `hyperion doctor --json`")
    return result, round(time.monotonic() - started_s, 3)


def _prepare() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX takes most of the GPU's memory


def check_components(numerics: bool = False, floors: bool = False) -> list[Item]:
    """Run the tests of all components of this machine.

    Args:
        numerics: whether to include the tests of training numbers, which take a minute or more.
        floors: whether to include the tests of rates. Then one test runs at a time, so that no other test disturbs the rates.
    """
    timeout_s = 900.0 if numerics or floors else TIMEOUT_S  # training numbers and rates of all devices take minutes
    return run_components(components(collect_facts(), numerics, floors), 1 if floors else 2, timeout_s)
