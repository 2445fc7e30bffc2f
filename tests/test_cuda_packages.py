"""The library imports no package that only CUDA has: its training code is imported while such packages are refused."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hyperion
from hyperion.experiments.megatron.megatron_adaptation import CUDA_ONLY

PACKAGE = Path(hyperion.__file__).resolve().parent
MODULES = sorted(
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for package in ("parallel", "models", "kernels", "training", "engines", "experiments/megatron")
    for file in (PACKAGE / package).rglob("*.py")
)
# Imports the modules that it is given, and prints {module: name of the package that it lacks}. With None in sys.modules, an
# import fails, and a search for the package finds nothing.
IMPORTER = """
import importlib, json, sys
modules, blocked = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(blocked))
lacking = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        while error.name is None:  # transformers raises an error of its own
            error = error.__cause__
        lacking[module] = error.name.partition(".")[0]
print(json.dumps(lacking))
"""


def lacking(modules: list[str], folder: Path) -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", "-c", IMPORTER]
    text = json.dumps([modules, CUDA_ONLY])
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
def test_training_code_is_imported_without_the_packages_that_only_cuda_has(tmp_path):
    (tmp_path / "planted.py").write_text("import apex.optimizers\n")
    found = lacking([*MODULES, "planted"], tmp_path)
    assert found.pop("planted") == "apex"
    # What else lacks are frameworks with environments of their own, accelerate, which is an extra, and on a CPU triton.
    assert set(found.values()) <= {"accelerate", "deepspeed", "lightning_fabric", "megatron", "torchtitan", "triton"}, found
    assert len(MODULES) - len(found) > 60


STATEMENT = re.compile(rf"^\s*(?:from|import)\s+({'|'.join(CUDA_ONLY)})\b", re.MULTILINE)


def test_no_import_statement_names_such_a_package():
    assert STATEMENT.findall("def f():\n    from apex.optimizers import FusedAdam") == ["apex"]
    found = {str(file): STATEMENT.findall(file.read_text("utf-8")) for file in PACKAGE.rglob("*.py")}
    assert len(found) > 400 and {file: packages for file, packages in found.items() if packages} == {}
