"""The devices that masks leave visible to a command, by the numbers and UUIDs of all devices of the machine."""

from pathlib import Path

import pytest

from hyperion.commands.monitor import working_devices
from hyperion.errors import HyperionError
from hyperion.hardware.device import Device
from hyperion.hardware.visible import visible_devices

UUIDS = ("GPU-8f7a11aa", "GPU-8f7b22bb", "GPU-03cc33cc", "GPU-44dd44dd")


def nvidia(index: int, name: str = "NVIDIA H100") -> Device:
    return Device("cuda", index, name, "sm_90", 80 << 30, None, None, f"cuda:{index}", uuid=UUIDS[index])


def amd(index: int, place: str, name: str = "AMD Instinct MI300X", arch: str = "unknown") -> Device:
    return Device("rocm", index, name, arch, 64 << 30, None, None, f"cuda:{index}", pci_address=place)


NODE = [nvidia(index) for index in range(4)]


def indices(devices: list[Device], environment: dict[str, str], root: Path = Path("/nonexistent")) -> list[int]:
    return [device.index for device in visible_devices(devices, environment, root)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1, 3", [1, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("1,1", [1]),
        ("GPU-03cc33cc", [2]),
        ("gpu-8F7B", [1]),
        ("GPU-8f7", []),  # the beginning of two UUIDs
    ],
)
def test_the_mask_of_cuda_selects_by_number_and_by_uuid(mask, expected):
    assert indices(NODE, {"CUDA_VISIBLE_DEVICES": mask}) == expected


def test_without_a_mask_all_devices_are_visible():
    cpu = Device("cpu", 0, "CPU", "x86_64", 1 << 34, 2, None, "cpu")
    assert indices(NODE, {"HIP_VISIBLE_DEVICES": "0", "PATH": "/bin"}) == [0, 1, 2, 3]
    assert visible_devices([cpu], {"CUDA_VISIBLE_DEVICES": ""}) == [cpu]


def test_a_lost_gpu_does_not_shift_the_numbers():
    assert indices(NODE[1:], {"CUDA_VISIBLE_DEVICES": "2"}) == [2]


def test_numbers_of_different_gpus_are_refused_if_cuda_sorts_them_by_speed():
    mixed = [nvidia(0, "NVIDIA T400"), nvidia(1)]
    with pytest.raises(HyperionError, match="CUDA numbers them by their speed") as refusal:
        visible_devices(mixed, {"CUDA_VISIBLE_DEVICES": "0"})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(refusal.value.next_step)
    assert indices(mixed, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [0]
    assert indices(mixed, {"CUDA_VISIBLE_DEVICES": UUIDS[1]}) == [1] and indices(mixed, {}) == [0, 1]


def test_a_part_of_a_gpu_is_refused():
    with pytest.raises(HyperionError, match=r"part of a GPU \(MIG\)"):
        visible_devices(NODE, {"CUDA_VISIBLE_DEVICES": "MIG-6a5f"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"HIP_VISIBLE_DEVICES": "0"}, [2]),  # the driver lists the third address first
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, [0, 1]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "0"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ab"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_rocm_numbers_in_the_order_of_the_driver_and_hip_renumbers_what_rocr_left(tmp_path, environment, expected):
    places = ("0000:11:00.0", "0000:21:00.0", "0000:31:00.0")
    nodes = [  # (number of the node, bus, unique_id); node 10 is listed after node 2, and node 0 is the CPU
        (2, 0x31, 0xCD),
        (9, 0x11, 0xAB),
        (10, 0x21, 0),
    ]
    texts = {number: f"simd_count 4\nlocation_id {bus << 8}\nunique_id {unique}\n" for number, bus, unique in nodes}
    for number, text in ({0: "simd_count 0\n"} | texts).items():
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(text)
    assert indices([amd(n, place) for n, place in enumerate(places)], environment, tmp_path) == expected


def four_dies(root: Path) -> list[Device]:
    """The dies of two MI250X modules, which the driver lists under `root`."""
    places = ["0000:11:00.0", "0000:12:00.0", "0000:21:00.0", "0000:22:00.0"]
    for place in places:
        folder = root / "sys/bus/pci/devices" / place
        folder.mkdir(parents=True)
        (folder / "device").write_text("0x740c\n")
    return [amd(n, place, "AMD INSTINCT MI250X", "gfx90a") for n, place in enumerate(places)]


def test_the_power_of_a_second_die_is_that_of_the_first_die_of_its_module(tmp_path):
    dies = four_dies(tmp_path)
    masks = ("0", "1", "3,0", "2")
    found = [indices(dies, {"HIP_VISIBLE_DEVICES": mask}, tmp_path) for mask in masks]
    assert found == [[0], [0, 1], [0, 2, 3], [2]]


@pytest.mark.parametrize(
    ("mask", "trained", "watched", "working"),
    [
        ("0,2", 2, [0, 2], None),  # two first dies: two modules
        ("1,3", 2, [0, 1, 2, 3], None),
        ("0,2", 1, [0, 2], 1),
        (None, 2, [0, 1, 2, 3], 2),
    ],
)
def test_a_training_on_all_visible_dies_takes_the_power_of_all_their_modules(
    tmp_path, monkeypatch, mask, trained, watched, working
):
    dies = four_dies(tmp_path)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if mask:
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", mask)
    readings, count = working_devices(dies, [[n] for n in range(4)], trained, tmp_path)
    assert (readings, count) == ([[n] for n in watched], working)
