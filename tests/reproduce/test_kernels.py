import json
import site
import sys
from pathlib import Path

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
    assert Path(environment["HYPERION_SILENT_HOSTS"]).is_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" in environment and environment["GIVEN"] == "$$x"  # jupyter_client halves it
    assert json.loads((tmp_path / "kernels/python3/kernel.json").read_text())["language"] == "python"


def test_the_environment_is_inherited_whole_with_this_checkout_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/overlay")
    monkeypatch.setenv("ANYTHING", "kept")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    environment = library_environment()
    assert "PYTHONOPTIMIZE" not in environment
    assert environment["ANYTHING"] == "kept" and environment["PYTHONPATH"].endswith(":/overlay")
    assert environment["PYTHONNOUSERSITE"] == "1" and site.getusersitepackages() not in environment["PYTHONPATH"]


def test_a_long_temporary_folder_does_not_break_socket_names(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with scratch_folder() as folder:
        assert len(folder) < 80
