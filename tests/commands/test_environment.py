"""The command `hyperion env`: each option prints what its function returns, and the linter sets the exit code."""

import json

import pytest
from typer.testing import CliRunner

from hyperion.cli import app
from hyperion.doctor.state import State
from hyperion.errors import HyperionError
from hyperion.install.machine import KernelFacts


def env(*arguments: str, **variables: str):
    return CliRunner().invoke(app, ["env", *arguments], env=variables)


def test_the_linter_names_findings_in_files_and_in_this_process(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("export RCCL_P2P_ENABLE=1\nexport NCCL_DEBUG=WARN\n")
    done = env("--lint", str(script))
    assert (
        done.exit_code == 1 and "nothing reads RCCL_P2P_ENABLE=1" in done.output and "findings: 1, in 2 settings" in done.output
    )
    script.write_text("export NCCL_DEBUG=WARN\n")
    assert env("--lint", str(script)).exit_code == 0
    assert "nothing reads PYTORCH_ROCM_DEVICE=0" in env("--lint", PYTORCH_ROCM_DEVICE="0").output
    assert isinstance(env(str(script)).exception, HyperionError)


def test_variables_settings_and_advice_are_printed(monkeypatch):
    listed = env("--variables", COLUMNS="200").output
    assert "HSA_ENABLE_SDMA" in listed and "RCCL_TIMEOUT" in listed
    node = State(cores_allowed=64, device_archs=("gfx90a",) * 8)
    monkeypatch.setattr("hyperion.doctor.state.read_state", lambda: node)
    assert "export OMP_NUM_THREADS=8\n" in env("--generate", "bash").stdout
    monkeypatch.setattr(
        "hyperion.install.machine.collect_facts", lambda: KernelFacts(amd_archs=("gfx803",), kfd="ok", rocm_version=(7, 2))
    )
    advice = env("--install").output
    assert "gfx803: unknown, not in PyTorch's wheels" in advice and "wheel     impossible" in advice


@pytest.mark.slow
def test_without_options_the_fingerprint_is_printed():
    assert "torch" in json.loads(env().stdout)
