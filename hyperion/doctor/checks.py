"""Checks of the installation: Python, PyTorch and its GPU, the notebook kernel, data, results folder, disk space and caches."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch

from hyperion import compat
from hyperion.data.prepare.catalog import names_in_mirror
from hyperion.data.store.folders import DataError, DataUnavailable, cache_root
from hyperion.data.store.sources import FETCH_HINT, mirror_root
from hyperion.errors import HyperionError
from hyperion.install.machine import DetectedAccelerator, collect_facts, decide
from hyperion.install.plan import MINIMUM_PYTHON, Build, check_build, choose
from hyperion.paths import home_folder, results_folder

Status = Literal["ok", "warn", "fail", "skip", "absent"]
NEEDED_GB = 5.0  # data, checkpoints, executed notebooks and compile caches of a full run
# Maps the environment variables for cache folders to the default folders, relative to the home folder. None means that the
# default is a temporary folder.
CACHES = {
    "HF_HOME": ".cache/huggingface",
    "TORCHINDUCTOR_CACHE_DIR": None,
    "TRITON_CACHE_DIR": ".triton/cache",
    "MIOPEN_USER_DB_PATH": ".config/miopen",
    "JUPYTER_RUNTIME_DIR": ".local/share/jupyter/runtime",
    "MPLCONFIGDIR": ".config/matplotlib",
}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        id: name of the check, stable for scripts.
        status: 'ok', 'warn' (works with a limitation), 'fail' (must be fixed), 'skip' (does not apply) or 'absent' (an optional
            component that is not installed).
        evidence: what the check observed.
        remedy: the next step if the status is 'warn' or 'fail', else "".
        version: version of what was checked, or "".
        found: True if the component is installed on this machine, False if it is absent or if its test did not run.
    """

    id: str
    status: Status
    evidence: str
    remedy: str = ""
    version: str = ""
    found: bool = True


def check_python(version: Sequence[int | str] = sys.version_info) -> CheckResult:
    """Check that Python is new enough."""
    evidence = f"Python {'.'.join(map(str, version[:3]))}, {sys.executable}"
    if tuple(version[:2]) >= MINIMUM_PYTHON:
        return CheckResult("python", "ok", evidence, version=".".join(map(str, version[:3])))
    remedy = "use Python 3.11 or newer: make setup PYTHON=/path/to/python3.12"
    return CheckResult("python", "fail", evidence, remedy, ".".join(map(str, version[:3])))


def check_torchvision(load: Callable[[], ModuleType] = compat.import_torchvision) -> CheckResult:
    """Check that torchvision can be imported.

    transformers and peft import torchvision if it is installed. If the import of torchvision fails, their imports fail too.
    """
    try:
        module = load()
    except HyperionError as error:
        return CheckResult("torchvision", "fail", error.what, error.next_step or "")
    evidence = f"torchvision {module.__version__}"
    if compat.prepare_torchvision():
        evidence += ", without its compiled operators (a CUDA wheel with a CPU torch); Hyperion does not use them"
    return CheckResult("torchvision", "ok", evidence, version=module.__version__)


def check_notebook_kernel(start: Callable[[], str] | None = None) -> CheckResult:
    """Check that a notebook kernel starts and runs in this interpreter.

    Args:
        start: function that starts a kernel and returns the path of its Python interpreter; default: `start_kernel`.
    """
    try:
        kernel_python = (start or start_kernel)()
    except Exception as error:  # Jupyter raises different exceptions for a missing package, a port in use or a timeout
        remedy = "install ipykernel here (`make setup` does); find stale kernels with `jupyter kernelspec list`"
        return CheckResult("notebook_kernel", "fail", f"no kernel started: {type(error).__name__}: {error}", remedy)
    if kernel_python == sys.executable:
        return CheckResult("notebook_kernel", "ok", f"a kernel started in {kernel_python}")
    evidence = f"a kernel started in {kernel_python}, not in {sys.executable}"
    remedy = "remove the kernel named python3: `jupyter kernelspec list`, then `jupyter kernelspec remove python3`"
    return CheckResult("notebook_kernel", "fail", evidence, remedy)


def start_kernel(timeout_s: float = 60) -> str:
    """Start a Jupyter kernel in the same way as papermill, and return the path of the kernel's Python interpreter."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=timeout_s)
    try:
        output: list[str] = []

        def listen(message: dict) -> None:
            output.append(message["content"].get("text", ""))

        code = "import sys; print(sys.executable)"
        client.execute_interactive(code, timeout=timeout_s, output_hook=listen)
        return "".join(output).strip()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def device_masks(build: Build, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that select the GPUs which a build of torch sees, with their values.

    Only variables that the runtime of the build reads are returned: CUDA reads CUDA_VISIBLE_DEVICES. ROCm reads
    ROCR_VISIBLE_DEVICES, and then HIP_VISIBLE_DEVICES or, if this is not set, CUDA_VISIBLE_DEVICES.
    """
    hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in variables else "CUDA_VISIBLE_DEVICES"
    names = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("ROCR_VISIBLE_DEVICES", hip)}.get(build.kind, ())
    return {name: variables[name] for name in names if name in variables}


def installed_build() -> Build:
    """Return the build of the torch that this process imported."""
    return Build(str(torch.__version__), torch.version.cuda, torch.version.hip)


def require_torch_build(
    build: Build | None = None, machine: DetectedAccelerator | None = None, override: str | None = None
) -> None:
    """Check that torch has a supported version and is built for the GPU of this machine.

    Args:
        build: the build of torch; default: the build that this process imported.
        machine: the accelerator of the machine; default: that of this machine.
        override: value of TORCH=, which requests a build; default: the environment variable.

    Raises:
        HyperionError: the build does not match, or the GPU of this machine cannot be used.
    """
    machine = machine or decide(collect_facts())
    choice = choose(machine, os.environ.get("TORCH", "") if override is None else override)
    check_build(build or installed_build(), machine, choice)


def check_torch_build(
    build: Build | None = None, machine: DetectedAccelerator | None = None, override: str | None = None
) -> CheckResult:
    """Return the result of `require_torch_build`, which has the same arguments."""
    build, machine = build or installed_build(), machine or decide(collect_facts())
    try:
        require_torch_build(build, machine, override)
    except HyperionError as error:
        return CheckResult("torch_build", "fail", f"{error.what}; {machine.evidence}", error.next_step or "", build.version)
    evidence = f"{build}; {machine.evidence}"
    if machine.note:
        remedy = "set TORCH= to choose another build"
        return CheckResult("torch_build", "warn", f"{evidence}; {machine.note}", remedy, build.version)
    return CheckResult("torch_build", "ok", evidence, version=build.version)


def check_accelerator(
    build: Build | None = None,
    names: Callable[[], list[str]] | None = None,
    masks: Mapping[str, str] = os.environ,
    driver: str = "",
) -> CheckResult:
    """Check that a GPU build of torch can use the GPUs. The component counts as found if there is a driver or a usable GPU.

    Args:
        build: the build of torch; default: the build that this process imported.
        names: function that returns the names of the GPUs that torch can use, or raises torch's RuntimeError.
        masks: environment variables. Only those that select GPUs for this build are used.
        driver: name and version of the GPU driver, or "" if it is unknown.
    """
    build = build or installed_build()
    if build.kind == "cpu":
        evidence = "a CPU build of torch: everything runs on the CPU"
        return CheckResult("accelerator", "skip", evidence, version=driver, found=bool(driver))
    hidden = device_masks(build, masks)
    try:
        gpus, problem = (names or _device_names)(), "torch cannot use a GPU"
    except RuntimeError as error:
        gpus, problem, hidden = [], str(error), {}  # torch raises no error if all GPUs are hidden
    if gpus:
        return CheckResult("accelerator", "ok", f"{len(gpus)} visible: {', '.join(sorted(set(gpus)))}", version=driver)
    remedy = "update the GPU driver to the version that this build needs; in a container, pass the devices through"
    if hidden:
        remedy = f"unset {', '.join(hidden)}, or set them to a device that exists"
    evidence = f"{problem}; environment variables that hide GPUs: {hidden or 'none'}"
    return CheckResult("accelerator", "fail", evidence, remedy, driver, bool(driver))


def _device_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def check_arithmetic(
    device: str | None = None,
    copy: Callable[[torch.Tensor, str], torch.Tensor] = lambda tensor, target: tensor.to(target),
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> CheckResult:
    """Check copies and a matrix product on the device.

    Bytes that are copied to the device and back must be unchanged. A float32 matrix product on the device must agree with the
    float64 product on the CPU.

    Args:
        device: 'cuda' or 'cpu'; default: the GPU if torch can use one, else the CPU.
        copy: function that copies a tensor to a device.
        multiply: function that computes the tested product of two float32 matrices of shape (256, 256).
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    remedy = "do not use results of this device: run the vendor's diagnostics, then reinstall driver and torch"
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    wrong = int((copy(copy(data, device), "cpu") != data).sum())
    if wrong:
        evidence = f"{wrong} of {data.numel()} bytes were wrong after a copy to {device} and back"
        return CheckResult("arithmetic", "fail", evidence, remedy)
    a, b = torch.randn(2, 256, 256, generator=generator)
    got, exact = copy(multiply(copy(a, device), copy(b, device)), "cpu").double(), a.double() @ b.double()
    error = ((got - exact).norm() / exact.norm()).item()
    # The error is about 2e-7 in float32, 3e-4 if TF32 is enabled, and above 1e-3 in bfloat16.
    if not error < 6e-4:
        evidence = f"a 256×256 matrix product on {device} has a relative error of {error:.2g}"
        return CheckResult("arithmetic", "fail", evidence, remedy)
    evidence = (
        f"{device}: 1 MiB was copied to the device and back without errors; the relative error of a float32 matrix product is "
        f"{error:.1g}"
    )
    return CheckResult("arithmetic", "ok", evidence)


def check_data_source(mirror: Callable[[], Path] = mirror_root, cache: Path | None = None) -> CheckResult:
    """Check that real data sets are available, either in a mirror folder or in the cache that `make fetch` fills."""
    try:
        root = mirror()
        if names := names_in_mirror(root):
            return CheckResult("data_source", "ok", f"mirror {root} holds {', '.join(names)}")
        return CheckResult(
            "data_source", "fail", f"the mirror {root} holds no data set", "copy the data there, or unset HYPERION_DATA_MIRROR"
        )
    except DataError as error:
        if not isinstance(error, DataUnavailable):
            return CheckResult("data_source", "fail", error.what, error.next_step or "")
    cache = cache_root() if cache is None else cache
    staged = sorted(path.name for path in cache.glob("[!.]*")) if cache.is_dir() else []
    if staged:
        return CheckResult("data_source", "ok", f"cache {cache} holds {', '.join(staged)}")
    return CheckResult(
        "data_source",
        "warn",
        "no mirror and no data in the cache: data will be downloaded, and the smoke profile falls back to synthetic data",
        FETCH_HINT,
        found=False,
    )


def check_results_folder(folder: Path | None = None) -> CheckResult:
    """Check that the results folder is writable."""
    folder = folder or results_folder()
    cause = _not_writable(folder)
    if cause is None:
        return CheckResult("results_folder", "ok", str(folder))
    remedy = "make this folder writable, or set HYPERION_RESULTS to another folder"
    return CheckResult("results_folder", "fail", f"{folder}: {cause}", remedy)


def check_disk_space(folder: Path | None = None, free_gb: float | None = None) -> CheckResult:
    """Check that the disk with the results folder has enough space for a run."""
    folder = folder or results_folder()
    if free_gb is None:
        free_gb = shutil.disk_usage(nearest_existing(folder)).free / 1e9
    evidence = f"{free_gb:.1f} GB free for {folder}; a full run needs {NEEDED_GB:.0f} GB"
    if free_gb >= NEEDED_GB:
        return CheckResult("disk_space", "ok", evidence)
    remedy = "free disk space, or set HYPERION_RESULTS and HYPERION_DATA to folders on another disk"
    return CheckResult("disk_space", "warn" if free_gb >= 1 else "fail", evidence, remedy)


def cache_folders(variables: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Return the cache folders of compilers, kernel libraries and Jupyter, by environment variable.

    A variable that is not set and whose default is a temporary folder is left out.

    Args:
        variables: environment variables.
        home: home folder of the user.
    """
    return {
        name: Path(variables[name]) if variables.get(name) else home / default
        for name, default in CACHES.items()
        if variables.get(name) or default
    }


def check_caches(variables: Mapping[str, str] = os.environ, home: Path | None = None) -> CheckResult:
    """Check that the cache folders of compilers, kernel libraries and Jupyter are writable."""
    folders = cache_folders(variables, home or home_folder())
    broken = {name: cause for name, path in folders.items() if (cause := _not_writable(path))}
    if not broken:
        return CheckResult("caches", "ok", f"{len(folders)} cache folders are writable")
    evidence = "; ".join(f"{name} = {folders[name]}: {cause}" for name, cause in broken.items())
    # mktemp chooses a random name, because a folder in /tmp with a fixed name may belong to another user.
    settings = " ".join(f"{name}=$(mktemp -d)" for name in broken)
    return CheckResult("caches", "fail", evidence, f"set these variables to folders on a disk of this machine: export {settings}")


def _not_writable(folder: Path) -> str | None:
    """Return the reason why no file can be written to the folder, or None if a file can be written.

    The folder need not exist yet. This writes a file, because permission bits do not show quotas or read-only file systems.
    """
    place = nearest_existing(folder)
    if not place.is_dir():
        return f"{place} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"hyperion")
    except OSError as error:
        return error.strerror or str(error)
    return None


def nearest_existing(path: Path) -> Path:
    """Return the path if it exists, else its nearest parent folder that exists, as far as this user can see."""
    # os.path.exists() is False for a folder of another user. Path.exists() raises an error before Python 3.14.
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.exists(place))
