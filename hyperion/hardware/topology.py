"""Topology of a machine: links between GPUs (NVLink, xGMI, PCIe), CPU sockets and NUMA nodes.

The links of NVIDIA GPUs are read with NVML. The links of AMD GPUs are read from files of the amdgpu driver. If neither is
available, torch reports which GPUs can copy to each other directly. The argument `root` is the folder that contains /sys, so that
tests can use copies of the files of another machine.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from hyperion.hardware.cpu import system_text
from hyperion.hardware.device import Device
from hyperion.hardware.telemetry import nvml_handle

# Maps NVML's level of the nearest common ancestor of two GPUs to the name of the level in nvidia-smi and its meaning.
_ANCESTORS = {
    0: ("PSB", "same board"),
    10: ("PIX", "one PCIe switch"),
    20: ("PXB", "several PCIe switches"),
    30: ("PHB", "a PCIe host bridge"),
    40: ("NODE", "host bridges of one NUMA node"),
    50: ("SYS", "the link between NUMA nodes"),
}
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_KFD_PCIE, _KFD_XGMI = 2, 11  # HSA_IOLINKTYPE of the kernel's kfd_crat.h
_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"


@dataclass(frozen=True)
class Topology:
    """The links between the devices of a machine.

    Args:
        links: a dict that maps (index of the sending device, index of the receiving device) to the short name of the link.
        meanings: meaning of each short name.
        numa_nodes: NUMA node of each device. None if the node is unknown.
        source: the library or the files from which the links were read.
    """

    links: dict[tuple[int, int], str]
    meanings: dict[str, str]
    numa_nodes: tuple[int | None, ...]
    source: str

    @property
    def lines(self) -> list[str]:
        """Return the matrix of links, a legend, and the source as lines of text."""
        count = len(self.numa_nodes)
        names = [f"GPU{index}" for index in range(count)]
        table = [["", *names, "NUMA node"]]
        for i, (name, node) in enumerate(zip(names, self.numa_nodes, strict=True)):
            cells = ["X" if i == j else self.links.get((i, j), "?") for j in range(count)]
            table.append([name, *cells, "unknown" if node is None else str(node)])
        widths = [max(len(row[column]) for row in table) for column in range(count + 2)]
        matrix = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        used = dict.fromkeys(self.links.values())
        legend = [f"{word}: {self.meanings[word]}" for word in used if word in self.meanings]
        return [*matrix, *legend, f"(from {self.source})"]


def topology_lines(
    devices: Sequence[Device], root: Path = Path("/"), nvml: Any = None, can_access: Callable[[int, int], bool] | None = None
) -> list[str]:
    """Return the topology of the devices as lines of text. For a CPU, the lines list its sockets and NUMA nodes.

    Args:
        devices: GPUs in torch's order, or one CPU.
        root: folder that contains /sys.
        nvml: the pynvml module. None imports the module if it is installed.
        can_access: function (i, j) that returns True if GPU i can directly read the memory of GPU j. None uses torch.
    """
    if devices[0].kind == "cpu":
        return cpu_lines(root)
    return topology_of(devices, root, nvml, can_access).lines


def topology_of(
    devices: Sequence[Device], root: Path = Path("/"), nvml: Any = None, can_access: Callable[[int, int], bool] | None = None
) -> Topology:
    """Return the topology of these GPUs. The arguments are those of `topology_lines`."""
    topology = _nvidia(devices, root, nvml) if devices[0].kind == "cuda" else _amd(devices, root)
    return topology or _peers(devices, root, can_access)


def cpu_lines(root: Path = Path("/")) -> list[str]:
    """Return lines of text about the CPU sockets and the NUMA nodes.

    The first line contains the number of sockets. Each other line contains the CPUs and the memory of one NUMA node, and its
    distances to the other nodes.
    """
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id"))
    sockets = {file.read_text().strip() for file in cpus}
    lines = [f"{len(sockets)} socket{'s' * (len(sockets) != 1)}" if sockets else "sockets: unknown"]
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    for node in nodes:
        total = re.search(r"MemTotal:\s+(\d+) kB", system_text(node / "meminfo") or "")
        memory = f"{int(total[1]) / 2**20:.0f} GiB" if total else "memory unknown"
        cpus, distances = (system_text(node / name) for name in ("cpulist", "distance"))
        lines.append(f"NUMA node {node.name[4:]}: CPUs {cpus or 'none'}, {memory}, distances {distances or 'unknown'}")
    return lines if nodes else [*lines, "NUMA nodes: unknown"]


def _nvidia(devices: Sequence[Device], root: Path, nvml) -> Topology | None:
    """Return the topology that `nvidia-smi topo -m` shows, or None if NVML is not available."""
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
        handles = [nvml_handle(nvml, device) for device in devices]
        if None in handles:
            return None
        places = [_place(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
        ends = [_link_ends(nvml, handle) for handle in handles]
        links = {
            (i, j): _nvlink(ends, places, i, j) or _ancestor(nvml, handles[i], handles[j])
            for i, j in permutations(range(len(devices)), 2)
        }
    except nvml.NVMLError:
        return None
    meanings = dict(_ANCESTORS.values()) | {word: f"{word[2:]} NVLinks" for word in links.values() if word.startswith("NV")}
    return Topology(links, meanings, _numa_nodes(devices, root), "NVML")


def _link_ends(nvml, handle) -> list[str]:
    """Return the other end of each active NVLink of a GPU: "switch", or the PCI address of a GPU."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            to_switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH
            ends.append("switch" if to_switch else _place(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except nvml.NVMLError:
            continue  # no such link on this GPU
    return ends


def _nvlink(ends: list[list[str]], places: list[str], i: int, j: int) -> str:
    """Return "NV" and the number of NVLinks between two GPUs, direct or through a switch, or "" if there are none."""
    # Through switches, a pair can use at most the links of the GPU that has fewer of them.
    count = ends[i].count(places[j]) or min(ends[i].count("switch"), ends[j].count("switch"))
    return f"NV{count}" if count else ""


def _ancestor(nvml, one, other) -> str:
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return _ANCESTORS.get(level, (f"level {level}", ""))[0]


def _place(bus_id: bytes | str) -> str:
    """Return a PCI address as sysfs writes it: lower case, with a domain of four digits. NVML writes eight digits in capitals."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.rstrip("\0").lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _amd(devices: Sequence[Device], root: Path) -> Topology | None:
    """Return the xGMI and PCIe links that the amdgpu driver lists, or None if it lists none."""
    index_of = {device.pci_address: index for index, device in enumerate(devices)}
    gpu_of = {number: index_of.get(place) for number, (place, _) in kfd_gpus(root).items()}
    links, meanings = {}, {}
    for file in sorted((root / _KFD_NODES).glob("*/*_links/*/properties")):
        link = _properties(file)
        ends = gpu_of.get(str(link.get("node_from"))), gpu_of.get(str(link.get("node_to")))
        if None in ends or ends[0] == ends[1]:
            continue
        kind = link.get("type", -1)
        word = {_KFD_XGMI: "XGMI", _KFD_PCIE: "PCIe"}.get(kind, f"type {kind}")
        if word == "XGMI" and link.get("max_bandwidth"):
            word = f"XGMI{link['max_bandwidth'] // 1000}"
            meanings[word] = f"xGMI, {link['max_bandwidth'] / 1000:g} GB/s according to the driver"
        # A pair of GPUs may be listed twice, with a PCIe link and with an xGMI link.
        if not links.get(ends, "").startswith("XGMI"):
            links[ends] = word
    if not links:
        return None
    meanings |= {"XGMI": "xGMI of unknown rate", "PCIe": "direct PCIe"}
    for pair in permutations(range(len(devices)), 2):
        links.setdefault(pair, "none")
    meanings["none"] = "no link listed"
    return Topology(links, meanings, _numa_nodes(devices, root), "the amdgpu driver's topology files")


def kfd_gpus(root: Path = Path("/")) -> dict[str, tuple[str, str]]:
    """Return the PCI address and the UUID of each GPU that the amdgpu driver lists, by the number of its node.

    ROCm numbers the GPUs in the order of the nodes. The UUID has the form that ROCR_VISIBLE_DEVICES accepts. It is "" for a GPU
    that has none.
    """
    folders = sorted((root / _KFD_NODES).glob("[0-9]*"), key=lambda folder: int(folder.name))
    nodes = {folder.name: _properties(folder / "properties") for folder in folders}
    return {
        number: (_kfd_place(node), f"GPU-{node['unique_id']:016x}" if node.get("unique_id") else "")
        for number, node in nodes.items()
        if node.get("simd_count")  # nodes without SIMD units are CPUs
    }


def _kfd_place(node: dict[str, int]) -> str:
    """Return the PCI address of a GPU in the amdgpu driver's list of nodes.

    The location_id of a node contains bus, device and function. Its higher bits are the number of a partition.
    """
    location = node.get("location_id", 0) & 0xFFFF
    # 8 bits of the bus, 5 bits of the device, 3 bits of the function.
    return f"{node.get('domain', 0):04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & 7}"


def _properties(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in (system_text(file) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _peers(devices: Sequence[Device], root: Path, can_access: Callable[[int, int], bool] | None) -> Topology:
    """Return a topology that only says which pairs of GPUs can copy directly. It is used if no library lists the links."""
    if can_access is None:
        import torch

        can_access = torch.cuda.can_device_access_peer
    pairs = permutations(range(len(devices)), 2)
    links = {(i, j): "P2P" if can_access(devices[i].index, devices[j].index) else "host" for i, j in pairs}
    meanings = {"P2P": "direct copies over an unknown link", "host": "copies through host memory"}
    return Topology(links, meanings, _numa_nodes(devices, root), "torch, because no library lists the links")


def _numa_nodes(devices: Sequence[Device], root: Path) -> tuple[int | None, ...]:
    texts = [system_text(root / f"sys/bus/pci/devices/{device.pci_address}/numa_node") for device in devices]
    # The kernel writes -1 if the firmware does not report the node.
    return tuple(int(text) if text and text.isdigit() else None for text in texts)
