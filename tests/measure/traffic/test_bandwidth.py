"""Streams do what their names say, count the bytes they name, and are caught when they do not."""

import numpy as np
import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect, detect_cpu
from hyperion.measure import (
    DIRECTIONS,
    FORMATS,
    OPERATIONS,
    REDUCTIONS,
    measure_bandwidth,
    measure_between,
    measure_copy,
    measure_transfer,
    peer_pairs,
    peer_refusal,
    transfer_refusal,
    verify_bits,
    verify_elementwise,
    verify_sum,
)
from hyperion.measure.clock.verify import poison_bits
from hyperion.measure.traffic import bandwidth
from hyperion.measure.traffic.bandwidth import _random_bytes
from tests.hardware.machines import facts, gpu

ARRAYS = {"copy": 2, "scale": 2, "add": 3, "triad": 3, "dot": 2}
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
CELLS = [(operation, "fp32") for operation in (*OPERATIONS, *REDUCTIONS)]
CELLS += [(operation, dtype) for operation in ("triad", "dot") for dtype in ("fp16", "bf16", "fp64")]


@pytest.mark.parametrize(("operation", "dtype"), CELLS)
def test_bytes_and_result(operation, dtype):
    measured = measure_bandwidth(operation, 10_000, dtype, detect_cpu(), time_limit_s=0.02)
    assert measured.bytes == ARRAYS[operation] * 10_000 * ELEMENT_BYTES[dtype]
    assert measured.verification.passed
    if operation in OPERATIONS:
        assert measured.verification.tolerance == torch.finfo(FORMATS[dtype].storage).eps
    assert len(measured.timing.samples_s) >= 30


def test_a_copy_must_be_exact():
    measured = measure_bandwidth("copy", 10_000, "bf16", detect_cpu(), time_limit_s=0.05)
    assert measured.verification.error == 0


def test_an_unwritten_tail_is_caught():
    a, b = torch.randn(100_000), torch.randn(100_000)
    output = a + 0.4 * b
    output[-1] = float("nan")
    assert not verify_elementwise(output, OPERATIONS["triad"].reference, (a, b), tolerance=1e-6).passed


def factors(dtype: str, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(elements, generator=generator).to(FORMATS[dtype].storage) for _ in range(2))
    return a * 0.25, b


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_a_dot_product_over_part_of_its_elements_is_caught(dtype):
    a, b = factors(dtype, 400_000)
    assert verify_sum(torch.dot(a, b), (a, b), FORMATS[dtype]).passed
    short = slice(None, int(0.97 * len(a)))
    assert not verify_sum(torch.dot(a[short], b[short]), (a, b), FORMATS[dtype]).passed


def test_a_dot_product_of_float64_may_not_miss_one_element():
    a, b = factors("fp64", 400_000)
    assert not verify_sum(torch.dot(a[:-1], b[:-1]), (a, b), FORMATS["fp64"]).passed


def test_a_dot_product_that_was_never_written_is_caught():
    a, b = factors("fp32", 1000)
    assert not verify_sum(torch.tensor(float("nan")), (a, b), FORMATS["fp32"]).passed


def test_accumulating_in_sixteen_bits_is_caught():
    a, b = factors("fp16", 400_000)
    running = np.add.accumulate((a * b).numpy(), dtype=np.float16)[-1]  # every partial sum is rounded to 11 bits
    assert not verify_sum(torch.tensor(running), (a, b), FORMATS["fp16"]).passed


def test_a_sum_of_zeros_is_zero():
    zeros = torch.zeros(10)
    assert verify_sum(torch.tensor(0.0), (zeros,), FORMATS["fp32"]).error == 0
    assert not verify_sum(torch.tensor(1.0), (zeros,), FORMATS["fp32"]).passed


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_wrong_element_of_a_stream_is_caught_wherever_it_is(operation, dtype):
    chosen, storage = OPERATIONS[operation], FORMATS[dtype].storage
    generator = torch.Generator().manual_seed(1)
    inputs = tuple(torch.randn(300_000, generator=generator).to(storage) for _ in range(chosen.inputs))
    output = torch.empty(300_000, dtype=storage)
    chosen.run(output, *inputs)
    tolerance = torch.finfo(storage).eps
    assert verify_elementwise(output, chosen.reference, inputs, tolerance).passed
    place = int((output.float().abs() - 1).abs().argmin())
    output[place] *= 1.09
    assert not verify_elementwise(output, chosen.reference, inputs, tolerance).passed


def test_results_rounded_to_subnormal_numbers_are_right_and_wrong_ones_are_not():
    a = torch.linspace(-1e-6, 1e-6, 1001).half()
    output, tolerance = torch.mul(a, 0.4), torch.finfo(torch.float16).eps
    assert verify_elementwise(output, OPERATIONS["scale"].reference, (a,), 0.1).passed
    output = torch.cat([output, torch.tensor([0.4]).half()])
    a = torch.cat([a, torch.ones(1).half()])
    assert verify_elementwise(output, OPERATIONS["scale"].reference, (a,), tolerance).passed
    output[0] += 2**-22
    assert not verify_elementwise(output, OPERATIONS["scale"].reference, (a,), tolerance).passed


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


@pytest.mark.parametrize(("pinned", "calls"), [(True, 0), (False, 1), (None, 0)])
def test_only_copies_of_pageable_memory_are_timed_by_the_host(cpu, pinned, calls, monkeypatch):
    asked, timed = [], bandwidth.time_function

    def time_function(*arguments, back_to_back, **options):
        asked.append(back_to_back)
        return timed(*arguments, back_to_back=back_to_back, **options)

    monkeypatch.setattr(bandwidth, "time_function", time_function)
    source = _random_bytes(1000, seed=0)
    measure_copy(source, torch.empty_like(source), cpu, pinned=pinned, time_limit_s=0.01)
    # With 0, a sample would be the time on the clock of the GPU. That clock leaves out the copy into the driver's own buffer.
    assert asked == [calls]


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


class NoCopy(torch.Tensor):
    """Bytes that a copy does not write."""

    def copy_(self, source, non_blocking=False):
        return self


def test_a_copy_that_writes_nothing_is_caught_although_the_bytes_were_there_before(cpu):
    source = _random_bytes(10_000, seed=0)
    destination = source.clone().as_subclass(NoCopy)
    assert measure_copy(source, destination, cpu, pinned=None, time_limit_s=0.01).verification.error == 1.0


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


def test_bytes_need_not_fill_a_word_and_are_random_at_each_place_in_it():
    drawn = _random_bytes(4099, seed=0)
    assert len(drawn) == 4099 and all(bool((drawn[place::8] >= 128).any()) for place in range(8))


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
