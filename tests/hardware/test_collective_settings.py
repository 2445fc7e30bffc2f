"""Which settings of the communication library are kept, and that none of them tells a path, a host or an address."""

import json
import socket

import pytest

from hyperion.hardware import fingerprint
from hyperion.hardware.facts import collective_settings


def test_settings_of_every_vendor_are_kept_and_nothing_else():
    settings = {
        "NCCL_NVLS_ENABLE": "0",
        "RCCL_MSCCL_ENABLE": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "NCCL_ALGO": "^NVLS,Ring",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    }
    others = {"HOME": "/home/somebody", "NVSHMEM_HOME": "x", "TORCH_HOME": "y", "MY_NCCL_KEY": "z"}
    assert collective_settings(others | settings) == settings
    assert collective_settings(others) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_TOPO_FILE", "/home/somebody/topology.xml"),
        ("NCCL_DEBUG_FILE", "~/nccl.log"),
        ("NCCL_HOSTID", "node17"),
        ("NCCL_COMM_ID", "node17:4567"),
        ("NCCL_SOCKET_IFNAME", "10.1.2.3"),
        ("NCCL_OOB_NET_ADDR", "fe80::1"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "C:\\traces\\rank"),
        ("NCCL_NET_NAME", f"on-{socket.gethostname()}"),
    ],
)
def test_paths_hosts_and_addresses_are_hashed_and_still_tell_runs_apart(name, value):
    (kept,) = collective_settings({name: value}).values()
    assert kept.startswith("hidden (sha256 ") and value not in kept
    assert collective_settings({name: value}) == {name: kept} != collective_settings({name: value + "2"})


def test_the_fingerprint_of_a_run_holds_them(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/opt/site/topology.xml")
    kept = fingerprint()["collective_settings"]
    assert kept["NCCL_NVLS_ENABLE"] == "0" and "/opt" not in json.dumps(kept)
