"""Topologies of machines that are not here, from what their libraries and files say; and this machine's own."""

from types import SimpleNamespace

import pytest

from hyperion.hardware import detect, detect_cpu
from hyperion.hardware.topology import cpu_lines, topology_lines
from tests.hardware.machines import facts, gpu

ADDRESSES = ("0000:c1:00.0", "0000:c6:00.0", "0001:09:00.0", "0001:0e:00.0")


def devices(machine: str):
    gpus = tuple(gpu(machine, pci_address=address, uuid=f"uuid-{place}") for place, address in enumerate(ADDRESSES))
    return [detect(facts(gpus=gpus), index) for index in range(len(gpus))]


class Nvml:
    """NVML of a made-up machine: of each GPU the ends of its links, between each pair the level of their ancestor."""

    NVML_NVLINK_MAX_LINKS = 18
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, ends, level=50):
        self.ends, self.level = ends, level

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return int(uuid.rpartition("-")[2])

    def nvmlDeviceGetPciInfo(self, place):
        return self._info(ADDRESSES[place])

    def nvmlDeviceGetNvLinkState(self, place, link):
        if link >= len(self.ends[place]):
            raise self.NVMLError("not supported")
        return self.ends[place][link] != "down"

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, place, link):
        return 2 if self.ends[place][link] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, place, link):
        return self._info(ADDRESSES[self.ends[place][link]])

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.level

    @staticmethod
    def _info(address):
        domain, rest = address.split(":", 1)
        return SimpleNamespace(busId=f"0000{domain}:{rest}".upper().encode())


def test_a_switch_joins_all_gpus_with_the_links_that_both_have(tmp_path):
    lines = topology_lines(devices("H200"), tmp_path, Nvml([["switch"] * 18] * 3 + [["switch"] * 17 + ["down"]]))
    assert lines[0].split() == ["GPU0", "GPU1", "GPU2", "GPU3", "NUMA", "node"]
    assert lines[1].split() == ["GPU0", "X", "NV18", "NV18", "NV17", "unknown"]
    assert "NV18: 18 NVLinks" in lines and "(from NVML)" in lines


def test_direct_links_are_counted_by_pair_and_the_others_named_by_their_ancestor(tmp_path):
    for place, address in enumerate(ADDRESSES):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text("-1\n" if place == 3 else f"{place // 2}\n")
    lines = topology_lines(devices("A100-80"), tmp_path, Nvml([[1] * 4, [0] * 4, [], ["down"]], level=30))
    assert lines[1].split() == ["GPU0", "X", "NV4", "PHB", "PHB", "0"]
    assert lines[4].split() == ["GPU3", "PHB", "PHB", "PHB", "X", "unknown"]
    assert "PHB: a PCIe host bridge" in lines


def test_without_nvml_torch_is_asked(tmp_path):
    nvml = Nvml([])
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(nvml.NVMLError("driver not loaded"))
    lines = topology_lines(devices("H200"), tmp_path, nvml, can_access=lambda i, j: i // 2 == j // 2)
    assert lines[1].split()[:5] == ["GPU0", "X", "P2P", "host", "host"]
    assert lines[-1] == "(from torch, because no library lists the links)"


def kfd(root, links: list[tuple[int, int, int, int]]) -> None:
    """The driver's files of one CPU (node 0) and four dies (1 to 4): links are (from, to, type, MB/s)."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for number, address in enumerate((None, *ADDRESSES)):
        folder = nodes / str(number)
        folder.mkdir(parents=True)
        domain, bus = (int(part, 16) for part in address.split(":")[:2]) if address else (0, 0)
        simd = 440 if address else 0
        (folder / "properties").write_text(f"simd_count {simd}\nlocation_id {bus << 8}\ndomain {domain}\nname_x a b\n")
    for count, (start, end, kind, rate) in enumerate(links):
        folder = nodes / str(start) / "io_links" / str(count)
        folder.mkdir(parents=True)
        text = f"type {kind}\nnode_from {start}\nnode_to {end}\nweight 15\nmax_bandwidth {rate}\n"
        (folder / "properties").write_text(text)


def test_dies_of_a_module_are_told_from_those_of_another_by_their_xgmi_links(tmp_path):
    kfd(tmp_path, [(1, 2, 11, 200_000), (1, 3, 11, 50_000), (1, 0, 2, 64_000), (1, 4, 2, 64_000), (2, 1, 11, 200_000)])
    lines = topology_lines(devices("MI250X"), tmp_path)
    assert lines[1].split() == ["GPU0", "X", "XGMI200", "XGMI50", "PCIe", "unknown"]
    assert lines[2].split()[1:4] == ["XGMI200", "X", "none"]
    assert "XGMI200: xGMI, 200 GB/s according to the driver" in lines and "none: no link listed" in lines


def test_amd_without_its_drivers_files_asks_torch(tmp_path):
    lines = topology_lines(devices("MI300X"), tmp_path, can_access=lambda i, j: True)
    assert lines[1].split()[1:5] == ["X", "P2P", "P2P", "P2P"]


def test_a_cpus_sockets_and_numa_nodes(tmp_path):
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu // 2}\n")
    for node in range(2):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1}\n")
        (folder / "distance").write_text("10 32\n" if node == 0 else "32 10\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       67108864 kB\n")
    assert cpu_lines(tmp_path) == [
        "2 sockets",
        "NUMA node 0: CPUs 0-1, 64 GiB, distances 10 32",
        "NUMA node 1: CPUs 2-3, 64 GiB, distances 32 10",
    ]


@pytest.mark.parametrize("folder", ["", "sys/devices/system/node/node0"])
def test_what_a_system_does_not_tell_is_said(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    lines = cpu_lines(tmp_path)
    assert lines[0] == "sockets: unknown"
    nothing, no_files = ("NUMA nodes: unknown", "NUMA node 0: CPUs none, memory unknown, distances unknown")
    assert lines[1] == (no_files if folder else nothing)


def test_this_machines_own():
    assert topology_lines([detect_cpu()])
