"""Each rule of troubleshooting finds its cause in injected facts, and is silent on a healthy machine and just above its bound."""

import errno
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hyperion.commands.monitor import summary_lines
from hyperion.data.store.folders import write_manifest
from hyperion.doctor.batches import largest_fitting, load_step, usable_bytes, within_free_memory
from hyperion.doctor.checks import check_torch_build
from hyperion.doctor.preflight import Need, check_preflight, workloads
from hyperion.doctor.rules import _has_code, apply_rules, rules
from hyperion.doctor.state import DeviceState, State, machine_settings, memory_errors, pcie_link, read_state, startup_settings
from hyperion.engines.environments import environment_folder
from hyperion.errors import HyperionError
from hyperion.hardware import Device, Telemetry, detect
from hyperion.hardware.facts import TRITON_PACKAGES
from hyperion.hardware.monitoring import Reading, summarize
from hyperion.install.advice import advise
from hyperion.install.machine import AMD, NVIDIA, KernelFacts, decide
from hyperion.install.plan import Build
from hyperion.units import GIB, MIB
from tests.hardware.machines import facts, gpu

INF = float("inf")
GPU = DeviceState(127.0, 128.0, "none", 55.0, (16, 16), 0)
NODE = KernelFacts(amd_archs=("gfx90a", "gfx90a"), kfd="ok", rocm_version=(7, 2))
HEALTHY = State(
    variables={"PATH": "/usr/bin"},
    kernel=NODE,
    python="3.11.9",
    build=Build("2.13.0+rocm7.2", hip="7.2.1"),
    archs=("gfx90a", "gfx942"),
    device_error="",
    device_archs=("gfx90a", "gfx90a"),
    devices=(GPU, GPU),
    denied_render=(),
    mpi="/usr/bin/mpirun",
    collectives="RCCL 2.27",
    memory_gib=512,
    memory_available_gib=500,
    memory_limit_gib=INF,
    swap_used_gib=0,
    shm_gib=64,
    cores_allowed=64,
    disks={"/results": (500, 0.9)},
    file_systems={"HF_HOME": "xfs"},
    noexec=(),
    memlock_gib=INF,
    open_files=65536,
    interfaces=("lo", "eth0", "ib0"),
    infiniband=True,
    port_used=False,
    own_address="10.0.0.7",
    compiler="/usr/bin/g++",
    python_header=True,
    triton="",
    governor="performance",
    clock_driver="acpi-cpufreq",
    numa_balancing=False,
    kernel_command="quiet iommu=pt",
    user_site=False,
    library_shadows=(),
    startup=(),
    absent_folders=(),
    onnx_builds=("onnxruntime-migraphx",),
    damaged_data=(),
    log="all is well",
)
H200 = {
    "kernel": KernelFacts(nvidia_driver="580.1"),
    "build": Build("2.13.0", cuda="13.0"),
    "archs": ("sm_80", "sm_90"),
    "device_archs": ("sm_90", "sm_90"),
}
CPU = {"kernel": KernelFacts(), "build": Build("2.13.0+cpu"), "archs": (), "device_archs": (), "devices": ()}


def variables(**given: str) -> dict:
    return {"variables": given}


def device(**changes) -> dict:
    return {"devices": (GPU, replace(GPU, **changes))}


def kernel(**changes) -> dict:
    return {"kernel": replace(NODE, **changes)}


# For each rule: facts with the cause, similar facts without it, and a text of the evidence.
CASES = {
    "masked_gpu": (
        variables(HIP_VISIBLE_DEVICES="9") | {"device_archs": (), "device_error": "No HIP GPUs are available"},
        variables(HIP_VISIBLE_DEVICES="0,1"),
        "HIP_VISIBLE_DEVICES",
    ),
    "nested_masks": (
        variables(ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="2,3"),
        variables(ROCR_VISIBLE_DEVICES="2", HIP_VISIBLE_DEVICES="0"),
        "both masks",
    ),
    "partly_masked": (
        variables(HIP_VISIBLE_DEVICES="1") | {"device_archs": ("gfx90a",)},
        variables(HIP_VISIBLE_DEVICES="1", SLURM_JOB_ID="4711") | {"device_archs": ("gfx90a",)},
        "torch sees 1 of 2 GPUs",
    ),
    "integrated_gpu": (
        {"device_archs": ("gfx90a", "gfx1151"), "archs": ("gfx90a", "gfx1151")},
        {"device_archs": ("gfx1151",), "archs": ("gfx90a", "gfx1151")},
        "GPU 1 (gfx1151)",
    ),
    "unsupported_gpu": (kernel(amd_archs=("gfx803",)), kernel(amd_archs=("gfx1100",)), "gfx803"),
    "missing_architecture": (H200 | {"device_archs": ("sm_120",)}, H200 | {"device_archs": ("sm_86", "sm_90")}, "not for sm_120"),
    "wrong_build": ({"build": Build("2.13.0+cpu")}, H200, "cpu build"),
    "device_permission": (kernel(kfd="denied"), kernel(kfd="absent"), "/dev/kfd"),
    "render_permission": (
        {"denied_render": ("/dev/dri/renderD128",)},
        H200 | {"denied_render": ("/dev/dri/renderD128",)},
        "renderD128",
    ),
    "device_not_passed": (
        {"kernel": KernelFacts(pci=((AMD, "0x0380"),))},
        {"kernel": KernelFacts(pci=((AMD, "0x0300"),))},
        "driver is not visible",
    ),
    "driver_too_old": (
        {"device_error": "The NVIDIA driver on your system is too old (found version 12020)."},
        {"device_error": "Found no NVIDIA driver on your system."},
        "too old",
    ),
    "rocm_mismatch": (kernel(rocm_version=(6, 4)), kernel(rocm_version=(7, 0)), "6.4"),
    "overridden_architecture": (
        variables(HSA_OVERRIDE_GFX_VERSION="10.3.0"),
        H200 | variables(HSA_OVERRIDE_GFX_VERSION="10.3.0"),
        "10.3.0",
    ),
    "fictional_variables": (variables(RCCL_P2P_ENABLE="1"), variables(NCCL_P2P_DISABLE="0"), "RCCL_P2P_ENABLE"),
    "contradictory_variables": (
        variables(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"),
        # A harmful setting is not a contradiction.
        variables(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="0", HSA_TOOLS_LIB="1"),
        "HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1",
    ),
    "harmful_variables": (variables(HSA_TOOLS_LIB="1"), variables(HSA_TOOLS_LIB="librocprofiler64.so.1"), "HSA_TOOLS_LIB=1"),
    "lost_settings": (
        {"startup": (("~/.bashrc", "HSA_XNACK", "1"),)},
        {"startup": (("~/.bashrc", "HSA_XNACK", "1"),)} | variables(HSA_XNACK="1"),
        "~/.bashrc sets HSA_XNACK=1, and here it is not set",
    ),
    "absent_folders": ({"absent_folders": ("ROCM_PATH=/opt/rocm",)}, {"absent_folders": ()}, "ROCM_PATH=/opt/rocm"),
    "onnx_runtime_builds": (
        {"onnx_builds": ("onnxruntime", "onnxruntime-gpu")},
        CPU | {"onnx_builds": ("onnxruntime",)},
        "onnxruntime, onnxruntime-gpu",
    ),
    "memory_used_by_others": (device(free_gib=100.0), device(free_gib=116.0), "GPU 1: 28.0 GiB"),
    "throttled": (device(throttle="hw_thermal"), device(throttle="none"), "GPU 1: hw_thermal"),
    "hot": (device(temperature_c=97.0), device(temperature_c=89.0), "97 °C"),
    "narrow_link": (device(link=(4, 16)), device(link=(8, 8)), "GPU 1: 4 of 16"),
    "memory_errors": (device(uncorrected_errors=3), device(uncorrected_errors=0), "GPU 1: 3"),
    "low_memory": ({"memory_available_gib": 1.5}, {"memory_available_gib": 2.0}, "1.5 GiB"),
    "container_memory": ({"memory_limit_gib": 4.0}, {"memory_limit_gib": 8.0}, "4.0 GiB"),
    "swapping": ({"swap_used_gib": 3.0}, {"swap_used_gib": 1.0}, "3.0 GiB"),
    "small_shared_memory": ({"shm_gib": 0.0625}, {"shm_gib": 1.0}, "0.06 GiB"),
    "disk_full": ({"disks": {"/results": (0.4, 0.9)}}, {"disks": {"/results": (1.0, 0.9)}}, "/results: 0.4 GB"),
    "inodes_used_up": ({"disks": {"/home": (50, 0.004)}}, {"disks": {"/home": (50, 0.01)}}, "/home"),
    "cache_on_network": (
        {"file_systems": {"TRITON_CACHE_DIR": "nfs4"}},
        {"file_systems": {"TRITON_CACHE_DIR": "tmpfs"}},
        "TRITON_CACHE_DIR (nfs4)",
    ),
    "no_execution": ({"noexec": ("/scratch",)}, {"noexec": ()}, "/scratch"),
    "locked_memory": ({"memlock_gib": 0.0078}, {"memlock_gib": 0.0078, "infiniband": False}, "InfiniBand"),
    "few_open_files": ({"open_files": 256}, {"open_files": 1024}, "256"),
    "absent_interface": (
        variables(NCCL_SOCKET_IFNAME="=eth"),
        variables(NCCL_SOCKET_IFNAME="eth,ib", GLOO_SOCKET_IFNAME="eth0"),
        "NCCL_SOCKET_IFNAME==eth, but",
    ),
    "port_in_use": (variables(MASTER_PORT="29500") | {"port_used": True}, variables(MASTER_PORT="29500"), "29500"),
    "invalid_port": (variables(MASTER_PORT="99999"), variables(MASTER_PORT="65535"), "MASTER_PORT=99999"),
    "own_name": (
        variables(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8") | {"own_address": "127.0.1.1"},
        variables(WORLD_SIZE="8", LOCAL_WORLD_SIZE="8") | {"own_address": "127.0.1.1"},
        "127.0.1.1",
    ),
    "proxied_loopback": (
        variables(http_proxy="proxy:3128"),
        variables(HTTP_PROXY="proxy:3128", NO_PROXY="localhost"),
        "proxy:3128",
    ),
    "triton_missing": ({"triton": "unavailable: Triton is not installed"}, CPU | {"triton": "unavailable"}, "Triton"),
    "compiler_missing": ({"compiler": ""}, {"compiler": "/usr/bin/clang++"}, "no g++"),
    "header_missing": ({"python_header": False}, CPU | {"python_header": False}, "Python.h"),
    "damaged_data": ({"damaged_data": ("wikitext-2/train.npy",)}, {"damaged_data": ()}, "train.npy"),
    "slow_governor": (
        {"governor": "powersave"},
        {"governor": "powersave", "clock_driver": "amd-pstate-epp"},
        "powersave of acpi-cpufreq",
    ),
    "numa_balancing": ({"numa_balancing": True}, H200 | {"numa_balancing": True}, "NUMA"),
    "iommu": ({"kernel_command": "quiet"}, kernel(amd_archs=("gfx90a",)) | {"kernel_command": "quiet"}, "pass-through"),
    "too_many_threads": (
        variables(OMP_NUM_THREADS="64", LOCAL_WORLD_SIZE="8"),
        variables(OMP_NUM_THREADS="8", LOCAL_WORLD_SIZE="8"),
        "512 threads on 64",
    ),
    "user_packages": ({"user_site": True}, {"user_site": False}, "site-packages"),
    "shadowed_libraries": ({"library_shadows": ("/usr/local/cuda/lib64",)}, {"library_shadows": ()}, "/usr/local/cuda/lib64"),
}
# Rules that find another cause in the facts of a case: with the cause, and without it.
COMPANIONS = {
    "contradictory_variables": (set(), {"harmful_variables"}),
    "device_permission": (set(), {"device_not_passed"}),  # a GPU without /dev/kfd
    "log_fragmentation": ({"log_out_of_memory"}, {"log_out_of_memory"}),
    # Modules that are missing for another reason.
    "log_deepspeed_version": (set(), {"log_module_missing"}),
    "log_build_without_torch": (set(), {"log_module_missing"}),
}
LOGS = tomllib.loads(Path(__file__).with_name("logs.toml").read_text())
BY_ID = {rule.id: rule for rule in rules()}


def test_there_are_cases_for_exactly_the_rules_and_ids_are_unique():
    assert set(CASES) | set(LOGS) == set(BY_ID) and len(BY_ID) == len(rules()) >= 39


def test_the_change_log_counts_the_rules():
    text = (Path(__file__).resolve().parents[2] / "CHANGELOG.md").read_text("utf-8")
    assert f" {len(rules())} rules of troubleshooting" in text


def test_a_healthy_machine_has_no_finding():
    assert [result for result in apply_rules(HEALTHY) if result.result != "ok"] == []


def findings(**changes) -> dict:
    """Return the results of the rules that find a cause in the facts of a healthy machine with some changes."""
    return {one.id: one for one in apply_rules(replace(HEALTHY, **changes)) if one.result in ("warn", "fail")}


@pytest.mark.parametrize("rule", CASES)
def test_the_rule_finds_its_cause_and_only_that(rule):
    cause, similar, text = CASES[rule]
    with_cause, without = COMPANIONS.get(rule, (set(), set()))
    found = findings(**cause)
    assert found.keys() == {rule} | with_cause and text in found[rule].evidence and found[rule].remedy
    assert findings(**similar).keys() == without and BY_ID[rule].apply(replace(HEALTHY, **similar)).result == "ok"


@pytest.mark.parametrize("rule", LOGS)
def test_the_rule_about_logs_finds_its_line_and_not_a_similar_one(rule):
    *positives, negative = LOGS[rule]
    with_cause, without = COMPANIONS.get(rule, (set(), set()))
    for positive in positives:
        found = findings(log=f"first line\n{positive}\nlast line")
        assert found.keys() == {rule} | with_cause and found[rule].result == "warn" and found[rule].remedy
        assert found[rule].evidence in " ".join(positive.split())
    assert findings(log=negative).keys() == without and BY_ID[rule].apply(replace(HEALTHY, log=negative)).result == "ok"


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("log_hip_library_missing", "Library not found: librocm_smi64.so"),
        (
            "log_port_in_use",
            "ERROR:    [Errno 98] error while attempting to bind on address ('::', 8000): address already in use",
        ),
        ("log_ninja", "zsh: command not found: ninja"),
        ("log_python_unsupported", "Python version not supported"),
        ("log_python_unsupported", "error: Python version 3.14 is not supported"),
        ("log_module_missing", "No module named 'cbor2'"),
        ("log_module_missing", "ImportError: No module named 'cbor2'"),
        ("log_module_missing", "No DeepSpeed data available"),
    ],
)
def test_messages_of_shells_servers_and_scripts_are_found(rule, line):
    found = findings(log=f"first line\n{line}\nlast line")
    assert found.keys() == {rule} and found[rule].evidence in line


@pytest.mark.parametrize(
    "line",
    [
        "loaded librocm_smi64.so",
        "Library not found: libfoo.so, a fallback is used",
        "zsh: command not found: ninja_theme",
        "Python version 3.12.3 is supported; AVX-512 not supported",
        "WARNING: apex is not used: No module named 'apex'",
        "No module named 'apex' is needed",
        "DeepSpeed data available",
    ],
)
def test_similar_lines_of_ordinary_logs_are_no_findings(line):
    assert not findings(log=f"first line\n{line}\nlast line")


@pytest.mark.slow
@pytest.mark.parametrize("rule", LOGS)
def test_a_long_line_that_almost_has_the_pattern_is_searched_in_little_time(rule):
    # A pattern that tries every end again for every beginning would take minutes for the 4 MiB of a log that are read.
    parts = [example[: len(example) * share // 4] for examples in LOGS.values() for example in examples for share in (1, 2, 3)]
    for part in {"a", "1", "' ", *(part.strip().replace("\n", " ") for part in parts)} - {""}:
        log = (part + "x") * ((1 << 17) // (len(part) + 1))
        started_s = time.process_time()
        BY_ID[rule].detect(State(log=log))
        assert time.process_time() - started_s < 2, part


@pytest.mark.parametrize(
    "error", ["No CUDA GPUs are available", "Found no NVIDIA driver on your system.", "CUDA unknown error - this may be due to"]
)
def test_another_error_of_the_device_does_not_blame_the_driver(error):
    assert "driver_too_old" not in findings(device_error=error)
    assert "driver_too_old" in findings(device_error="CUDA driver version is insufficient for CUDA runtime version")


NO_GPU_SEEN = {"device_archs": (), "device_error": "No CUDA GPUs are available"}
TWO_NVIDIA = {"kernel": KernelFacts(nvidia_driver="580.1", pci=((NVIDIA, "0x0302"),) * 2)}


@pytest.mark.parametrize(
    "changes",
    [
        {"build": Build("2.13.0+cpu"), "device_archs": ()} | variables(CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="4711"),
        H200 | variables(CUDA_VISIBLE_DEVICES="0") | {"device_archs": (), "device_error": "The NVIDIA driver is too old"},
        H200 | variables(CUDA_VISIBLE_DEVICES="0") | {"device_archs": (), "device_error": "Found no NVIDIA driver"},
        H200 | NO_GPU_SEEN | variables(HIP_VISIBLE_DEVICES="9", ROCR_VISIBLE_DEVICES="9"),
        H200 | TWO_NVIDIA | variables(HIP_VISIBLE_DEVICES="0") | {"device_archs": ("sm_90",)},
        NO_GPU_SEEN | variables(GPU_DEVICE_ORDINAL="9"),
        NO_GPU_SEEN | variables(CUDA_VISIBLE_DEVICES="0") | kernel(kfd="denied"),
        NO_GPU_SEEN | variables(HIP_VISIBLE_DEVICES="0") | {"kernel": KernelFacts(nvidia_driver="580.1")},
    ],
)
def test_a_mask_that_hides_no_gpu_is_not_blamed(changes):
    assert not {"masked_gpu", "partly_masked"} & findings(**changes).keys()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (H200 | NO_GPU_SEEN | variables(CUDA_VISIBLE_DEVICES="9"), "masked_gpu"),
        (NO_GPU_SEEN | variables(CUDA_VISIBLE_DEVICES=""), "masked_gpu"),
        (NO_GPU_SEEN | variables(ROCR_VISIBLE_DEVICES="9"), "masked_gpu"),
        (NO_GPU_SEEN | variables(HIP_VISIBLE_DEVICES="9") | {"device_error": "HIP error: invalid device ordinal"}, "masked_gpu"),
        (H200 | variables(CUDA_VISIBLE_DEVICES="9") | {"device_archs": (), "device_error": ""}, "masked_gpu"),
        (H200 | TWO_NVIDIA | variables(CUDA_VISIBLE_DEVICES="0") | {"device_archs": ("sm_90",)}, "partly_masked"),
        (variables(CUDA_VISIBLE_DEVICES="0") | {"device_archs": ("gfx90a",)}, "partly_masked"),
    ],
)
def test_the_masks_that_the_runtime_of_the_build_reads_are_blamed(changes, rule):
    assert findings(**changes).keys() == {rule}


def test_an_index_that_does_not_exist_is_a_gpu_that_was_expected():
    found = findings(**variables(HIP_VISIBLE_DEVICES="0,1,7"))
    assert "torch sees 2 of 3 GPUs" in found["partly_masked"].evidence


def test_the_gpu_of_a_processor_may_be_hidden_and_is_not_missed():
    node = kernel(amd_archs=("gfx90a", "gfx1036"))
    assert findings(**node, device_archs=("gfx90a", "gfx1036")).keys() == {"integrated_gpu"}
    # The state after the next step of this rule.
    assert findings(**node, device_archs=("gfx90a",), **variables(HIP_VISIBLE_DEVICES="0")) == {}
    wrong = findings(**node, device_archs=("gfx1036",), **variables(HIP_VISIBLE_DEVICES="1"))
    assert "torch sees 1 of 2 GPUs" in wrong["partly_masked"].evidence


@pytest.mark.parametrize(
    ("arch", "names", "runs"),
    [
        ("sm_89", {"sm_80"}, True),
        ("sm_90", {"sm_80", "sm_86"}, False),
        ("sm_120", {"sm_100"}, False),
        ("sm_90", {"compute_80"}, True),
    ],
)
def test_binary_code_runs_on_its_major_version_and_ptx_on_later_ones_too(arch, names, runs):
    assert _has_code(arch, names) == runs


def test_an_unsupported_gpu_is_no_reason_to_use_the_cpu_if_another_gpu_is_usable():
    other = findings(**kernel(amd_archs=("gfx90a", "gfx803")))["unsupported_gpu"]
    assert other.evidence.endswith("no code for gfx803: the other GPUs are used") and "cpu" not in other.remedy.lower()
    both = KernelFacts(amd_archs=("gfx803",), kfd="ok", nvidia_driver="580.1")
    assert findings(**H200 | {"kernel": both})["unsupported_gpu"].evidence.endswith("the NVIDIA GPU is used")
    assert findings(**kernel(amd_archs=("gfx1036",)))["unsupported_gpu"].evidence.endswith("the CPU is used")


@pytest.mark.parametrize(
    ("override", "build", "nvidia", "found"),
    [
        ("", Build("2.13.0+cpu"), None, True),
        ("cpu", Build("2.13.0+cpu"), None, False),
        ("", HEALTHY.build, "580.1", True),
        ("rocm", HEALTHY.build, "580.1", False),
        ("rocm", Build("2.13.0", cuda="13.0"), "580.1", True),
    ],
)
def test_the_requested_build_is_not_wrong(override, build, nvidia, found):
    changes = kernel(nvidia_driver=nvidia) | {"build": build} | variables(TORCH=override)
    assert ("wrong_build" in findings(**changes)) is found
    machine = decide(changes["kernel"])
    assert (check_torch_build(build, machine, override).status == "fail") is found


@pytest.mark.parametrize(
    ("driver", "found"),
    [("intel_pstate", False), ("amd-pstate-epp", False), ("intel_cpufreq", True), ("amd-pstate", True), ("cppc_cpufreq", True)],
)
def test_the_governor_powersave_is_slow_only_if_it_keeps_the_lowest_clock(driver, found):
    assert ("slow_governor" in findings(governor="powersave", clock_driver=driver)) is found


def test_a_compiler_that_cxx_names_and_does_not_exist_is_named():
    evidence = findings(compiler="", **variables(CXX="ccache g++"))["compiler_missing"].evidence
    assert evidence == "CXX=ccache g++ is not a program, and torch.compile takes it as one path"


def test_the_next_step_for_a_missing_triton_names_each_package_that_contains_it():
    remedy = BY_ID["log_triton_missing"].remedy
    assert set(TRITON_PACKAGES) == {"triton", "triton-rocm", "pytorch-triton-rocm"}
    assert all(re.search(rf"(?<![\w-]){name}(?![\w-])", remedy) for name in TRITON_PACKAGES)


@pytest.mark.parametrize("rule", [rule for rule in rules() if rule.per_device], ids=lambda rule: rule.id)
def test_a_quantity_that_a_gpu_does_not_report_is_not_ok(rule):
    blind = replace(GPU, **{rule.per_device: None})
    for devices, unknown in (((blind, blind), "0, 1"), ((GPU, blind), "1")):
        result = rule.apply(replace(HEALTHY, devices=devices))
        assert (result.result, result.evidence) == ("skip", f"unknown: {rule.per_device} of GPU {unknown}")
    cause, _, text = CASES[rule.id]
    result = rule.apply(replace(HEALTHY, devices=(blind, cause["devices"][1])))
    assert result.result == rule.severity and text in result.evidence
    assert rule.apply(replace(HEALTHY, **CPU)).result == "ok"


def test_memory_in_use_is_measured_against_the_memory_of_its_own_gpu():
    small = replace(GPU, free_gib=10.0, total_gib=16.0)
    assert findings(devices=(GPU, small))["memory_used_by_others"].evidence.endswith("GPU 1: 6.0 GiB")


def test_uncorrected_errors_of_both_vendors_are_read(tmp_path):
    class Nvml:
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

        def __init__(self, errors):
            self.errors = errors

        def nvmlInit(self):
            pass

        def nvmlDeviceGetHandleByUUID(self, uuid):
            return uuid

        def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
            assert (handle, kind, counter) == (f"GPU-{nvidia.uuid}", 1, 0)
            if self.errors is None:
                raise RuntimeError("Not Supported")
            return self.errors

    nvidia, amd = (detect(facts(gpus=(gpu(name),))) for name in ("H200", "MI250X"))
    assert [memory_errors(nvidia, tmp_path, Nvml(errors)) for errors in (0, 2, None)] == [0, 2, None]
    assert memory_errors(amd, tmp_path) is None
    (tmp_path / "ras").mkdir()
    (tmp_path / "ras/umc_err_count").write_text("ue: 3\nce: 5\n")
    assert memory_errors(amd, tmp_path) == 3


@pytest.mark.parametrize("rule", [rule for rule in rules() if rule.needs], ids=lambda rule: rule.id)
def test_an_unknown_fact_is_skipped_and_not_ok(rule):
    for name in rule.needs:
        result = rule.apply(replace(HEALTHY, **{name: None}))
        assert result.result == "skip" and name in result.evidence


def test_the_facts_of_this_machine_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "train.log").write_text("x" * 100 + "\nloss: nan")
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = busy.getsockname()[1]
        state = read_state(log=tmp_path / "train.log", variables={"MASTER_PORT": str(port)})
        assert state.port_used and state.log.endswith("loss: nan")
    assert read_state(variables={"MASTER_PORT": str(port)}).port_used is False
    assert state.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert state.memory_gib > state.memory_available_gib > 0 and state.disks
    assert "lo" in state.interfaces and state.cores_allowed > 0
    results = {result.id: result.result for result in apply_rules(state)}
    assert results["log_not_a_number"] == "warn" and results["port_in_use"] == "fail"


@pytest.mark.parametrize("port", ["99999", "-1", "0", "²", "port", "1" * 400])
def test_what_is_no_port_is_unknown_and_has_a_rule(port):
    state = read_state(variables={"MASTER_PORT": port})
    assert state.port_used is None and BY_ID["invalid_port"].apply(state).result == "fail"
    assert BY_ID["port_in_use"].apply(state).result == "skip"


def test_system_files_are_read_below_the_root(tmp_path):
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/numa_balancing").write_text("1\n")
    (tmp_path / "proc/cmdline").write_text("quiet iommu=pt\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{6 << 30}\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    clock = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    clock.mkdir(parents=True)
    (clock / "scaling_governor").write_text("powersave\n")
    (clock / "scaling_driver").write_text("intel_pstate\n")
    state = read_state(tmp_path)
    assert (state.governor, state.clock_driver) == ("powersave", "intel_pstate")
    assert (state.numa_balancing, state.kernel_command, state.memory_limit_gib, state.infiniband) == (
        True,
        "quiet iommu=pt",
        6.0,
        True,
    )
    assert read_state(tmp_path / "absent").memory_limit_gib == INF


def test_the_file_system_of_a_cache_is_that_of_its_real_folder(tmp_path, monkeypatch):
    (tmp_path / "gpfs/u").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "gpfs/u")
    kinds = {"/": "ext4", f"{tmp_path}/gpfs": "gpfs", f"{tmp_path}/nfs": "nfs4", f"{tmp_path}/nfs/local": "xfs"}
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    (tmp_path / "nfs/local").mkdir(parents=True)
    monkeypatch.setattr("hyperion.doctor.state.psutil.disk_partitions", lambda all: mounts)
    monkeypatch.setattr("hyperion.doctor.state.home_folder", lambda: tmp_path / "home")
    given = {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/nfs/not/yet", "TRITON_CACHE_DIR": f"{tmp_path}/nfs/local/triton"}
    state = read_state(variables=given)
    found = {name: state.file_systems[name] for name in (*given, "HF_HOME", "MIOPEN_USER_DB_PATH")}
    assert list(found.values()) == ["nfs4", "xfs", "gpfs", "gpfs"]
    assert "TORCHINDUCTOR_CACHE_DIR (nfs4)" in BY_ID["cache_on_network"].apply(state).evidence
    local = {one.name: one.value for one in machine_settings(state)}
    assert local["TORCHINDUCTOR_CACHE_DIR"].startswith(tempfile.gettempdir()) and "TRITON_CACHE_DIR" not in local
    assert "TORCHINDUCTOR_CACHE_DIR" not in read_state(variables={}).file_systems  # its default is a temporary folder


def test_a_folder_without_execution_is_found(tmp_path, monkeypatch):
    statvfs = os.statvfs

    def without_execution(place):
        facts = statvfs(place)
        flags = facts.f_flag | os.ST_NOEXEC if Path(place) == tmp_path else facts.f_flag & ~os.ST_NOEXEC
        return SimpleNamespace(**{name: getattr(facts, name) for name in dir(facts) if name.startswith("f_")} | {"f_flag": flags})

    monkeypatch.setattr("hyperion.doctor.state.os.statvfs", without_execution)
    assert read_state().noexec == ()
    monkeypatch.setattr("hyperion.doctor.state.home_folder", lambda: tmp_path / "not/yet")
    assert read_state().noexec == (str(tmp_path),)


def test_device_files_that_this_user_may_not_open_are_found(tmp_path, monkeypatch):
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name in ("card0", "renderD128", "renderD129"):
        (tmp_path / "dev/dri" / name).write_text("")
    access = os.access
    monkeypatch.setattr("os.access", lambda file, *mode, **how: "D129" not in str(file) and access(file, *mode, **how))
    assert read_state(tmp_path).denied_render == (f"{tmp_path}/dev/dri/renderD129",)


def test_packages_and_libraries_of_other_places_are_found(tmp_path, monkeypatch):
    for name in ("cuda/libnccl.so.2", "rocm/libamdhip64.so", "plain/libplain.so"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    builds = {"onnxruntime": ["onnxruntime-gpu", "onnxruntime", "onnxruntime"], "onnx": ["onnx"]}
    monkeypatch.setattr("hyperion.doctor.state.packages_distributions", lambda: builds)
    monkeypatch.setattr("hyperion.doctor.state.site.getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr("hyperion.doctor.state.site.ENABLE_USER_SITE", True)
    state = read_state(variables={"LD_LIBRARY_PATH": f"{tmp_path}/cuda::{tmp_path}/plain:{tmp_path}/rocm:{tmp_path}/absent"})
    assert state.library_shadows == (f"{tmp_path}/cuda", f"{tmp_path}/rocm")
    assert state.onnx_builds == ("onnxruntime", "onnxruntime-gpu") and state.user_site
    monkeypatch.setattr("hyperion.doctor.state.site.ENABLE_USER_SITE", False)
    assert not read_state().user_site


def test_damaged_data_are_found_by_their_sizes(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    for name in ("whole", "short", "lacking", "unreadable", "without"):
        folder = tmp_path / "processed" / name
        folder.mkdir(parents=True)
        (folder / "train.npy").write_bytes(b"12345678")
        if name != "without":
            write_manifest(folder, name=name, source="synthetic", detail="")
    assert read_state().damaged_data == ()
    (tmp_path / "processed/short/train.npy").write_bytes(b"1234")
    (tmp_path / "processed/lacking/train.npy").unlink()
    (tmp_path / "processed/unreadable/manifest.json").write_text("{")
    unreadable, *files = sorted(read_state().damaged_data, key=lambda entry: not entry.startswith("unreadable"))
    assert unreadable.startswith("unreadable: ") and sorted(files) == ["lacking/train.npy", "short/train.npy"]


def test_the_compiler_is_found_if_and_only_if_torch_finds_it(tmp_path, monkeypatch):
    from torch._inductor.cpp_builder import cpp_compiler_search
    from torch._inductor.exc import InvalidCxxCompiler

    for name in ("clang++", "ccache"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {}
    for cxx in ("g++", "clang++", f"{tmp_path}/clang++", "ccache clang++", f"{tmp_path}/g++"):
        given = {} if cxx == "g++" else {"CXX": cxx}
        found[cxx] = bool(read_state(variables=given).compiler)
        with nullcontext() if found[cxx] else pytest.raises(InvalidCxxCompiler):
            assert cpp_compiler_search((cxx,)) == cxx
    assert list(found.values()) == [False, True, True, False, False]


def test_folders_that_this_user_may_not_search_are_facts_and_no_error(tmp_path, monkeypatch):
    stat = os.stat

    def refused(path, *args, **options):
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr("os.stat", refused)
    monkeypatch.setenv("HYPERION_RESULTS", f"{tmp_path}/results")
    state = read_state(variables={"TRITON_CACHE_DIR": f"{tmp_path}/triton", "CUDA_HOME": f"{tmp_path}/cuda"})
    assert str(tmp_path) in (state.disks or {}) and "TRITON_CACHE_DIR" in (state.file_systems or {})
    assert state.absent_folders == (f"CUDA_HOME={tmp_path}/cuda",)


@pytest.mark.parametrize("threads", ["²", "4,2", "9" * 5000])
def test_a_number_of_threads_that_is_no_number_is_not_counted(threads):
    assert "too_many_threads" not in findings(**variables(OMP_NUM_THREADS=threads))
    assert "too_many_threads" not in findings(**variables(OMP_NUM_THREADS="64", LOCAL_WORLD_SIZE=threads))


def test_an_asterisk_excludes_this_machine_from_the_proxy():
    assert "proxied_loopback" not in findings(**variables(http_proxy="http://proxy:3128", no_proxy="*"))
    assert "proxied_loopback" in findings(**variables(http_proxy="http://proxy:3128", no_proxy="*.example.org"))


def test_settings_of_start_up_files_and_absent_folders_are_read(tmp_path):
    (tmp_path / "etc/profile.d").mkdir(parents=True)
    (tmp_path / "etc/profile.d/rocm.sh").write_text("export HSA_ENABLE_SDMA=0\nexport NCCL_DEBUG=WARN\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.bashrc").write_text(
        "NCCL_DEBUG=INFO\nexport EDITOR=vi HIP_VISIBLE_DEVICES=$OTHER\necho \xff'unclosed\n", "latin-1"
    )
    (tmp_path / "home/.zshrc").write_text("export NCCL_DEBUG=TRACE\n")
    bashrc, profile = str(tmp_path / "home/.bashrc"), str(tmp_path / "etc/profile.d/rocm.sh")
    expected = {(profile, "HSA_ENABLE_SDMA", "0"), (bashrc, "NCCL_DEBUG", "INFO")}
    for shell in ("/bin/bash", "", "/bin/unknown"):
        assert set(startup_settings(tmp_path, tmp_path / "home", shell)) == expected
    assert ("NCCL_DEBUG", "TRACE") in [pair[1:] for pair in startup_settings(tmp_path, tmp_path / "home", "/usr/bin/zsh")]
    state = read_state(variables={"CUDA_HOME": str(tmp_path / "cuda"), "PYTHONPATH": f"{tmp_path}:{tmp_path}/no:"})
    assert state.absent_folders == (f"CUDA_HOME={tmp_path}/cuda", f"PYTHONPATH={tmp_path}/no")


def test_the_output_of_the_monitor_is_a_log_that_rules_understand():
    cpu = Device("cpu", 0, "CPU", "x86_64", 1 << 34, 2, None, "cpu")

    def output(memory_gib: list[float], utilization: float) -> str:
        readings = [
            Reading(float(n), Telemetry(), utilization_percent=utilization, memory_bytes=gib * (1 << 30))
            for n, gib in enumerate(memory_gib)
        ]
        return "\n".join(summary_lines([summarize(cpu, readings, 1.0)], 0.0))

    level, leak = [min(n, 9) for n in range(60)], [n / 100 for n in range(60)]
    assert findings(log=output(leak, 12.0)).keys() == {"log_memory_growth", "log_low_utilization"}
    assert findings(log=output(level, 97.5)).keys() == findings(log=output(leak[:29], 50.0)).keys() == set()


def test_the_link_of_a_device_is_its_number_of_lanes(tmp_path):
    (tmp_path / "current_link_width").write_text("8\n")
    assert pcie_link(tmp_path) is None
    (tmp_path / "max_link_width").write_text("16\n")
    assert pcie_link(tmp_path) == (8, 16)


@pytest.mark.parametrize("limit", [0, 1, 37, 64, 100])
def test_the_largest_batch_that_fits_is_found_in_few_steps(limit):
    import torch

    def step(batch: int) -> None:
        if batch > limit:
            raise torch.OutOfMemoryError("CUDA out of memory") if batch % 2 else RuntimeError("can't allocate memory")

    largest, tried = largest_fitting(step, at_most=64)
    assert largest == min(limit, 64) and max(tried) <= 64 and len(tried) <= 13


_FIT = """
from types import SimpleNamespace
import torch
from hyperion.doctor import batches
batches.psutil.virtual_memory = lambda: SimpleNamespace(available=384 << 20)
with batches.within_free_memory():
    print(batches.largest_fitting(lambda batch: torch.ones(batch << 20, dtype=torch.uint8), at_most=256, on_line=id)[0])
print(torch.ones(256 << 20, dtype=torch.uint8).numel() >> 20)
"""


@pytest.mark.process
def test_on_a_cpu_an_allocation_beyond_the_free_memory_fails_and_does_not_end_the_process():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", _FIT], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    within, after = map(int, ran.stdout.split())
    assert 96 <= within <= 192 and after == 256


@pytest.mark.parametrize(("free_gib", "usable_gib"), [(0.25, 0.125), (1, 0.5), (4, 2), (8, 6), (10, 8), (20, 16), (100, 80)])
def test_a_fifth_of_the_free_memory_and_2_gib_or_half_are_left(free_gib, usable_gib):
    assert abs(usable_bytes(int(free_gib * GIB)) - usable_gib * GIB) <= 1


@pytest.mark.parametrize("free", [-GIB, 0, 255 * MIB])
def test_with_too_little_free_memory_nothing_is_tried(free):
    with pytest.raises(HyperionError, match=f"{max(0, free) // MIB} MiB of memory are free") as caught:
        usable_bytes(free)
    assert "end other processes" in (caught.value.next_step or "")


def test_the_free_memory_is_read_again_before_each_batch(monkeypatch):
    free = iter([20 * GIB, 8 * GIB, 4 * GIB, 16 * GIB, 100 * MIB])  # at the start, and before the batches 1, 2, 4 and 8
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("hyperion.doctor.batches.memory_limit_bytes", lambda: None)
    monkeypatch.setattr("hyperion.doctor.batches.psutil.virtual_memory", lambda: SimpleNamespace(available=next(free)))
    before, lines, limits_gib = resource.getrlimit(resource.RLIMIT_DATA), [], []

    def step(batch: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        limits_gib.append((limit - psutil.Process().memory_info().data) / GIB)

    with pytest.raises(HyperionError, match="100 MiB of memory are free"), within_free_memory():
        largest_fitting(step, on_line=lines.append)
    assert limits_gib == pytest.approx([6, 2, 12.8], abs=0.1)
    assert lines == [f"trying a batch of {batch}" for batch in (1, 2, 4, 8)]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_another_error_than_memory_is_raised(tmp_path):
    with pytest.raises(ValueError, match="shape"):
        largest_fitting(lambda batch: (_ for _ in ()).throw(ValueError("shape")))
    (tmp_path / "work.py").write_text("def step(batch):\n    if batch > 5: raise MemoryError\n")
    assert largest_fitting(load_step(tmp_path / "work.py"))[0] == 5
    (tmp_path / "empty.py").write_text("")
    for name in ("empty.py", "absent.py"):
        with pytest.raises(HyperionError):
            load_step(tmp_path / name)


def test_a_file_with_step_may_import_its_neighbours_and_parse_its_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hyperion", "doctor", "--fit", "work.py"])
    (tmp_path / "neighbour_of_work.py").write_text("LIMIT = 3\n")
    code = "import argparse\nfrom neighbour_of_work import LIMIT\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "work.py").write_text(code + "def step(batch):\n    if batch > LIMIT: raise MemoryError\n")
    path = list(sys.path)
    assert largest_fitting(load_step(tmp_path / "work.py"))[0] == 3
    assert sys.path == path and sys.argv[0] == "hyperion"


def test_the_log_may_be_a_pipe():
    reader, writer = os.pipe()
    text = "x" * 50_000 + "\nthe last line\n"
    os.write(writer, text.encode())
    os.close(writer)
    try:
        assert (read_state(log=Path(f"/dev/fd/{reader}")).log or "").endswith("xxx\nthe last line\n")
    finally:
        os.close(reader)


@pytest.mark.parametrize("workload", workloads())
def test_preflight_of_a_node_that_has_everything(workload):
    needs = check_preflight(workload, HEALTHY, lambda name: "1.0")
    assert {need.result for need in needs} <= {"ok", "skip"} and needs[0].what == "permission on the GPU"


@pytest.mark.parametrize(
    ("change", "what", "found", "result"),
    [
        ({"python": "3.10.17"}, "Python", "3.10.17", "fail"),
        ({"python": "3.9.2"}, "Python", "3.9.2", "fail"),
        ({"python": "3.11.0"}, "Python", "3.11.0", "ok"),
        ({"python": None}, "Python", "unknown", "skip"),
        ({"build": Build("2.8.0a0+git7d205b2", hip="6.3.4")}, "PyTorch", "2.8.0a0+git7d205b2", "fail"),
        ({"build": Build("2.9.1+rocm6.4", hip="6.4.4")}, "PyTorch", "2.9.1+rocm6.4", "ok"),
        ({"build": None}, "PyTorch", "unknown", "skip"),
        ({"memory_gib": 16}, "host memory", "16.8 GiB", "fail"),
        ({"memory_limit_gib": 8.0}, "host memory", "8 GiB", "fail"),
        ({"disks": {"/results": (20_000.4, 0.9)}}, "disk of the results", "20000 GB", "ok"),
        ({"disks": {"/results": (40, 0.9)}}, "disk of the results", "40 GB", "fail"),
        ({"shm_gib": 0.0625}, "/dev/shm", "0.0625 GiB", "fail"),
        ({"shm_gib": None}, "/dev/shm", "unknown", "skip"),
        ({"device_archs": ()}, "GPUs that torch sees", "0", "fail"),
        ({"build": Build("2.9.1+rocm6.2", hip="6.2.4")}, "ROCm", "6.2", "fail"),
        (H200, "NVIDIA driver", "580.1", "ok"),
        (H200 | {"kernel": KernelFacts(nvidia_driver="550.90")}, "NVIDIA driver", "550.90", "fail"),
        (
            H200 | {"kernel": KernelFacts(nvidia_driver="550.90"), "build": Build("2.9.1", cuda="12.8")},
            "NVIDIA driver",
            "550.90",
            "ok",
        ),
        (
            H200 | {"kernel": KernelFacts(nvidia_driver="470.57"), "build": Build("2.9.1", cuda="12.8")},
            "NVIDIA driver",
            "470.57",
            "fail",
        ),
        (H200 | {"kernel": KernelFacts(nvidia_driver="550.90"), "build": Build("2.13.0+cpu")}, "NVIDIA driver", "550.90", "ok"),
        (H200 | {"kernel": KernelFacts(nvidia_driver="520.61"), "build": Build("2.13.0+cpu")}, "NVIDIA driver", "520.61", "fail"),
        (H200 | {"build": Build("3.0", cuda="14.1")}, "NVIDIA driver", "580.1", "skip"),
        (H200 | {"kernel": KernelFacts(nvidia_driver="")}, "NVIDIA driver", "unknown", "skip"),
        (H200, "ROCm", "no AMD GPU", "skip"),
        ({"collectives": ""}, "NCCL or RCCL", "none", "fail"),
        ({"mpi": ""}, "mpirun", "none", "warn"),
        (
            kernel(kfd="denied"),
            "permission on the GPU",
            "this user may not open /dev/kfd, the device file of the AMD GPU",
            "fail",
        ),
        ({"denied_render": ("/dev/dri/renderD128",)}, "permission on the GPU", "/dev/dri/renderD128 may not be opened", "fail"),
    ],
)
def test_preflight_names_what_was_found_and_what_is_needed(change, what, found, result):
    need = next(need for need in check_preflight("megatron", replace(HEALTHY, **change), lambda name: "1.0") if need.what == what)
    assert (need.found, need.result) == (found, result) and bool(need.remedy) == (result in ("fail", "warn")) and need.needed


@pytest.mark.parametrize(("archs", "step"), [((), "use a machine with a GPU"), (("gfx90a",), "use a machine with more GPUs")])
def test_preflight_says_whether_all_gpus_are_missing_or_some(archs, step):
    needs = check_preflight("scaling", replace(HEALTHY, device_archs=archs), lambda name: "1.0")
    (need,) = [need for need in needs if need.what == "GPUs that torch sees"]
    assert need.result == "fail" and need.remedy.startswith(step)


def test_preflight_writes_no_number_with_an_exponent():
    for limit, text in ((65536, "65536"), (1024, "1024"), (INF, "unlimited")):
        needs = check_preflight("serving", replace(HEALTHY, open_files=limit), lambda name: "1.0")
        assert [(need.found, need.needed) for need in needs if need.what == "open files"] == [(text, "4096")]


@pytest.mark.parametrize(("driver", "named"), [("550.90", True), ("470.57", False)])
def test_preflight_names_the_advice_about_builds_only_if_it_has_one(driver, named):
    state = replace(HEALTHY, **H200 | {"kernel": KernelFacts(nvidia_driver=driver)})
    remedy = next(need.remedy for need in check_preflight("training", state, lambda name: "1.0") if need.what == "NVIDIA driver")
    assert ("hyperion env --install" in remedy) is named is bool(advise(state.kernel)[0].command)


def test_the_least_versions_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    needed = {need.what: need.needed for need in check_preflight("inference", HEALTHY, lambda name: "1.0")}
    assert f">={needed['Python']}" == project["requires-python"] and f"torch>={needed['PyTorch']}" in project["dependencies"]


def test_an_unknown_workload_names_the_known_ones():
    with pytest.raises(HyperionError) as caught:
        check_preflight("gaming", HEALTHY)
    assert "megatron" in caught.value.next_step
    lacking = check_preflight("serving", HEALTHY, lambda name: None)
    assert [need.what for need in lacking if need.result == "fail"] == ["fastapi", "uvicorn"]


def test_a_framework_in_its_own_environment_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))

    def need() -> Need:
        return next(need for need in check_preflight("megatron", HEALTHY) if need.what == "megatron-core")

    assert (need().result, need().remedy) == ("fail", "hyperion frameworks install megatron-core")
    folder = environment_folder("megatron-core")
    folder.mkdir(parents=True)
    (folder / "hyperion-framework.json").write_text('{"versions": {"megatron-core": "0.16.1"}}')
    assert (need().result, need().found) == ("ok", "0.16.1")


def test_the_settings_of_a_machine_follow_its_facts():
    node = replace(
        HEALTHY, device_archs=("gfx90a",) * 8, file_systems={"TRITON_CACHE_DIR": "nfs4", "HF_HOME": "nfs4", "X": "xfs"}
    )
    values = {one.name: one.value for one in machine_settings(node)}
    assert (
        values["OMP_NUM_THREADS"] == "8"
        and values["TRITON_CACHE_DIR"].startswith(tempfile.gettempdir())
        and not {"HF_HOME", "X"} & set(values)
    )
