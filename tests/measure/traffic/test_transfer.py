"""Copies are right to the last bit or caught, pairs are complete, and a machine of one memory gives no number."""

import numpy as np
import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect, detect_cpu
from hyperion.measure import (
    DIRECTIONS,
    measure_between,
    measure_copy,
    measure_transfer,
    peer_pairs,
    peer_refusal,
    transfer_refusal,
    verify_bits,
)
from hyperion.measure.clock.verify import poison_bits
from hyperion.measure.traffic.bandwidth import _random_bytes
from tests.hardware.machines import facts, gpu


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


@pytest.mark.parametrize("count", [1, 7, 4096, 1_000_003])
def test_a_copy_moves_its_bytes_once(cpu, count):
    measured = measure_between(cpu, cpu, count, time_limit_s=0.02)
    assert measured.bytes == count and (measured.source, measured.destination) == ("cpu", "cpu")
    assert (measured.verification.name, measured.verification.error) == ("bit for bit", 0.0)
    assert len(measured.timing.samples_s) >= 30 and not measured.timing.cold
    assert measured.bandwidth_gb_s.value == pytest.approx(count / np.median(measured.timing.samples_s) / 1e9)


@pytest.mark.parametrize("pinned", [True, False, None])
def test_every_kind_of_host_memory_goes_one_way_through_the_core(cpu, pinned):
    source = _random_bytes(10_000, seed=0)
    measured = measure_copy(source, torch.empty_like(source), cpu, pinned=pinned, time_limit_s=0.02)
    assert measured.verification.passed and measured.pinned is pinned
    assert measured.clock.startswith("the host's clock")


class ShortCopy(torch.Tensor):
    """Bytes whose copy leaves the last one out."""

    def copy_(self, source, non_blocking=False):
        self.as_subclass(torch.Tensor)[:-1].copy_(source[:-1])
        return self


class FlippedBit(torch.Tensor):
    """Bytes of which a copy turns over one bit."""

    def copy_(self, source, non_blocking=False):
        plain = self.as_subclass(torch.Tensor)
        plain.copy_(source)
        plain[5000] ^= 1
        return self


@pytest.mark.parametrize("faulty", [ShortCopy, FlippedBit])
def test_one_wrong_byte_is_caught(cpu, faulty):
    source = _random_bytes(10_000, seed=0)
    destination = torch.zeros_like(source).as_subclass(faulty)
    verification = measure_copy(source, destination, cpu, pinned=None, time_limit_s=0.01).verification
    assert not verification.passed and verification.error == pytest.approx(1e-4)


def test_poison_differs_from_what_is_expected_in_every_byte():
    source, destination = _random_bytes(3000, seed=1), torch.empty(3000, dtype=torch.uint8)
    poison_bits(destination, source)
    assert verify_bits(destination, source).error == 1.0


def test_bytes_take_every_value_and_depend_on_the_seed():
    drawn = _random_bytes(100_000, seed=3)
    assert drawn.dtype == torch.uint8 and len(torch.unique(drawn)) == 256
    assert torch.equal(drawn, _random_bytes(100_000, seed=3)) and not torch.equal(drawn, _random_bytes(100_000, seed=4))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_an_accelerator_there_is_a_reason_and_no_number(cpu, direction):
    assert transfer_refusal(cpu) == peer_refusal([cpu]) == "no accelerator: host and device are one memory"
    with pytest.raises(HyperionError, match="one memory"):
        measure_transfer(direction, 1024, cpu, pinned=False)


def devices(count: int, machine: str = "MI250X") -> list:
    injected = facts(gpus=tuple(gpu(machine) for _ in range(count)))
    return [detect(injected, index) for index in range(count)]


def test_one_gpu_has_no_peer():
    assert transfer_refusal(devices(1)[0]) == "" and peer_refusal(devices(2)) == ""
    assert peer_refusal(devices(1)) == "GPUs visible: 1; a copy from one to another needs two"


def test_pairs_go_both_ways_and_to_nobody_itself():
    pairs = [(source.index, destination.index) for source, destination in peer_pairs(devices(4, "H200"))]
    assert len(pairs) == len(set(pairs)) == 12
    assert all((b, a) in pairs and a != b for a, b in pairs)
