"""Workarounds for third-party packages that fail to import, as narrow as possible.

torchvision's wheel on PyPI is linked against CUDA. With a CPU build of torch, its operator library cannot be loaded, and
`import torchvision` fails with "operator torchvision::nms does not exist" when it registers shapes for two operators of that
library. transformers and peft import torchvision if it is installed, so they fail too. If the two schemas are declared first,
all three can be imported; a call of the operators still raises torchvision's own error.
"""

import ctypes
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hyperion.errors import HyperionError

# torchvision declares these in C++ (torchvision/csrc/ops/nms.cpp and quantized/cpu/qnms_kernel.cpp).
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_CUDA_LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libcudart.so")
_declared: list = []  # torch.library.Library objects; the schemas exist as long as these


def prepare_torchvision(package_folders: Sequence[str] | None = None) -> bool:
    """Declare torchvision's two missing schemas if torchvision is built for CUDA and torch is not.

    Does nothing if torchvision is not installed, or its operator library loads, or it fails for another reason, which
    `import torchvision` must report.

    Args:
        package_folders: torchvision's package folders; the default is its folders on sys.path.

    Returns:
        True if this module has declared the schemas.
    """
    if _declared:
        return True
    import torch

    if torch.version.cuda is not None or torch._C._jit_get_schemas_for_operator("torchvision::nms"):
        return False
    if package_folders is None:
        spec = importlib.util.find_spec("torchvision")
        package_folders = (spec.submodule_search_locations or ()) if spec else ()
    library = next((path for folder in package_folders for path in sorted(Path(folder).glob("_C*.so"))), None)
    if library is None or not _wants_cuda(library):
        return False
    declarations = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        declarations.define(schema)
    _declared.append(declarations)
    return True


def _wants_cuda(library: Path) -> bool:
    """Return True if the library cannot be loaded because CUDA is missing."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return any(name in str(error) for name in _CUDA_LIBRARIES)
    return False


class _TorchvisionFinder:
    """Import hook that runs `prepare_torchvision` just before torchvision's own code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def prepare_and_execute(module: ModuleType) -> None:
            prepare_torchvision(spec.submodule_search_locations)
            execute(module)

        spec.loader.exec_module = prepare_and_execute
        return spec


def watch_torchvision() -> None:
    """Prepare every later import of torchvision in this process, including those inside transformers and peft.

    Costs nothing until torchvision is imported, and does not import torch. `import hyperion` calls it, which covers notebook
    kernels, ranks and test processes.
    """
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def import_torchvision() -> ModuleType:
    """Prepare and import torchvision, and return the module.

    Raises:
        HyperionError: it is missing, or fails for a reason that `prepare_torchvision` does not handle.
    """
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise HyperionError(
            f"torchvision cannot be imported: {error}",
            where=sys.executable,
            next_step="install the torchvision that matches this torch (`make setup` does), then `hyperion doctor`",
        ) from error
