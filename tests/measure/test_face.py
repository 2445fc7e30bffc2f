"""The public face of `hyperion.measure`: its functions stay functions, whatever is imported first."""

import pkgutil
import subprocess
import sys

import pytest

from hyperion import measure

FUNCTIONS = ("time", "compare", "memory", "flops", "explain", "relaunch")


def test_no_folder_or_module_has_the_name_of_a_public_object():
    # Importing a submodule binds its name in the package: a module `memory` would replace the function `measure.memory`.
    submodules = {module.name for module in pkgutil.iter_modules(measure.__path__)}
    assert submodules.isdisjoint(measure.__all__)


@pytest.mark.slow
def test_functions_stay_functions_when_every_submodule_is_imported():
    code = (
        "import importlib, pkgutil, types\n"
        "from hyperion import measure\n"
        "for module in pkgutil.walk_packages(measure.__path__, 'hyperion.measure.'):\n"
        "    importlib.import_module(module.name)\n"
        f"print(*(name for name in {FUNCTIONS} if isinstance(getattr(measure, name), types.FunctionType)))\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == list(FUNCTIONS)


def test_every_public_name_exists_once():
    assert len(set(measure.__all__)) == len(measure.__all__)
    assert all(hasattr(measure, name) for name in measure.__all__)
