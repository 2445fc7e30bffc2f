"""Environments of frameworks: they inherit torch, exist completely or not at all, and nothing installs them implicitly."""

import subprocess
import zipfile
from importlib.util import find_spec

import pytest
import torch

from hyperion.engines import environments
from hyperion.engines.environments import Environment, environment_folder, install, installed_python, why_not_installed
from hyperion.engines.external import why_unavailable
from hyperion.errors import HyperionError


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder with one wheel, and an environment that installs it without a network."""
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    with zipfile.ZipFile(tmp_path / "tiny_framework-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_framework.py", "import torch\n")
        wheel.writestr("tiny_framework-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-framework\nVersion: 1.0\n")
        wheel.writestr("tiny_framework-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny_framework-1.0.dist-info/RECORD", "")
    options = ("--no-index", "--find-links", str(tmp_path))
    monkeypatch.setitem(environments.ENVIRONMENTS, "tiny", Environment(("tiny-framework==1.0",), options))
    monkeypatch.setitem(environments.ENVIRONMENTS, "absent", Environment(("absent-framework==1.0",), options))


@pytest.mark.slow
@pytest.mark.process
def test_an_environment_inherits_torch_and_is_installed_once(shelf):
    assert "hyperion frameworks install tiny" in why_not_installed("tiny")
    assert set(environments.absent_environments()) == set(environments.ENVIRONMENTS)
    lines, distutils = [], find_spec("distutils")
    folder = install("tiny", lines.append)
    assert "tiny" not in environments.absent_environments() and folder == environment_folder("tiny")
    code = "import tiny_framework, torch; print(torch.__version__, torch.__file__)"
    done = subprocess.run([installed_python("tiny"), "-c", code], capture_output=True, text=True, env={}, check=True)
    assert done.stdout.split() == [torch.__version__, torch.__file__]
    lines.clear()
    assert install("tiny", lines.append) == folder and lines == []
    with pytest.raises(HyperionError, match="pip failed"):
        install("absent", lines.append)
    assert not environment_folder("absent").exists()
    # A search for the module pip would turn off setuptools' own distutils, and torch's compiler would fail in this process.
    assert getattr(find_spec("distutils"), "origin", None) == getattr(distutils, "origin", None)


def test_other_requirements_are_another_environment(shelf, monkeypatch):
    before = environment_folder("tiny")
    monkeypatch.setitem(environments.ENVIRONMENTS, "tiny", Environment(("tiny-framework==2.0",)))
    assert environment_folder("tiny") != before


def test_primus_is_found_by_its_sources_and_never_by_the_package_of_its_name(tmp_path):
    assert "another program" in why_unavailable("Primus", {})
    assert "lacks primus/cli/main.py" in why_unavailable("Primus", {"PRIMUS_PATH": str(tmp_path)})
    for file in ("primus/cli/main.py", "examples/run_pretrain.sh"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    found = why_unavailable("Primus", {"PRIMUS_PATH": str(tmp_path)})
    assert found.startswith("unavailable: primus/cli/main.py of Primus was found") and "not observed" in found
