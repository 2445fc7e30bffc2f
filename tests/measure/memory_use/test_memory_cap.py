"""A cap refuses what is too much and nothing else, is taken away again, and says so where a system does not enforce it."""

import json
import subprocess
import sys

import pytest
import torch

from hyperion.hardware import detect_cpu
from hyperion.measure import allocator_refusal

# In a process of its own, which may run out of memory.
SCRIPT = """
import json, resource, torch
from hyperion.hardware import detect_cpu
from hyperion.measure import NoMemoryCap, PeakMemoryRegion, allocator_refusal
from hyperion.measure.memory_use.allocation import memory_cap

cpu, outcomes, before = detect_cpu(), {}, resource.getrlimit(resource.RLIMIT_DATA)
mib = 2**20
with memory_cap(cpu, 0.25) as cap:
    with PeakMemoryRegion(cpu) as region:
        torch.ones(160 * mib, dtype=torch.uint8)
    outcomes["below"] = region.peak.gib is None or region.peak.gib < cap.peak_gib
    kept = torch.ones(160 * mib, dtype=torch.uint8)
    try:
        torch.ones(160 * mib, dtype=torch.uint8)
    except RuntimeError as error:
        outcomes["refusal"] = allocator_refusal(error, cpu)
    outcomes["small still fits"] = len(torch.ones(mib, dtype=torch.uint8)) == mib
    more = torch.ones(70 * mib, dtype=torch.uint8)
    # oneDNN says no more than this; with the cap used up the allocator confirms it.
    outcomes["primitive"] = allocator_refusal(RuntimeError("could not create a primitive"), cpu)
outcomes["given back"] = resource.getrlimit(resource.RLIMIT_DATA) == before
outcomes["fits again"] = len(torch.ones(300 * mib, dtype=torch.uint8)) == 300 * mib
resource.setrlimit = lambda *arguments: None  # a system that enforces nothing
try:
    with memory_cap(cpu, 0.01):
        pass
except NoMemoryCap as error:
    outcomes["not enforced"] = error.what
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.process
def test_within_the_cap_memory_is_granted_and_beyond_it_refused(outcomes):
    assert outcomes["below"] and outcomes["small still fits"]
    assert "DefaultCPUAllocator: can't allocate memory" in outcomes["refusal"]


@pytest.mark.process
def test_a_primitive_that_could_not_be_created_is_told_by_the_allocator(outcomes):
    assert "DefaultCPUAllocator: can't allocate memory" in outcomes["primitive"]


@pytest.mark.process
def test_the_cap_is_given_back(outcomes):
    assert outcomes["given back"] and outcomes["fits again"]


@pytest.mark.process
def test_a_system_that_does_not_enforce_it_is_named(outcomes):
    assert outcomes["not enforced"] == "0.015 GiB were granted under a cap of 0.01 GiB"


def test_other_errors_are_not_out_of_memory():
    cpu = detect_cpu()
    assert allocator_refusal(RuntimeError("shapes do not match"), cpu) is None
    assert allocator_refusal(RuntimeError("could not create a primitive"), cpu) is None  # there is memory enough
    assert allocator_refusal(torch.OutOfMemoryError("CUDA out of memory.\nmore"), cpu) == "CUDA out of memory."
    assert allocator_refusal(MemoryError(), cpu) == "MemoryError"


def test_the_real_allocator_is_understood():
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(2**50, dtype=torch.uint8)
    assert "2" in allocator_refusal(refusal.value, detect_cpu())
