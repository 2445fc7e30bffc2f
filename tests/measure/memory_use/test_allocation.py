"""The largest allocation under a cap is the largest whole number of steps below it, and none of it is kept."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hyperion.errors import HyperionError
from hyperion.results import Row

pytestmark = pytest.mark.process

# In a process of its own, which may run out of memory.
SCRIPT = """
import dataclasses, json, resource, torch
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure import NoMemoryCap, largest_allocation
from hyperion.measure.memory_use.allocation import memory_cap
from hyperion.measure.memory_use.allocation import _Search

mib = 2**20
cpu, outcomes, before = detect_cpu(), {}, resource.getrlimit(resource.RLIMIT_DATA)

def attempt(device=cpu, **options):
    try:
        return dataclasses.asdict(largest_allocation(device, **options))
    except HyperionError as error:
        return [type(error).__name__, error.what]

outcomes["coarse"] = attempt(cap_gib=0.3)
outcomes["fine"] = attempt(cap_gib=0.3, step_bytes=8 * mib)
outcomes["no cap given"] = attempt()
outcomes["less than a step"] = attempt(cap_gib=0.03)
outcomes["promises too much"] = attempt(dataclasses.replace(cpu, memory_bytes=100 * mib), cap_gib=0.3)
outcomes["limit as before"] = resource.getrlimit(resource.RLIMIT_DATA) == before
outcomes["given back"] = len(torch.ones(320 * mib, dtype=torch.uint8)) == 320 * mib
step, freed = 16 * mib, torch.ones(160 * mib, dtype=torch.uint8)
with memory_cap(cpu, 0.25):
    del freed  # the process may now have more than the cap
    search = _Search(cpu, step)
    most = search.run(cpu.memory_bytes // step + 1, 16)
    taken = torch.ones(12 * step, dtype=torch.uint8)
    held, verification = search.verified(most)
    outcomes["freed and taken"] = [most, held, verification.error]
    del taken
resource.setrlimit = lambda *arguments: None  # a system that enforces nothing
outcomes["not enforced"] = attempt(cap_gib=0.05)
print(json.dumps(outcomes))
"""
MIB = 2**20


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_known_cap_gives_the_steps_below_it(outcomes):
    # 307.2 MiB, of which the interpreter takes some for itself meanwhile.
    assert outcomes["coarse"]["granted_bytes"] == 256 * MIB and outcomes["coarse"]["step_bytes"] == 64 * MIB
    assert 288 * MIB <= outcomes["fine"]["granted_bytes"] <= 304 * MIB
    assert outcomes["fine"]["granted_bytes"] % (8 * MIB) == 0


def test_it_is_proven_by_writing_and_told_with_the_refusal(outcomes):
    assert outcomes["coarse"]["verification"] == {"name": "written and read back", "error": 0.0, "tolerance": 0.0}
    assert "can't allocate memory" in outcomes["coarse"]["refusal"]
    assert outcomes["coarse"]["cap_bytes"] == int(0.3 * 2**30)


def test_without_a_cap_a_host_is_asked_for_half_of_what_is_available(outcomes):
    found = outcomes["no cap given"]
    assert found["cap_bytes"] == pytest.approx(found["free_bytes"] / 2, rel=1e-6)
    assert found["cap_bytes"] - 2 * found["step_bytes"] <= found["granted_bytes"] <= found["cap_bytes"]
    assert found["granted_bytes"] < found["free_bytes"] <= found["memory_bytes"]


def test_it_is_a_row_with_the_cap_as_its_limit_and_above_it_is_none(outcomes):
    found = outcomes["coarse"]
    row = Row(
        notebook="n",
        experiment="allocation",
        variant="single",
        metric="largest_allocation_gib",
        value=found["granted_bytes"] / 2**30,
        limit=found["cap_bytes"] / 2**30,
        limit_source="cap on this process",
        check=found["verification"]["name"],
        check_error=0.0,
        check_tolerance=0.0,
    )
    row.validate()
    assert 0.5 < row.fraction_of_limit <= 1
    with pytest.raises(HyperionError):
        replace(row, value=1.1 * row.limit).validate()


def test_everything_is_given_back(outcomes):
    assert outcomes["limit as before"] and outcomes["given back"]


def test_less_than_a_step_is_refused_and_not_called_zero(outcomes):
    kind, what = outcomes["less than a step"]
    assert kind == "HyperionError" and what.startswith("not even 64 MiB were granted")


def test_a_device_that_promises_more_than_it_has_is_found_out(outcomes):
    assert "the device overcommits its memory" in outcomes["promises too much"][1]


def test_a_system_that_enforces_no_cap_is_named(outcomes):
    assert outcomes["not enforced"][0] == "NoMemoryCap"


def test_what_another_part_of_the_process_frees_or_takes_meanwhile_is_no_part_of_the_answer(outcomes):
    most, held, error = outcomes["freed and taken"]
    assert most == 16 and 0 < held < 16 and error == 0.0
