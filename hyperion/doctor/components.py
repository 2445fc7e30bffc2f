"""The components of the stack by layer, the tests of each component, and the process that runs the tests.

Each test runs in a worker process, so that a package that crashes or hangs during its import does not stop the other tests.
"""

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from hyperion.doctor import checks, probes
from hyperion.doctor.checks import CheckResult
from hyperion.doctor.floors import MET, NOT_MEASURED, check_floors
from hyperion.doctor.numerics import check_numerics
from hyperion.doctor.report import LAYERS, LEVELS, Item, Layer, Level
from hyperion.hardware import Device, MachineFacts, collect_facts, detect
from hyperion.hardware.facts import TRITON_PACKAGES
from hyperion.processes.isolated import IsolatedError, IsolatedProcess
from hyperion.units import GIB

TIMEOUT_S = 90.0
_FLOORS = "not run: use `hyperion doctor --floors`"
_NO_FLOOR = "no least rate is published for this component"
_NO_PROBE = "imported only, if it is installed: no test compares its results"


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
        needs: names of the components that it depends on. Its tests run after theirs, and only if theirs did not fail.
        version: version of the component, if it is known before its tests run.
    """

    layer: Layer
    name: str
    tests: dict[Level, Check]
    untested: dict[Level, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    version: str = ""


def components(facts: MachineFacts, numerics: bool = False, floors: bool = False) -> list[Component]:
    """Return the components in the order of the layers, with every device of the machine.

    Args:
        facts: facts about the machine.
        numerics: whether the tests of training numbers are included. They take a minute or more.
        floors: whether the tests of rates are included.
    """
    device = detect(facts)
    devices = [detect(facts, index) for index in range(len(facts.gpus))] or [device]
    count, where, driver = len(facts.gpus), device.torch_device, facts.driver or ""
    hardware = [_device(one, numerics, floors) for one in devices]
    all_devices = tuple(component.name for component in hardware)
    torch = ("PyTorch",)
    return [
        *hardware,
        Component(
            "hardware",
            "peer copies",
            {"correctness": Check("1 MiB between every two GPUs, all bytes", functools.partial(probes.probe_peers, count))},
            {"import": "part of every device"},
            all_devices,
        ),
        _single("system", "python", "import", "version against the oldest that Hyperion supports", checks.check_python),
        _single(
            "system",
            "driver and devices",
            "import",
            "devices that torch can open",
            functools.partial(checks.check_accelerator, driver=driver),
        ),
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
            needs=("python", "driver and devices", all_devices[0]),
        ),
        Component(
            "framework",
            "torchvision",
            {
                "import": Check("import", checks.check_torchvision),
                "correctness": Check("flip and normalise by value", probes.probe_torchvision),
            },
            needs=torch,
        ),
        _package("framework", "Triton", "triton", TRITON_PACKAGES, "a kernel by value", probes.probe_triton, needs=torch),
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
            needs=torch,
        ),
        _package(
            "model",
            "peft",
            "peft",
            ("peft",),
            "a merged LoRA adapter by value",
            probes.probe_peft,
            required=True,
            needs=("PyTorch", "transformers"),
        ),
        _single(
            "model",
            "attention",
            "correctness",
            "output and gradients against float64",
            functools.partial(probes.probe_attention, where),
            torch,
            facts.torch or "",
        ),
        _framework("Megatron-LM", "megatron-core", "megatron.core"),
        _package("model", "vLLM", "vllm", ("vllm",), needs=torch),
        _framework("DeepSpeed", "deepspeed", "deepspeed"),
        _single(
            "communication",
            "NCCL or RCCL" if count else "gloo",
            "correctness",
            "all-reduce, all-gather and broadcast by value, one process for each rank",
            functools.partial(probes.probe_collectives, count or 2, "nccl" if count else "gloo"),
            ("PyTorch", *all_devices),
            (facts.collectives if count else facts.torch) or "",  # gloo has no version of its own: it is part of torch
        ),
        *([] if count else [_without_gpu("communication", "NCCL or RCCL")]),
        Component(
            "communication",
            "MPI",
            {"correctness": Check("allreduce, reduce, bcast, scatter, gather under mpirun -n 2", probes.probe_mpi)},
            {"import": "the correctness test finds mpirun and mpi4py"},
        ),
        _package("extension", "Flash Attention", "flash_attn", ("flash-attn", "flash_attn"), needs=torch),
        _package(
            "extension",
            "bitsandbytes",
            "bitsandbytes",
            ("bitsandbytes",),
            "NF4 and back, error and bytes",
            functools.partial(probes.probe_bitsandbytes, where),
            needs=torch,
        ),
        _single(
            "extension",
            "NVML" if device.kind == "cuda" else "ROCm SMI" if device.kind == "rocm" else "CPU telemetry",
            "correctness",
            "one reading, each value within physical bounds",
            functools.partial(probes.probe_telemetry, device, version=driver if count else ""),
            ("driver and devices",),
        ),
        *([] if count else [_without_gpu("extension", "NVML or ROCm SMI")]),
        _single(
            "extension",
            "PyTorch Profiler",
            "correctness",
            "three products in table and trace",
            probes.probe_profiler,
            torch,
            facts.torch or "",
        ),
        _package(
            "extension",
            "TensorBoard",
            "tensorboard",
            ("tensorboard",),
            "values written and read back",
            probes.probe_tensorboard,
            needs=torch,
        ),
        _package("extension", "Weights & Biases", "wandb", ("wandb",)),
        _single("extension", "notebook kernel", "correctness", "a kernel starts in this Python", checks.check_notebook_kernel),
        _single("extension", "data source", "import", "mirror or cache holds data", checks.check_data_source),
    ]


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


def _single(
    layer: Layer,
    name: str,
    level: Level,
    tested: str,
    run: Callable[[], CheckResult],
    needs: tuple[str, ...] = (),
    version: str = "",
) -> Component:
    other: Level = "correctness" if level == "import" else "import"
    why = "the import test covers this" if level == "import" else "the correctness test covers this"
    return Component(layer, name, {level: Check(tested, run)}, {other: why}, needs, version)


def _without_gpu(layer: Layer, name: str) -> Component:
    return Component(layer, name, {}, dict.fromkeys(("import", "correctness", "floor"), "it needs a GPU, and torch sees none"))


def _package(
    layer: Layer,
    name: str,
    module: str,
    packages: tuple[str, ...],
    tested: str = "",
    run: Callable[[], CheckResult] | None = None,
    required: bool = False,
    needs: tuple[str, ...] = (),
) -> Component:
    load = Check(f"import {module}", functools.partial(probes.probe_import, module, packages, required))
    tests: dict[Level, Check] = {"import": load}
    if run is not None:
        tests["correctness"] = Check(tested, run)
    return Component(layer, name, tests, {} if run else {"correctness": _NO_PROBE}, needs)


def _framework(name: str, environment: str, module: str) -> Component:
    load = Check(f"import {module}", functools.partial(probes.probe_environment, environment, module))
    return Component("model", name, {"import": load}, {"correctness": _NO_PROBE}, ("PyTorch",))


def run_components(chosen: Iterable[Component], workers: int = 2, timeout_s: float = TIMEOUT_S) -> list[Item]:
    """Run the tests of all components, and return the report items: one for each component and level.

    The components are tested from the first layer to the last. A component is tested after the components that it needs. If one
    of these failed, its own tests are skipped, and the evidence names the component that failed. Components that are needed, but
    not chosen, are ignored. A missed floor (a device that is too slow) is no failure in this sense.

    Args:
        chosen: the components.
        workers: number of worker processes.
        timeout_s: time limit of each test in seconds.

    Raises:
        ValueError: components need each other in a circle.
    """
    chosen = list(chosen)
    schedule, items = _Schedule(chosen), {}
    processes = [IsolatedProcess(timeout_s, _prepare) for _ in range(workers)]

    def work(process: IsolatedProcess) -> None:
        with process as worker:
            while (component := schedule.take()) is not None:
                cause = ""
                try:
                    items[id(component)], cause = _items(component, worker, schedule.cause_of(component))
                finally:
                    schedule.finish(component, cause)

    with ThreadPoolExecutor(workers) as threads:
        try:
            for future in [threads.submit(work, process) for process in processes]:
                future.result()
        except BaseException:  # KeyboardInterrupt, for example: the threads would test all other components first
            schedule.stop()
            for process in processes:
                process.interrupt()
            raise
    return [item for component in chosen for item in items[id(component)]]


class _Schedule:
    """Components that wait for a worker, in the order of their layers, and the failures that concern their dependents."""

    def __init__(self, chosen: list[Component]):
        self._waiting = sorted(chosen, key=lambda component: LAYERS.index(component.layer))
        self._unfinished = Counter(component.name for component in chosen)
        self._running, self._causes, self._changed = 0, {}, threading.Condition()

    def stop(self) -> None:
        """Drop the components that wait."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    def take(self) -> Component | None:
        """Return the next component whose needs are finished, or None at the end. Wait while there is none."""
        with self._changed:
            while self._waiting:
                for component in self._waiting:
                    if not any(self._unfinished[name] for name in component.needs):
                        self._waiting.remove(component)
                        self._running += 1
                        return component
                if not self._running:
                    raise ValueError(f"components need each other: {', '.join(one.name for one in self._waiting)}")
                self._changed.wait()
            return None

    def cause_of(self, component: Component) -> str:
        """Return why a component cannot be tested, or ""."""
        with self._changed:
            return next((self._causes[name] for name in component.needs if name in self._causes), "")

    def finish(self, component: Component, cause: str) -> None:
        """Record that the tests of a component ended, and why its dependents cannot be tested ("" if they can)."""
        with self._changed:
            self._running -= 1
            self._unfinished[component.name] -= 1
            if cause:
                self._causes[component.name] = cause
            self._changed.notify_all()


def _items(component: Component, worker: IsolatedProcess, inherited: str) -> tuple[list[Item], str]:
    """Return the report items of a component, and why its dependents cannot be tested ("" if they can).

    Args:
        component: the component.
        worker: process that runs the tests.
        inherited: why the component itself cannot be tested, or "".
    """
    results: dict[Level, tuple[CheckResult, float]] = {}
    blocked = cause = inherited
    for level in LEVELS:
        test = component.tests.get(level)
        if test is None:
            reason = component.untested.get(level, _NO_FLOOR if level == "floor" else "there is no test")
            results[level] = CheckResult(component.name, "skip", reason), 0.0
        elif blocked:
            results[level] = CheckResult(component.name, "skip", blocked), 0.0
        else:
            results[level] = result, _ = _run(worker, test.run)
            if result.status in ("fail", "absent"):
                blocked = f"not run, because the level {level} is {result.status!r}"
            if result.status == "fail" and level != "floor":
                cause = f"not run, because {component.name} ({component.layer}) failed at the level {level}"
    found = not inherited and bool(component.tests) and all(result.found for result, _ in results.values())
    version = next((result.version for result, _ in results.values() if result.version), component.version)
    items = []
    for level, (result, seconds) in results.items():
        ran = level in component.tests and result.status not in ("skip", "absent")
        tested = component.tests[level].tested if ran else ""
        where = (component.layer, component.name, level)
        items.append(Item(*where, found, version, tested, result.status, result.evidence, result.remedy, seconds))
    return items, cause


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
