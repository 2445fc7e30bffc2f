"""The torch build against the hardware, the device it opens, and whether that device computes and copies right."""

import os
from collections.abc import Callable, Mapping

import torch

from hyperion.doctor.result import CheckResult
from hyperion.errors import HyperionError
from hyperion.install.machine import DetectedAccelerator, collect_facts, decide
from hyperion.install.plan import Build, check_build, choose


def installed_build() -> Build:
    """The torch of this process."""
    return Build(str(torch.__version__), torch.version.cuda, torch.version.hip)


def check_torch_build(
    build: Build | None = None, machine: DetectedAccelerator | None = None, override: str | None = None
) -> CheckResult:
    """torch is in range and built for the GPU that this machine has."""
    build, machine = build or installed_build(), machine or decide(collect_facts())
    try:
        check_build(build, machine, choose(machine, os.environ.get("TORCH", "") if override is None else override))
    except HyperionError as error:
        return CheckResult("torch_build", "fail", f"{error.what}; {machine.evidence}", error.next_step or "")
    evidence = f"{build}; {machine.evidence}"
    if machine.note:
        return CheckResult("torch_build", "warn", f"{evidence}; {machine.note}", "set TORCH= to choose otherwise")
    return CheckResult("torch_build", "ok", evidence)


def check_accelerator(
    build: Build | None = None, names: Callable[[], list[str]] | None = None, masks: Mapping[str, str] = os.environ
) -> CheckResult:
    """A GPU build opens its GPUs.

    Args:
        names: returns the devices that torch opens; raises what torch raises when it cannot.
        masks: where the *_VISIBLE_DEVICES variables are read from.
    """
    build = build or installed_build()
    if build.kind == "cpu":
        return CheckResult("accelerator", "skip", "a CPU build of torch: everything runs on the CPU")
    hidden = {name: value for name, value in masks.items() if name.endswith("_VISIBLE_DEVICES")}
    try:
        found, words = (names or _device_names)(), "torch opens no GPU"
    except RuntimeError as error:
        found, words = [], str(error)
    if found:
        return CheckResult("accelerator", "ok", f"{len(found)} visible: {', '.join(sorted(set(found)))}")
    remedy = "update the GPU driver to what this build needs; in a container pass the devices through"
    if hidden:
        remedy = f"unset {', '.join(hidden)}, or let them name a device that exists"
    return CheckResult("accelerator", "fail", f"{words}; masks: {hidden or 'none'}", remedy)


def _device_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def check_arithmetic(
    device: str | None = None,
    copy: Callable[[torch.Tensor, str], torch.Tensor] = lambda tensor, target: tensor.to(target),
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> CheckResult:
    """Bytes survive a round trip through the device, and a float32 product on it agrees with float64 on the CPU.

    Args:
        device: 'cuda' or 'cpu'; the accelerator when torch opens one.
        copy: moves a tensor to a device.
        multiply: the product under test, of two float32 [256, 256].
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    remedy = "trust no result of this device: run its vendor's diagnostics, then reinstall driver and torch"
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    wrong = int((copy(copy(data, device), "cpu") != data).sum())
    if wrong:
        evidence = f"{wrong} of {data.numel()} bytes came back wrong from {device}"
        return CheckResult("arithmetic", "fail", evidence, remedy)
    a, b = torch.randn(2, 256, 256, generator=generator)
    got, exact = copy(multiply(copy(a, device), copy(b, device)), "cpu").double(), a.double() @ b.double()
    error = ((got - exact).norm() / exact.norm()).item()
    # float32 is good to about 2e-7 here, TF32 units, where switched on, to 3e-4; bfloat16 is off by more than 1e-3.
    if not error < 6e-4:
        return CheckResult("arithmetic", "fail", f"a 256×256 product on {device} is off by {error:.2g}", remedy)
    evidence = f"{device}: 1 MiB copied there and back, a float32 product within {error:.1g} of float64"
    return CheckResult("arithmetic", "ok", evidence)
