"""Find the devices that a command can use: those that variables such as CUDA_VISIBLE_DEVICES make visible to it.

A program numbers only its visible devices. NVML and the amdgpu driver list all devices of the machine.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.hardware.device import Device
from hyperion.hardware.telemetry import gcd_position
from hyperion.hardware.topology import kfd_gpus


def visible_devices(devices: Sequence[Device], environment: Mapping[str, str], root: Path = Path("/")) -> list[Device]:
    """Return the devices that a command with these environment variables can use.

    If the second die of an MI250X is visible, the result has its first die too, because only this die reports the power of both.

    Args:
        devices: all devices of the machine, see `system_devices`.
        environment: the environment variables of the command.
        root: folder that contains sys/.

    Raises:
        HyperionError: CUDA_VISIBLE_DEVICES selects a part of a GPU (MIG), or uses numbers whose meaning only CUDA knows.
    """
    chosen = selected_devices(devices, environment, root)
    if not any(device.kind == "rocm" for device in devices):
        return chosen
    # The devices are in the order of their PCI addresses, so the first die of a module precedes the second.
    first_dies = [before for before, die in pairwise(devices) if die in chosen and gcd_position(die, root) == "second"]
    return [device for device in devices if device in chosen or device in first_dies]


def selected_devices(devices: Sequence[Device], environment: Mapping[str, str], root: Path = Path("/")) -> list[Device]:
    """Return the devices that a command with these environment variables computes on. For arguments, see `visible_devices`."""
    kinds = {device.kind for device in devices}
    if "cuda" in kinds:
        return _visible_nvidia(devices, environment)
    return _visible_amd(devices, environment, root) if "rocm" in kinds else list(devices)


def _visible_nvidia(devices: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return list(devices)
    where, entries = f"CUDA_VISIBLE_DEVICES={mask}", _entries(mask)
    if any(entry.startswith("MIG-") for entry in entries):
        raise HyperionError(
            "the energy of a part of a GPU (MIG) is not measured", where=where, next_step="leave out --tokens, or use whole GPUs"
        )
    numbered = any(entry.isdecimal() for entry in entries)
    if numbered and len({device.name for device in devices}) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise HyperionError(
            "the GPUs differ, and CUDA numbers them by their speed, which the monitor does not know",
            where=where,
            next_step="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by the UUIDs that nvidia-smi -L prints",
        )
    return _selected(mask, {device.index: (device, device.uuid or "") for device in devices})


def _visible_amd(devices: Sequence[Device], environment: Mapping[str, str], root: Path) -> list[Device]:
    by_place = {device.pci_address: device for device in devices}
    listed = [(by_place[place], uuid) for place, uuid in kfd_gpus(root).values() if place in by_place]
    # Without the driver's list, the order of the PCI addresses is the best guess.
    left = listed if len(listed) == len(devices) else [(device, "") for device in devices]
    if (mask := environment.get("ROCR_VISIBLE_DEVICES")) is not None:
        chosen = _selected(mask, dict(enumerate(left)))
        uuids = {device.index: uuid for device, uuid in left}
        left = [(device, uuids[device.index]) for device in chosen]
    # HIP renumbers what ROCR made visible. It treats an empty variable as one that is not set.
    if mask := environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES"):
        return _selected(mask, dict(enumerate(left)))
    return [device for device, _ in left]


def _entries(mask: str) -> list[str]:
    return [entry.strip() for entry in mask.split(",")]


def _selected(mask: str, numbered: Mapping[int, tuple[Device, str]]) -> list[Device]:
    """Return the devices that the mask names by number or by the beginning of a UUID.

    CUDA and HIP ignore the first entry that names no device, and all that follow it.
    """
    chosen: list[Device] = []
    for entry in _entries(mask):
        if entry.isdecimal():
            found = [device for number, (device, _) in numbered.items() if number == int(entry)]
        else:
            found = [device for device, uuid in numbered.values() if entry and uuid.casefold().startswith(entry.casefold())]
        if len(found) != 1:
            break
        chosen += [device for device in found if device not in chosen]
    return chosen
