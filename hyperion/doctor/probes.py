"""Probes of optional and required components. A probe loads a package, computes something with it, and checks the result.

A probe returns a `CheckResult`, or raises an exception, which counts as a failure. Tolerances are derived where they are used.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hyperion.doctor.checks import CheckResult
from hyperion.engines.environments import install_command, installed_python, installed_versions, why_not_installed
from hyperion.hardware import Device, Telemetry, detect, read
from hyperion.kernels.availability import why_no_kernels
from hyperion.processes import Job, run_ranks
from hyperion.processes.group_check import check_on_rank
from hyperion.processes.mpi import mpirun_settings

REINSTALL = "run `make setup`, or reinstall the package in this environment"
_MPI_PROGRAM = """
import math
import sys
from mpi4py import MPI
c = MPI.COMM_WORLD
r, n = c.rank, c.size
total = c.allreduce(r + 1)
shared = c.bcast([7] if r == 0 else None, root=0)
part = c.scatter([10 * i for i in range(n)] if r == 0 else None, root=0)
whole = c.gather(part, root=0)
product = c.reduce(r + 2, op=MPI.PROD, root=0)
ok = total == n * (n + 1) // 2 and shared == [7] and part == 10 * r
ok = ok and (whole, product) == (([10 * i for i in range(n)], math.factorial(n + 1)) if r == 0 else (None, None))
assert ok, (r, total, shared, part, whole, product)
name = MPI.Get_library_version().split(",")[0].split("\\n")[0]
sys.stdout.write(f"mpi {n} {name}\\n")  # in one piece, since MPICH mixes what the ranks write
"""


def probe_import(module: str, packages: Sequence[str], required: bool) -> CheckResult:
    """Import a module and return its version. An optional package that is not installed is 'absent'.

    Args:
        module: name of the module.
        packages: names of the distributions that may contain it.
        required: whether Hyperion needs the package.
    """
    version = next((found for package in packages if (found := package_version(package)) is not None), None)
    if version is None:
        evidence = f"{' or '.join(packages)} is not installed"
        if required:
            return CheckResult(module, "fail", evidence, REINSTALL, found=False)
        return CheckResult(module, "absent", evidence, found=False)
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may raise anything, such as KeyError or OSError
        evidence = f"import {module}: {type(error).__name__}: {error}"
        return CheckResult(module, "fail", evidence[:400], REINSTALL, version)
    return CheckResult(module, "ok", f"import {module}", version=version)


def probe_environment(name: str, module: str, call: Callable[..., subprocess.CompletedProcess] = subprocess.run) -> CheckResult:
    """Import a module of a framework in the framework's own environment, or in this one if that is not installed.

    Args:
        name: name of the environment, which is also the name of the package.
        module: name of the module.
        call: function that runs a command.
    """
    if why := why_not_installed(name):
        result = probe_import(module, (name,), required=False)
        return replace(result, evidence=why) if result.status == "absent" else result
    python, version = installed_python(name), installed_versions(name)[name]
    done = call([python, "-c", f"import {module}"], capture_output=True, text=True, timeout=80.0, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        remedy = f"remove {Path(python).parents[1]}, then {install_command(name)}"
        return CheckResult(module, "fail", f"import {module} in {python}: {last}"[:400], remedy, version)
    return CheckResult(module, "ok", f"import {module} in {python}", version=version)


def package_version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compared(name: str, what: str, error: float, tolerance: float) -> CheckResult:
    """Return a result with the status 'ok' if the error is within the tolerance, else 'fail'. An error of NaN fails."""
    evidence = f"{what}: error {error:.2g}, tolerance {tolerance:.2g}"
    if error <= tolerance:
        return CheckResult(name, "ok", evidence)
    return CheckResult(name, "fail", evidence, f"do not use results of {name}: {REINSTALL}")


def _relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.double().cpu()
    return ((got.detach().double().cpu() - exact).norm() / exact.norm()).item()


def probe_training(device: str = "cpu", optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> CheckResult:
    """Train a least-squares problem for 50 steps. The loss must follow the closed form of gradient descent.

    With the loss |w - t|²/2 and the learning rate r, the distance to the target shrinks by the factor (1 - r) in each step.
    """
    target = torch.linspace(-1, 1, 64, dtype=torch.float64)
    weight = torch.zeros(64, device=device, requires_grad=True)
    step = optimizer([weight], lr=0.1)
    for _ in range(50):
        step.zero_grad()
        (0.5 * (weight - target.to(device, torch.float32)).square().sum()).backward()
        step.step()
    expected = target * (1 - 0.9**50)
    # 50 steps add at most 50 rounding errors of 2^-24 each.
    return _compared("torch", f"weights after 50 steps on {device}, against the closed form", _relative(weight, expected), 3e-6)


def probe_attention(device: str = "cpu", attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention) -> CheckResult:
    """Compare causal attention and its gradients with a float64 computation that stores all scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 2, 65, 32, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [x.to(device, torch.float32).requires_grad_() for x in (q, k, v)]
    output = attention(*inputs, is_causal=True)
    gradients = torch.autograd.grad(output, inputs, grad.to(device, torch.float32))
    exact_inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = exact_inputs[0] @ exact_inputs[1].transpose(-1, -2) / 32**0.5
    mask = torch.ones(65, 65, dtype=torch.bool).tril()
    exact = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ exact_inputs[2]
    exact_gradients = torch.autograd.grad(exact, exact_inputs, grad)
    pairs = zip((output, *gradients), (exact, *exact_gradients), strict=True)
    errors = [_relative(got, wanted) for got, wanted in pairs]
    # In float32, the error is 3e-7. Rounding to TF32 adds a relative error of 2^-11 = 5e-4 to each operand.
    return _compared("attention", f"output and gradients on {device} against float64", max(errors), 2e-3)


def probe_triton(device: Device | None = None) -> CheckResult:
    """Run a Triton kernel on the GPU and compare its output. Without a GPU, nothing is tested."""
    device = device or detect()
    if reason := why_no_kernels(device):
        return CheckResult("triton", "skip", reason)
    from hyperion.kernels.rows_triton import run_softmax

    x = torch.randn(64, 333, device=device.torch_device)
    return _compared(
        "triton", "softmax of 64 rows of 333 against float64", _relative(run_softmax(x), x.double().softmax(1)), 1e-6
    )


def probe_torchvision(load: Callable[[], Any] | None = None) -> CheckResult:
    """Flip and normalise an image, and compare every pixel."""
    functional = (load or functools.partial(importlib.import_module, "torchvision.transforms.v2.functional"))()
    image = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    got = functional.normalize(functional.horizontal_flip(image), mean=[1.0, 2.0], std=[2.0, 4.0])
    wanted = (image.flip(-1) - torch.tensor([1.0, 2.0])[:, None, None]) / torch.tensor([2.0, 4.0])[:, None, None]
    return _compared("torchvision", "flip and normalise, against torch", _relative(got, wanted), 1e-6)


def probe_transformers() -> CheckResult:
    """Check that a small random Llama is causal: a change of the last token changes only the last logits."""
    model, tokens = _tiny_llama(), torch.arange(12)[None]
    changed = tokens.clone()
    changed[0, -1] = 31
    with torch.no_grad():
        before, after = model(tokens).logits[0], model(changed).logits[0]
    if torch.equal(before[-1], after[-1]):
        return CheckResult("transformers", "fail", "the last token has no influence on its logits", REINSTALL)
    return _compared("transformers", "earlier logits after a change of the last token", _relative(after[:-1], before[:-1]), 1e-5)


def _tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def probe_peft() -> CheckResult:
    """Merge a LoRA adapter into its model, and check the logits.

    Merging must not change the logits. They must differ from those of the model without the adapter.
    """
    from peft import LoraConfig, get_peft_model

    base, tokens = _tiny_llama(), torch.arange(12)[None]
    with torch.no_grad():
        plain = base(tokens).logits
        adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))  # pyright: ignore
        with_adapter = adapted(tokens).logits
        merged = adapted.merge_and_unload()(tokens).logits
    if torch.equal(plain, with_adapter):
        return CheckResult("peft", "fail", "the adapter has no influence on the logits", REINSTALL)
    return _compared("peft", "logits after merging a LoRA adapter", _relative(merged, with_adapter), 1e-5)


def probe_onnxruntime() -> CheckResult:
    """Run MatMul and Relu with the CPU provider and compare with NumPy. The other providers are listed, and not tested."""
    import onnxruntime  # pyright: ignore[reportMissingImports]  # optional

    if package_version("onnx") is None:
        return CheckResult("onnxruntime", "skip", "onnx is not installed, so there is no model to run")
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]  # optional

    shapes = {"x": [4, 8], "w": [8, 3], "y": [4, 3]}
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    graph = helper.make_graph(nodes, "probe", [info["x"], info["w"]], [info["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shapes[name], dtype=np.float32) for name in "xw")
    exact = np.maximum(x.astype(np.float64) @ w, 0)
    error = float(np.linalg.norm(session.run(None, {"x": x, "w": w})[0] - exact) / np.linalg.norm(exact))
    others = [name for name in onnxruntime.get_available_providers() if name not in session.get_providers()]
    what = f"MatMul and Relu with {session.get_providers()[0]}; not tested: {', '.join(others) or 'no other provider'}"
    return _compared("onnxruntime", what, error, 1e-6)


def probe_bitsandbytes(device: str = "cpu") -> CheckResult:
    """Quantise normally distributed numbers to NF4 and back.

    Each number must take half a byte, and the error must be close to the error of NF4.
    """
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]  # optional

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    error = _relative(functional.dequantize_4bit(packed, state), x)
    if packed.nbytes != x.numel() // 2 or error < 0.03:  # 16 levels for normal numbers cannot have a smaller error
        return CheckResult("bitsandbytes", "fail", f"{packed.nbytes} bytes, error {error:.2g}: nothing was quantised", REINSTALL)
    # Blocks of 64 normal numbers in NF4 have an RMS error of 0.09 to 0.1.
    return _compared("bitsandbytes", f"NF4 of 4,096 normal numbers on {device}, and back", error, 0.13)


def probe_product(name: str, product: Callable[[np.ndarray, np.ndarray], Any] | None = None) -> CheckResult:
    """Compare a float32 matrix product of JAX or TensorFlow with float64. The evidence names the device that computed it."""
    if product is None:
        product = {"jax": _jax_product, "tensorflow": _tensorflow_product}[name]
    a, b = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    exact = a.astype(np.float64) @ b
    output = product(a, b)
    error = float(np.linalg.norm(np.asarray(output) - exact) / np.linalg.norm(exact))
    where = getattr(output, "device", "an unknown device")  # arrays of both frameworks have this attribute
    return _compared(name, f"a 64×64 matrix product on {where} against float64", error, 6e-4)  # TF32 gives 3e-4


def _jax_product(a: np.ndarray, b: np.ndarray) -> Any:
    return importlib.import_module("jax.numpy").matmul(a, b)


def _tensorflow_product(a: np.ndarray, b: np.ndarray) -> Any:
    return importlib.import_module("tensorflow").matmul(a, b)


def probe_profiler() -> CheckResult:
    """Profile three matrix products, and check that the profiler's table and trace contain all three.

    The trace must also be valid JSON.
    """
    a = torch.randn(32, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            torch.mm(a, a)
    counted = sum(event.count for event in profiler.key_averages() if event.key == "aten::mm")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    traced = sum(event.get("name") == "aten::mm" for event in events)
    return _compared(
        "profiler", f"3 products: {counted} in the table, {traced} in the trace", abs(counted - 3) + abs(traced - 3), 0
    )


def probe_tensorboard() -> CheckResult:
    """Write three values and read them back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]
    from torch.utils.tensorboard import SummaryWriter

    values = [1.0, 0.5, 0.25]
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for step, value in enumerate(values):
                writer.add_scalar("loss", value, step)
        events = EventAccumulator(folder).Reload()
        got = [event.value for event in events.Scalars("loss")]
    return _compared("tensorboard", "three values, written and read back", float(got != values), 0)


def probe_collectives(ranks: int, backend: str) -> CheckResult:
    """Start one process for each rank, and check an all-reduce, an all-gather and a broadcast by value on every rank."""
    answers = run_ranks(Job(check_on_rank, {}, timeout_s=90.0, ranks=ranks), on_line=lambda line: None)
    wrong = [str(rank) for rank, answer in enumerate(answers) if answer != {"right": True, "backend": backend}]
    if wrong:
        evidence = f"wrong values or another backend on rank {', '.join(wrong)}: {answers[int(wrong[0])]}"
        return CheckResult(backend, "fail", evidence, "run `hyperion doctor --log FILE` on a log with NCCL_DEBUG=INFO")
    return CheckResult(backend, "ok", f"all-reduce, all-gather and broadcast on {ranks} ranks, every value compared")


def probe_peers(count: int, copy: Callable[[torch.Tensor, str], torch.Tensor] = lambda x, target: x.to(target)) -> CheckResult:
    """Copy 1 MiB from every GPU to every other GPU, and compare all bytes."""
    if count < 2:
        return CheckResult("peer_copies", "skip", f"{count} GPUs: there is no pair", found=False)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    wrong = [f"{a} to {b}" for a, b in pairs if not torch.equal(copy(copy(data, f"cuda:{a}"), f"cuda:{b}").cpu(), data)]
    if wrong:
        remedy = "set NCCL_P2P_DISABLE=1 until it is fixed, and check IOMMU and ACS: `hyperion doctor` lists them as rules"
        return CheckResult("peer_copies", "fail", f"bytes changed between GPUs: {', '.join(wrong)}", remedy)
    return CheckResult("peer_copies", "ok", f"{len(pairs)} directions, 1 MiB each, all bytes equal")


def probe_telemetry(device: Device | None = None, reader: Callable[[Device], Telemetry] = read, version: str = "") -> CheckResult:
    """Read clocks, power and temperature once, and check that every value is physically possible.

    Args:
        device: the device; default: the first device of this machine.
        reader: function that reads the device.
        version: version of the driver, whose sensors are read.
    """
    reading = reader(device or detect())
    bounds = {"clock_mhz": (1, 20_000), "memory_clock_mhz": (1, 40_000), "power_w": (0.1, 5_000), "temperature_c": (-20, 130)}
    values = {name: value for name in bounds if (value := getattr(reading, name)) is not None}
    wrong = {name: value for name, value in values.items() if not bounds[name][0] <= value <= bounds[name][1]}
    if wrong:
        remedy = "update the driver and its monitoring library"
        return CheckResult("telemetry", "fail", f"impossible values: {wrong}", remedy, version)
    reasons = [f"{name}: {reason}" for name, reason in reading.unreadable.items()]
    if not values:
        why = f"no clock, power or temperature can be read. {'; '.join(reasons)}"
        return CheckResult("telemetry", "skip", why, version=version, found=False)
    evidence = "; ".join([", ".join(f"{name} {value:g}" for name, value in values.items()), *reasons])
    return CheckResult("telemetry", "ok", evidence, version=version)


def probe_mpi(
    find: Callable[[str], str | None] = shutil.which, call: Callable[..., subprocess.CompletedProcess] = subprocess.run
) -> CheckResult:
    """Run allreduce, reduce, broadcast, scatter and gather under `mpirun -n 2` with mpi4py, and compare every value."""
    mpirun = find("mpirun")
    if mpirun is None:
        return CheckResult("mpi", "absent", "mpirun is not in PATH", found=False)
    if package_version("mpi4py") is None:
        return CheckResult("mpi", "skip", f"{mpirun} is there, but mpi4py is not installed, so nothing was tested")
    command = [mpirun, "-n", "2", sys.executable, "-c", _MPI_PROGRAM]
    done = call(command, env=os.environ | mpirun_settings(2), capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("mpi 2 ")]
    if done.returncode or len(lines) != 2:
        # If mpirun belongs to another MPI library than mpi4py, each process is the only rank of its own job and prints "mpi 1".
        evidence = f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:] or 'no output'}"
        return CheckResult("mpi", "fail", evidence, "install mpi4py for this MPI: pip install --no-binary mpi4py mpi4py")
    return CheckResult("mpi", "ok", "allreduce, reduce, bcast, scatter and gather on 2 ranks by value", version=lines[0][6:])
