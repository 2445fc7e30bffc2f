"""An environment that is already there: kept as it is, completed beside it, refused when it cannot serve."""

import os
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

from hyperion.errors import HyperionError
from hyperion.install import environment, interpreter, overlay, plan
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import Choice, choose

ROOT = Path(__file__).resolve().parents[2]
CPU_CHOICE = Choice("cpu")
NO_GPU = DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver")
AMD = DetectedAccelerator("rocm", "8 AMD GPU(s), gfx90a", rocm_version=(7, 1))


def write(root: Path, path: str, text: str = "") -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.fixture(scope="module")
def site_python(tmp_path_factory):
    """A site's environment: real interpreter and pip, with torch, torchvision and numpy as small stand-in packages.

    Shared by the tests of this file, which is itself a test: none of them may change it.
    """
    folder = tmp_path_factory.mktemp("site") / "site env"
    venv.create(folder, with_pip=True, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, version in (("torch", "2.11.0"), ("torchvision", "0.26.0"), ("numpy", "2.5.2")):
        write(site, f"{name}/__init__.py")
        write(site, f"{name}/version.py", f"__version__ = '{version}'\ncuda = None\nhip = None\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write(site, f"{name}-{version}.dist-info/METADATA", metadata)
        write(site, f"{name}-{version}.dist-info/RECORD", f"{name}/__init__.py,,\n")
        write(site, f"{name}-{version}.dist-info/INSTALLER", "pip\n")
    return folder / "bin/python"


def wheel(folder: Path, name: str, version: str, needs: str = "", shared: str = "") -> None:
    """A real wheel of one small module, with a file below share/ if one is named."""
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"__version__ = '{version}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        if shared:
            archive.writestr(f"{name}-{version}.data/data/share/{shared}", "")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """pip sees one folder of wheels and no network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


@pytest.fixture
def small_checkout(tmp_path):
    root = tmp_path / "checkout"
    root.mkdir()
    dependencies = ["torch>=2.9", "torchvision>=0.24", "numpy>=2.0", "tinypack>=1.2"]
    lines = f"[project]\nname = 'x'\nversion = '0'\ndependencies = {dependencies}\n"
    (root / "pyproject.toml").write_text(lines + "[project.optional-dependencies]\ndev = ['tinytest>=3']\n")
    (root / "requirements.txt").write_text("tinypack==1.3\ntinytest==3.0\n")
    return root


def listing(python: Path) -> list[str]:
    return environment.site_entries(python.parent.parent)


@pytest.mark.process
def test_missing_packages_are_laid_over_and_nothing_there_changes(site_python, offline, small_checkout):
    wheel(offline, "tinypack", "1.3", "numpy>=1.0")
    wheel(offline, "tinypack", "1.4", "numpy>=1.0")
    wheel(offline, "numpy", "9.0")
    wheel(offline, "torch", "9.0")
    before = listing(site_python)
    variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    code = "import tinypack, numpy, torch; print(tinypack.__version__, numpy.__file__, torch.__file__)"
    words = subprocess.run([site_python, "-c", code], env=variables, capture_output=True, text=True).stdout
    assert words.startswith("1.3 "), "the pinned version is preferred"
    assert words.count("site env") == 2, "numpy and torch stay the site's own"
    assert listing(site_python) == before
    assert variables["PYTHONNOUSERSITE"] == "1"


@pytest.mark.process
def test_the_first_call_already_finds_what_jupyter_needs(site_python, offline, small_checkout, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "/of/the/site")
    wheel(offline, "tinypack", "1.3", shared="jupyter/nbconvert/templates/lab/index.html.j2")
    first = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    shared, _, of_the_site = first["JUPYTER_PATH"].partition(os.pathsep)
    assert (Path(shared) / "nbconvert/templates/lab/index.html.j2").is_file() and of_the_site == "/of/the/site"
    (launcher,) = small_checkout.glob(".overlay/*/hyperion")
    assert f"JUPYTER_PATH={shared}" in launcher.read_text()
    # Another user, who cannot change the checkout, gets the same variables, and nothing is written.
    monkeypatch.setattr(overlay, "write_stamp", lambda *_: pytest.fail("a ready overlay was written"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    written = launcher.stat().st_mtime_ns
    assert overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE) == first
    assert launcher.stat().st_mtime_ns == written


@pytest.mark.process
@pytest.mark.parametrize("why", ["a variable of the container", "a read-only folder"])
def test_where_no_bytecode_is_stored_the_overlay_stores_it(site_python, offline, small_checkout, monkeypatch, why):
    """Otherwise each process compiles the sources of torch again."""
    wheel(offline, "tinypack", "1.3")
    if why == "a variable of the container":
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    else:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        monkeypatch.setattr(interpreter, "_INSPECT", interpreter._INSPECT.replace("os.W_OK", "os.W_OK) and (False"))
    for stored in site_python.parent.parent.glob("lib/python*/site-packages/torch/__pycache__/*"):
        stored.unlink()  # another test may have imported this torch
    before = listing(site_python)
    variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    code = "import torch, tinypack; print(torch.__cached__, tinypack.__cached__, sep='\\n')"
    (launcher,) = small_checkout.glob(".overlay/*/hyperion")
    # The launcher's last line runs hyperion, which this checkout lacks.
    script = launcher.read_text().replace('-m hyperion "$@"', f'-c "{code}"')
    outputs = [
        subprocess.run([site_python, "-c", code], env=variables, capture_output=True, text=True, check=True).stdout,
        subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout,
    ]
    for stored in [path for output in outputs for path in output.splitlines()]:
        assert Path(stored).is_relative_to(launcher.parent / "bytecode") and Path(stored).is_file()
    assert listing(site_python) == before, "the environment itself is left as it is"
    # A nested call, whose process already has the variable, keeps it.
    folder = variables["PYTHONPYCACHEPREFIX"]
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", folder)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    nested = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    assert nested["PYTHONPYCACHEPREFIX"] == folder and "PYTHONDONTWRITEBYTECODE" not in nested


@pytest.mark.process
def test_a_second_call_fetches_nothing_and_extras_are_added_when_needed(site_python, offline, small_checkout):
    wheel(offline, "tinypack", "1.3")
    wheel(offline, "tinytest", "3.0")
    overlay.ensure_overlay(small_checkout, site_python, ["dev"], NO_GPU, CPU_CHOICE)
    for path in offline.iterdir():
        path.unlink()
    variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    assert subprocess.run([site_python, "-c", "import tinypack, tinytest"], env=variables).returncode == 0


@pytest.mark.process
def test_packages_of_single_rows_are_added_if_pip_can_get_them_and_named_once_otherwise(
    site_python, offline, small_checkout, capsys
):
    text = (small_checkout / "pyproject.toml").read_text()
    groups = "inference = ['tinynet>=1', 'tinyquant>=2']\nserving = ['tinyserver>=1']\n"
    (small_checkout / "pyproject.toml").write_text(text + groups)
    for name in ("tinypack", "tinynet", "tinyserver"):
        wheel(offline, name, "1.3")

    def importable(retry=False):
        variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE, retry)
        names = ("tinypack", "tinynet", "tinyquant", "tinyserver")
        return [subprocess.run([site_python, "-c", f"import {one}"], env=variables).returncode == 0 for one in names]

    assert importable() == [True, True, False, True]
    printed = capsys.readouterr().out
    assert "cannot get tinyquant>=2 (ERROR: No matching distribution found for tinyquant>=2)" in printed
    assert importable() == [True, True, False, True] and "cannot get" not in capsys.readouterr().out
    # A later set-up without any wheel keeps the overlay.
    wheels = {path: path.read_bytes() for path in offline.iterdir()}
    for path in wheels:
        path.unlink()
    assert importable(retry=True) == [True, True, False, True]
    for path, content in wheels.items():
        path.write_bytes(content)
    wheel(offline, "tinyquant", "2.0")
    assert importable() == [True, True, False, True]
    assert importable(retry=True) == [True] * 4


@pytest.mark.process
@pytest.mark.long
def test_packages_of_single_rows_that_exclude_each_other_do_not_stop_the_set_up(site_python, offline, small_checkout, capsys):
    text = (small_checkout / "pyproject.toml").read_text()
    (small_checkout / "pyproject.toml").write_text(text + "inference = ['tinynet>=1', 'tinyquant>=1']\n")
    for name, version, needs in (
        ("tinypack", "1.3", ""),
        ("tinynet", "1.0", "tinydep==1"),
        ("tinyquant", "1.0", "tinydep==2"),
        ("tinydep", "1", ""),
        ("tinydep", "2", ""),
    ):
        wheel(offline, name, version, needs)
    variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    assert subprocess.run([site_python, "-c", "import tinypack"], env=variables).returncode == 0
    assert "cannot get tinynet>=1, tinyquant>=1 (" in capsys.readouterr().out


@pytest.mark.process
def test_an_overlay_stays_if_the_packages_that_would_be_added_to_it_cannot_be_installed(
    site_python, offline, small_checkout, monkeypatch
):
    wheel(offline, "tinypack", "1.3")
    wheel(offline, "tinytest", "3.0")
    overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)

    def broken(*given):
        raise HyperionError("the connection broke", where="pip", next_step="again")

    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "pip_install", broken)
        with pytest.raises(HyperionError, match="connection broke"):
            overlay.ensure_overlay(small_checkout, site_python, ["dev"], NO_GPU, CPU_CHOICE)
        variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    assert subprocess.run([site_python, "-c", "import tinypack"], env=variables).returncode == 0


@pytest.mark.process
def test_a_pin_that_conflicts_with_the_site_gives_way(site_python, offline, small_checkout):
    wheel(offline, "tinypack", "1.3", "numpy<2")
    wheel(offline, "tinypack", "1.2", "numpy>=2")
    variables = overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    code = "import tinypack; print(tinypack.__version__)"
    assert subprocess.run([site_python, "-c", code], env=variables, capture_output=True, text=True).stdout == "1.2\n"


@pytest.mark.process
def test_without_a_network_the_missing_are_named_with_the_command(site_python, offline, small_checkout):
    with pytest.raises(HyperionError, match=r"lacks tinypack>=1\.2") as caught:
        overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)
    assert "-m pip install 'tinypack>=1.2'" in caught.value.next_step
    assert not list((small_checkout / ".overlay").glob("*/packages"))


@pytest.mark.process
def test_a_numpy_out_of_range_is_refused_not_replaced(site_python, offline, small_checkout):
    text = (small_checkout / "pyproject.toml").read_text().replace("numpy>=2.0", "numpy>=3.0")
    (small_checkout / "pyproject.toml").write_text(text)
    with pytest.raises(HyperionError, match=r"numpy 2\.5\.2 .* too old: numpy>=3\.0"):
        overlay.ensure_overlay(small_checkout, site_python, [], NO_GPU, CPU_CHOICE)


@pytest.mark.process
def test_a_site_build_that_does_not_fit_the_machine_is_refused(site_python, offline, small_checkout):
    with pytest.raises(HyperionError, match="cannot use this machine's AMD GPU"):
        overlay.ensure_overlay(small_checkout, site_python, [], AMD, choose(AMD))


@pytest.mark.process
def test_an_environment_without_torch_is_refused(tmp_path, small_checkout):
    venv.create(tmp_path / "bare", with_pip=False)
    with pytest.raises(HyperionError, match="has no torch"):
        overlay.ensure_overlay(small_checkout, tmp_path / "bare/bin/python", [], NO_GPU, CPU_CHOICE)


def test_every_requirement_in_pyproject_is_a_lower_bound_that_the_pins_meet():
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
    pins = {overlay._name(name): version for name, version in pins.items()}
    pins |= {"torch": plan.TORCH, "torchvision": plan.TORCHVISION}
    for requirement in overlay.requirements(ROOT, ["lab", "test", "lint"]):
        assert interpreter.in_range(pins[overlay._name(requirement)], requirement), requirement
