import json
import os
import site
import sys
from pathlib import Path

import pytest

from hyperion.reproduce import kernels
from hyperion.reproduce.kernels import kernel_manager_class, library_environment, scratch_folder


def test_the_only_kernel_is_this_interpreter_without_user_packages_over_sockets(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/chosen/by/user")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that has compiled
    manager = kernel_manager_class(tmp_path, {"GIVEN": "$x"}, tmp_path)(kernel_name="python3")
    assert manager.kernel_spec.argv[:2] == [sys.executable, "-s"]
    assert list(manager.kernel_spec_manager.find_kernel_specs()) == ["python3"]
    assert manager.transport == "ipc" and manager.connection_file.startswith(str(tmp_path))
    environment = manager.kernel_spec.env
    assert environment["IPYTHONDIR"].startswith(str(tmp_path)) and "TRITON_CACHE_DIR" not in environment
    assert environment["KINETO_LOG_LEVEL"] == "6"
    assert "TORCHINDUCTOR_CACHE_DIR" in environment and environment["GIVEN"] == "$$x"  # jupyter_client halves it
    assert json.loads((tmp_path / "kernels/python3/kernel.json").read_text())["language"] == "python"


def test_a_users_own_level_of_the_profilers_log_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    manager = kernel_manager_class(tmp_path, {}, tmp_path)(kernel_name="python3")
    assert manager.kernel_spec.env["KINETO_LOG_LEVEL"] == "1"


def test_other_libraries_print_no_progress_in_jupyterlab_unless_the_user_wants_it(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    environment = library_environment()  # `hyperion lab` starts JupyterLab, and so its kernels, with this environment
    assert environment["KINETO_LOG_LEVEL"] == "6" and environment["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"


def test_the_environment_is_inherited_whole_with_this_checkout_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/overlay")
    monkeypatch.setenv("ANYTHING", "kept")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    environment = library_environment()
    assert "PYTHONOPTIMIZE" not in environment
    assert environment["ANYTHING"] == "kept" and environment["PYTHONPATH"].endswith(":/overlay")
    assert environment["PYTHONNOUSERSITE"] == "1" and site.getusersitepackages() not in environment["PYTHONPATH"]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, shared with other users, and where the compilers' caches would be in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / f"hyperion-{os.getuid()}"


def test_compilers_caches_outlive_a_call_in_a_private_folder(temporary, tmp_path):
    for scratch in ("first", "second"):
        found = kernels._node_local_caches(tmp_path / scratch)
        assert {Path(folder).parent for folder in found.values()} == {temporary}
    assert temporary.stat().st_mode & 0o777 == 0o700


def _link(place: Path) -> None:
    place.with_name("theirs").mkdir(mode=0o700)
    place.symlink_to("theirs")


def _writable_by_all(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def _of_another_owner(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)


@pytest.mark.parametrize(
    "taken", [_link, _writable_by_all, _of_another_owner, Path.touch, lambda place: place.symlink_to("nowhere")]
)
def test_a_taken_name_gives_this_call_caches_of_its_own_and_a_remedy(temporary, tmp_path, capsys, taken):
    taken(temporary)
    found = kernels._node_local_caches(tmp_path / "scratch")
    assert {Path(folder).parent for folder in found.values()} == {tmp_path / "scratch/caches"}
    printed = capsys.readouterr().err
    assert str(temporary) in printed and "set TRITON_CACHE_DIR" in printed


def test_a_long_temporary_folder_does_not_break_socket_names(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with scratch_folder() as folder:
        assert len(folder) < 80
