"""Repairs for third-party packages known not to import beside a matching torch, applied as narrowly as possible.

torchvision's wheel on PyPI is linked against CUDA. Beside a CPU build of torch its operator library cannot be loaded,
and `import torchvision` then dies with "operator torchvision::nms does not exist" while it registers shapes for two
operators that the library would have declared. transformers and peft import torchvision when it is installed, so they
die with it. Declaring the two schemas first lets all three import; calling the operators still raises torchvision's
own explanation.
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
_declared: list = []  # torch.library.Library objects: the schemas live as long as these


def prepare_torchvision(package_folders: Sequence[str] | None = None) -> bool:
    """Declare torchvision's two missing schemas when its CUDA library sits beside a torch without CUDA.

    Does nothing where torchvision is absent or its operator library loads, and nothing where it fails for any other
    reason: that failure is real and must surface at `import torchvision`.

    Args:
        package_folders: torchvision's package folders, found on sys.path when left out.

    Returns:
        True when the schemas stand declared by this module.
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
    """Whether the library cannot be loaded for want of CUDA, and for no other reason."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return any(name in str(error) for name in _CUDA_LIBRARIES)
    return False


class _TorchvisionFinder:
    """Import hook that runs `prepare_torchvision` just before torchvision's own code, whoever imports it."""

    def find_spec(self, name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
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
    """Make every later import of torchvision in this process, also one inside transformers or peft, prepared.

    Costs nothing until torchvision is imported (torch is not loaded before). Called by `import hyperion`, so that
    notebook kernels, ranks and test processes are all covered.
    """
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def import_torchvision() -> ModuleType:
    """The torchvision module, prepared.

    Raises:
        HyperionError: it is missing, or broken for a reason that `prepare_torchvision` does not know.
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
