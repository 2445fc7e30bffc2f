"""The command `hyperion env`: each option prints what its function returns, and the linter sets the exit code."""

import json

from typer.testing import CliRunner

from hyperion.cli import app, main
from hyperion.doctor.state import State
from hyperion.errors import HyperionError
from hyperion.hardware.topology import Topology
from hyperion.install.machine import DetectedAccelerator, KernelFacts
from hyperion.install.plan import Build
from tests.hardware.machines import facts, gpu


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


def test_the_linter_reads_all_files_and_compares_them(tmp_path):
    one, other, program = tmp_path / "one.sh", tmp_path / "other.sh", tmp_path / "train.py"
    one.write_text("export HSA_ENABLE_SDMA=0 RCCL_DEBUG=INFO\n")
    other.write_text("docker run -e HSA_ENABLE_SDMA=1 image\n")
    program.write_text('import os\nos.environ.update({"RCCL_TIMEOUT": "1"})\nos.putenv("PYTORCH_ROCM_DEVICE", "0")\n')
    done = env("--lint", str(one), str(other), str(program))
    assert done.exit_code == 1 and "findings: 4, in 5 settings" in done.output
    assert f"{one}, {other}, {program}: contradiction: HSA_ENABLE_SDMA is set to '0' and to '1'" in done.output.replace("\n", "")
    one.write_text("export HSA_ENABLE_SDMA=0\nexport HSA_ENABLE_SDMA=1\n")
    assert env("--lint", str(one), str(other)).output.count("contradiction") == 1
    one.write_text("HSA_ENABLE_SDMA=0 a &\nHSA_ENABLE_SDMA=1 b &\nunset HSA_ENABLE_SDMA\n")
    done = env("--lint", str(one), str(other))
    assert done.exit_code == 0 and "findings: 0, in 3 settings" in done.output


def test_a_file_that_cannot_be_read_does_not_hide_the_findings_in_the_others(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("export RCCL_P2P_ENABLE=1\n")
    done = env("--lint", str(tmp_path / "absent.sh"), str(script))
    assert done.exit_code == 2 and "nothing reads RCCL_P2P_ENABLE=1" in done.output and "absent.sh" in done.output
    done = env("--lint", str(tmp_path / "absent.sh"))
    assert done.exit_code == 2 and "findings: 0, in 0 settings" in done.output and "not checked: " in done.output


def test_a_name_whose_library_is_not_installed_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    script = tmp_path / "run.sh"
    script.write_text("export MIOPEN_LOG_LEVEL=3\n")
    done = env("--lint", str(script))
    assert done.exit_code == 0 and "unknown here: MIOPEN_LOG_LEVEL" in done.output and "findings: 0" in done.output


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
    assert "image     documented" not in advice


def test_the_training_image_is_printed_and_not_pulled(monkeypatch):
    monkeypatch.setattr("hyperion.install.machine.collect_facts", lambda: KernelFacts(amd_archs=("gfx942",), rocm_version=(7, 2)))
    advice = env("--install").output
    assert "image     documented  rocm/pytorch-training:v25.6 for Instinct MI300X, MI325X: ROCm 6.3.4, torch 2.8.0a0" in advice
    assert "Python 3.10.17, which are too old for Hyperion" in advice and "2026-04-21" in advice
    assert "pre-training: Llama 3.1 8B, Llama 3.1 70B, FLUX.1-dev\n" in advice and "fine-tuning: Llama 4 Scout" in advice
    assert "docker pull" not in advice


def test_the_fingerprint_and_the_links_are_printed(monkeypatch):
    gpus = tuple(gpu("H200", pci_address=f"0000:c{place}:00.0", uuid=f"uuid-{place}") for place in range(2))
    monkeypatch.setattr("hyperion.hardware.collect_facts", lambda: facts(gpus=gpus))
    links = Topology({(0, 1): "NV18", (1, 0): "NV18"}, {"NV18": "18 NVLinks"}, (0, None), "NVML")
    monkeypatch.setattr("hyperion.hardware.topology.topology_of", lambda devices: links if len(devices) == 2 else None)
    monkeypatch.setattr("hyperion.doctor.checks.require_torch_build", lambda: None)
    done = env()
    content = json.loads(done.stdout)
    assert done.exit_code == 0 and [one["name"] for one in content["gpus"]] == [gpus[0].name] * 2
    assert content["links"] == {
        "between": {"0 to 1": "NV18", "1 to 0": "NV18"},
        "meanings": {"NV18": "18 NVLinks"},
        "numa_nodes": [0, None],
        "source": "NVML",
    }


def test_a_wrong_build_ends_with_its_cause_after_the_fingerprint(monkeypatch, capsys):
    machine = DetectedAccelerator("rocm", "8 AMD GPU(s), gfx90a", rocm_version=(7, 2))
    monkeypatch.setattr("hyperion.doctor.checks.decide", lambda facts: machine)
    monkeypatch.setattr("hyperion.doctor.checks.installed_build", lambda: Build("2.13.0+cpu"))
    monkeypatch.setenv("TORCH", "")
    monkeypatch.setattr("sys.argv", ["hyperion", "env"])
    assert main() == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["links"] == {"between": {}, "source": "torch sees no GPU"}
    assert "cannot use this machine's AMD GPU" in printed.err and "8 AMD GPU(s), gfx90a" in printed.err
