"""The torchvision repair: works in a fresh process, stays out of the way elsewhere, and hides no real failure."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hyperion import compat

ROOT = Path(__file__).resolve().parent.parent


def run_fresh(code: str, *extra_path: Path) -> subprocess.CompletedProcess:
    """Run code in a new interpreter, since imports and operator declarations outlive a test.

    Imports leave no garbage, so its search is off.
    """
    setup = f"import gc, sys; gc.disable(); sys.path[:0] = {[str(path) for path in (*extra_path, ROOT)]!r}\n"
    command = [sys.executable, "-c", setup + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.process
def test_torchvision_transformers_and_peft_import_and_a_model_runs():
    done = run_fresh("""
        from hyperion import compat
        compat.watch_torchvision()
        assert "torch" not in sys.modules, "watching alone must not load torch"
        from transformers import LlamaForCausalLM
        import peft, torch
        torchvision = compat.import_torchvision()
        torch.set_num_threads(1)
        model = torchvision.models.resnet18(num_classes=10).eval()
        print(tuple(model(torch.randn(2, 3, 32, 32)).shape))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(2, 10)"


@pytest.mark.process
def test_the_watcher_alone_covers_a_plain_import():
    done = run_fresh("""
        from hyperion import compat
        compat.watch_torchvision(); compat.watch_torchvision()
        assert sum(type(finder).__name__ == "_TorchvisionFinder" for finder in sys.meta_path) == 1
        import torchvision
        print(torchvision.__name__)
    """)
    assert done.stdout.strip() == "torchvision", done.stderr


@pytest.mark.process
def test_a_missing_operator_still_raises_torchvisions_own_reason():
    done = run_fresh("""
        from hyperion import compat
        prepared = compat.prepare_torchvision()
        import torch, torchvision
        boxes, scores = torch.tensor([[0., 0., 1., 1.], [2., 2., 3., 3.]]), torch.tensor([.9, .8])
        try:
            print(prepared, sorted(torchvision.ops.nms(boxes, scores, 0.5).tolist()))
        except RuntimeError as error:
            print(prepared, "C++ ops" in str(error))
    """)
    assert done.stdout.strip() in ("True True", "False [0, 1]"), done.stdout + done.stderr


@pytest.mark.process
def test_a_torchvision_broken_otherwise_is_reported_with_its_cause(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('undefined symbol: _ZN3c10')")
    (package / "_C.so").write_bytes(b"not a library")
    done = run_fresh(
        """
        from hyperion import compat
        from hyperion.errors import HyperionError
        compat.watch_torchvision()
        try:
            compat.import_torchvision()
        except HyperionError as error:
            print("undefined symbol" in str(error), "make setup" in str(error), compat._declared)
        """,
        tmp_path,
    )
    assert done.stdout.strip() == "True True []", done.stderr


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_library_that_fails_for_another_reason_does_not_want_cuda(tmp_path, content):
    library = tmp_path / "_C.so"
    library.write_bytes(content)
    assert not compat._wants_cuda(library)


def test_a_library_that_loads_does_not_want_cuda():
    import _ctypes

    assert not compat._wants_cuda(Path(_ctypes.__file__))
