"""A workaround for torchvision, which cannot be imported in some environments.

The torchvision wheel on PyPI is linked against CUDA. With a CPU build of torch, its operator library cannot be loaded. Then
`import torchvision` fails with "operator torchvision::nms does not exist", because it registers shape functions for two operators
of this library. transformers and peft import torchvision if it is installed, so their imports fail too. If the schemas of the two
operators are declared first, all three packages can be imported. Calling one of the operators still raises torchvision's error.
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

# torchvision declares these schemas in C++ (torchvision/csrc/ops/nms.cpp and quantized/cpu/qnms_kernel.cpp).
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_CUDA_LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libcudart.so")
_declared: list = []  # torch.library.Library objects; the schemas exist only as long as these objects


def prepare_torchvision(package_folders: Sequence[str] | None = None) -> bool:
    """Declare torchvision's two missing schemas if torchvision is built for CUDA and torch is not.

    Do nothing if torchvision is not installed, or if its operator library can be loaded. Also do nothing if the library cannot be
    loaded for another reason, so that `import torchvision` reports this reason.

    Args:
        package_folders: folders of the torchvision package; default: those found on sys.path.

    Returns:
        True if the schemas are declared by this module.
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
    """Return True if the library cannot be loaded because a CUDA library is missing."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return any(name in str(error) for name in _CUDA_LIBRARIES)
    return False


class _TorchvisionFinder:
    """Import hook that calls `prepare_torchvision` immediately before the code of torchvision is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        # The schemas must exist before torchvision's first line runs. Declaring them imports torch, so it is not done earlier.
        execute = spec.loader.exec_module

        def prepare_and_execute(module: ModuleType) -> None:
            prepare_torchvision(spec.submodule_search_locations)
            execute(module)

        spec.loader.exec_module = prepare_and_execute
        return spec


def watch_torchvision() -> None:
    """Prepare every later import of torchvision in this process, including imports by transformers and peft.

    This function itself imports neither torchvision nor torch. `import hyperion` calls it, so it also takes effect in notebook
    kernels, ranks and test processes.
    """
    if not any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path):
        # Inserted at the front, because the first finder that returns a spec is used.
        sys.meta_path.insert(0, _TorchvisionFinder())


def import_torchvision() -> ModuleType:
    """Import torchvision with the workaround of this module, and return it.

    Raises:
        HyperionError: torchvision is not installed, or cannot be imported for another reason.
    """
    prepare_torchvision()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise HyperionError(
            f"torchvision cannot be imported: {error}",
            where=sys.executable,
            next_step="run `make setup`, or install the torchvision for this version of torch; then run `hyperion doctor`",
        ) from error
