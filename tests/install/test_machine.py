"""Detection of the accelerator from folders of real-looking kernel files, and what is decided from it."""

from pathlib import Path

import pytest

from hyperion.errors import HyperionError
from hyperion.install.machine import DetectedAccelerator, KernelFacts, collect_facts, decide
from hyperion.install.plan import Choice, choose

NO_GPU = DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver")


def write(root: Path, path: str, text: str = "") -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def amd_node(root: Path, index: int, version: int, simds: int = 440) -> None:
    folder = f"sys/class/kfd/kfd/topology/nodes/{index}"
    write(root, f"{folder}/properties", f"cpu_cores_count 0\nsimd_count {simds}\ngfx_target_version {version}\n")


def pci(root: Path, slot: str, vendor: str, kind: str) -> None:
    write(root, f"sys/bus/pci/devices/{slot}/vendor", vendor + "\n")
    write(root, f"sys/bus/pci/devices/{slot}/class", kind + "\n")


def test_an_mi250x_node_is_rocm_with_its_version(tmp_path):
    amd_node(tmp_path, 0, 0, simds=0)  # the CPU's own node
    for index in range(1, 9):
        amd_node(tmp_path, index, 90010)
    write(tmp_path, "dev/kfd")
    write(tmp_path, "opt/rocm-7.1.1/.info/version", "7.1.1-38\n")
    facts = collect_facts(tmp_path, "Linux")
    assert facts.amd_archs == ("gfx90a",) * 8 and facts.rocm_version == (7, 1) and facts.kfd == "ok"
    machine = decide(facts)
    assert (machine.kind, machine.problem, machine.rocm_version) == ("rocm", None, (7, 1))


@pytest.mark.parametrize(
    ("version", "arch"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110000, "gfx1100"), (110001, "gfx1101"), (120001, "gfx1201")],
)
def test_architectures_are_spelled_as_in_the_wheels(tmp_path, version, arch):
    amd_node(tmp_path, 1, version)
    assert collect_facts(tmp_path, "Linux").amd_archs == (arch,)


def test_an_nvidia_machine_is_cuda_with_its_driver(tmp_path):
    banner = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    write(tmp_path, "proc/driver/nvidia/version", banner)
    machine = decide(collect_facts(tmp_path, "Linux"))
    assert machine.kind == "cuda" and "580.159.04" in machine.evidence


def test_a_container_that_shows_only_the_nvidia_device_file_is_cuda(tmp_path):
    write(tmp_path, "dev/nvidia0")
    assert decide(collect_facts(tmp_path, "Linux")).kind == "cuda"


def test_an_empty_machine_is_cpu(tmp_path):
    machine = decide(collect_facts(tmp_path, "Linux"))
    assert (machine.kind, machine.note, machine.problem) == ("cpu", None, None)


def test_an_amd_processor_is_no_amd_gpu(tmp_path):
    pci(tmp_path, "0000:00:00.0", "0x1022", "0x060000")
    pci(tmp_path, "0000:00:01.0", "0x1002", "0x040300")  # the display's audio function
    assert decide(collect_facts(tmp_path, "Linux")) == NO_GPU


def test_a_laptop_apu_without_wheel_code_falls_to_the_cpu_and_says_so(tmp_path):
    amd_node(tmp_path, 1, 90012)
    write(tmp_path, "dev/kfd")
    machine = decide(collect_facts(tmp_path, "Linux"))
    assert machine.kind == "cpu" and "gfx90c" in machine.note


def test_both_vendors_take_nvidia_and_name_the_way_to_amd(tmp_path):
    amd_node(tmp_path, 1, 110000)
    write(tmp_path, "dev/kfd")
    write(tmp_path, "dev/nvidia0")
    machine = decide(collect_facts(tmp_path, "Linux"))
    assert machine.kind == "cuda" and "TORCH=rocm" in machine.note
    assert choose(machine, "rocm").kind == "rocm"


def test_a_mac_is_cpu(tmp_path):
    assert decide(collect_facts(tmp_path, "Darwin")).kind == "cpu"


@pytest.mark.parametrize(
    ("facts", "cause", "remedy"),
    [
        (KernelFacts(amd_archs=("gfx90a",), kfd="denied"), "may not open /dev/kfd", "render"),
        (KernelFacts(amd_archs=("gfx90a",), kfd="absent"), "/dev/kfd does not exist", "--device=/dev/kfd"),
        (KernelFacts(pci=(("0x1002", "0x0380"),)), "AMD GPU is on the PCI bus", "--device=/dev/kfd"),
        (KernelFacts(pci=(("0x10de", "0x0302"),)), "NVIDIA GPU is on the PCI bus", "--gpus all"),
    ],
)
def test_an_unusable_gpu_fails_with_its_cause_unless_the_cpu_is_asked_for(facts, cause, remedy):
    machine = decide(facts)
    with pytest.raises(HyperionError, match=cause) as caught:
        choose(machine)
    assert remedy in caught.value.next_step
    assert choose(machine, "cpu") == Choice("cpu", explicit=True)


def test_a_desktop_display_without_a_driver_is_only_noted(tmp_path):
    pci(tmp_path, "0000:01:00.0", "0x10de", "0x030000")
    machine = decide(collect_facts(tmp_path, "Linux"))
    assert machine.kind == "cpu" and "NVIDIA" in machine.note and machine.problem is None
