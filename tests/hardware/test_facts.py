import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from hyperion.hardware import collect_facts
from hyperion.hardware.facts import TorchBuild, _read_gpu, fingerprint
from tests.hardware.machines import facts


def test_this_machine_is_read_and_fits_json():
    here = collect_facts()
    assert here.python and here.torch and here.cpu.cores >= 1
    assert json.loads(json.dumps(asdict(here)))["torch"] == here.torch


# The device of a chapter is asked for too: an experiment that needs no torch runs without loading it.
WITHOUT_TORCH = """
import sys
from pathlib import Path
from hyperion.chapter.context import Context
from hyperion.hardware import collect_facts, detect, torch_build
facts, device = collect_facts(), Context(notebook="n", experiment="e", sizes={}, workspace=Path()).device
loaded = "torch" in sys.modules
import torch
assert loaded == bool(torch.version.cuda or torch.version.hip), loaded
assert (facts.torch, facts.cuda, facts.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)
assert torch_build() == torch_build.__globals__["TorchBuild"](facts.torch, facts.cuda, facts.hip)
assert len(facts.gpus) == torch.cuda.device_count() and device == detect()
"""


@pytest.mark.process
def test_a_build_for_the_cpu_is_not_loaded_to_learn_what_it_is():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["cuda", "hip"])
def test_a_build_for_gpus_is_asked_for_them(version, monkeypatch):
    built = TorchBuild("2.11.0", **{"cuda": None, "hip": None} | {version: "13.0"})
    monkeypatch.setattr("hyperion.hardware.facts.torch_build", lambda: built)
    gpus = facts("MI250X").gpus
    monkeypatch.setattr("hyperion.hardware.facts._read_gpus", lambda: (gpus, None, "rccl 2.22"))
    here = collect_facts()
    assert (here.gpus, here.collectives, getattr(here, version)) == (gpus, "rccl 2.22", "13.0")


def test_injected_facts_fit_json():
    content = json.loads(json.dumps(asdict(facts("MI250X"))))
    assert content["gpus"][0]["multi_processor_count"] == 110 and content["hip"] == "7.2.0"


def test_torch_properties_become_facts():
    properties = SimpleNamespace(
        name="NVIDIA H200",
        total_memory=150109880320,
        multi_processor_count=132,
        major=9,
        minor=0,
        L2_cache_size=62914560,
        gcnArchName="NVIDIA H200",
        uuid="64654e92-a282-8d45-eb16-fb2f7ea2b584",
        pci_bus_id=0x1B,
        pci_device_id=6,
        pci_domain_id=0,
        clock_rate=1980000,
        memory_clock_rate=3201000,
        memory_bus_width=6016,
    )
    read = _read_gpu(properties)
    assert read.pci_address == "0000:1b:06.0"
    assert (read.max_clock_mhz, read.memory_clock_mhz, read.memory_bus_bits) == (1980.0, 3201.0, 6016)


@pytest.mark.parametrize(
    ("name", "pci_id", "expected"),
    [
        ("AMD Radeon Graphics", "0x7408", "AMD Instinct MI250X"),
        ("", "0x740c", "AMD Instinct MI250X / MI250"),
        ("AMD Radeon Graphics", "0x15bf", "AMD Radeon Graphics"),
        ("AMD Instinct MI210", "0x7408", "AMD Instinct MI210"),
    ],
)
def test_a_gpu_whose_name_torch_does_not_know_has_that_of_its_pci_id(tmp_path, name, pci_id, expected):
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "device").write_text(f"{pci_id}\n")
    place = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
    properties = SimpleNamespace(name=name, total_memory=1, multi_processor_count=110, major=9, minor=0, **place)
    assert _read_gpu(properties, tmp_path).name == expected


def test_an_older_torch_leaves_nulls():
    properties = SimpleNamespace(name="GPU", total_memory=1, multi_processor_count=1, major=8, minor=0)
    read = _read_gpu(properties)
    assert (read.uuid, read.pci_address, read.max_clock_mhz, read.l2_cache_bytes) == (None, None, None, None)


def test_visible_device_variables_are_recorded(monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")
    assert collect_facts().visible_devices["ROCR_VISIBLE_DEVICES"] == "3"


def test_a_fingerprint_has_no_uuid_in_the_variables_that_select_gpus():
    chosen = {"CUDA_VISIBLE_DEVICES": "GPU-64654e92-a282,1", "HIP_VISIBLE_DEVICES": "0, 1", "ROCR_VISIBLE_DEVICES": "-1"}
    stored = fingerprint(facts("H200", visible_devices=chosen))["visible_devices"]
    assert "64654e92" not in json.dumps(stored)
    first, second = stored["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(first) == 12 and second == "1"
    assert (stored["HIP_VISIBLE_DEVICES"], stored["ROCR_VISIBLE_DEVICES"]) == ("0,1", "-1")
