"""Python, torchvision and the notebook kernel."""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from hyperion import compat
from hyperion.doctor.result import CheckResult
from hyperion.errors import HyperionError
from hyperion.install.plan import MINIMUM_PYTHON


def check_python(version: Sequence[int | str] = sys.version_info, executable: str = sys.executable) -> CheckResult:
    """Python is new enough."""
    evidence = f"Python {'.'.join(map(str, version[:3]))}, {executable}"
    if tuple(version[:2]) >= MINIMUM_PYTHON:
        return CheckResult("python", "ok", evidence)
    return CheckResult("python", "fail", evidence, "use Python 3.11 or newer: make setup PYTHON=/path/to/python3.12")


def check_torchvision(load: Callable[[], ModuleType] = compat.import_torchvision) -> CheckResult:
    """torchvision imports; with it transformers and peft do, which import it when it is there."""
    try:
        module = load()
    except HyperionError as error:
        return CheckResult("torchvision", "fail", error.what, error.next_step or "")
    evidence = f"torchvision {module.__version__}"
    if compat.prepare_torchvision():
        evidence += ", without its compiled operators (a CUDA wheel beside a CPU torch): nothing here uses them"
    return CheckResult("torchvision", "ok", evidence)


def check_notebook_kernel(start: Callable[[], str] | None = None) -> CheckResult:
    """A notebook kernel starts and runs in this very interpreter.

    Args:
        start: returns the interpreter that a new kernel reports.
    """
    try:
        kernel_python = (start or start_kernel)()
    except Exception as error:  # whatever Jupyter meets: a missing package, a port, a time limit
        remedy = "install ipykernel here (`make setup` does); look for a stale kernel with `jupyter kernelspec list`"
        return CheckResult("notebook_kernel", "fail", f"no kernel: {type(error).__name__}: {error}", remedy)
    if kernel_python == sys.executable:
        return CheckResult("notebook_kernel", "ok", f"a kernel started in {kernel_python}")
    evidence = f"a kernel started in {kernel_python}, not in {sys.executable}"
    remedy = "remove the kernel of that name: `jupyter kernelspec list`, then `jupyter kernelspec remove python3`"
    return CheckResult("notebook_kernel", "fail", evidence, remedy)


def start_kernel(timeout_s: float = 60) -> str:
    """Start a kernel as papermill does, ask for its interpreter, stop it."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=timeout_s)
    try:
        said: list[str] = []

        def listen(message: dict) -> None:
            said.append(message["content"].get("text", ""))

        code = "import sys; print(sys.executable)"
        client.execute_interactive(code, timeout=timeout_s, output_hook=listen)
        return "".join(said).strip()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
