import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware import HardwareError, collect_facts, detect, detect_cpu
from hyperion.hardware.facts import parse_gcn_arch
from tests.hardware.machines import GPUS, facts, gpu


@pytest.mark.parametrize("machine", GPUS)
def test_each_gpu_is_described_as_torch_enumerates_it(machine):
    device = detect(facts(machine))
    name, arch, units, gib, _, clock = GPUS[machine]
    assert device.kind == ("rocm" if isinstance(arch, str) else "cuda")
    assert device.arch == (arch.split(":")[0] if isinstance(arch, str) else f"sm_{arch[0]}{arch[1]}")
    assert (device.name, device.compute_units, device.torch_device) == (name, units, "cuda:0")
    assert device.memory_bytes == pytest.approx(gib * 2**30, abs=1)
    assert device.max_clock_mhz == clock


def test_the_vendor_is_that_of_the_torch_build_not_of_the_name():
    renamed = gpu("MI300X", name="Device 74a1")
    assert detect(facts(gpus=(renamed,), hip="7.2.0", cuda=None)).kind == "rocm"


def test_last_level_cache_is_the_infinity_cache_where_there_is_one():
    assert detect(facts("MI300X")).last_level_cache_bytes == 256 * 2**20
    assert detect(facts("RX 7900 XTX")).last_level_cache_bytes == 96 * 2**20
    assert detect(facts("MI250X")).last_level_cache_bytes == 8 * 2**20
    assert detect(facts("H200")).last_level_cache_bytes == 60 * 2**20


def test_an_unknown_gpu_keeps_the_cache_torch_reports():
    unknown = gpu("H200", name="NVIDIA X900", l2_cache_bytes=77 * 2**20)
    assert detect(facts(gpus=(unknown,))).last_level_cache_bytes == 77 * 2**20
    assert detect(facts(gpus=(dataclasses.replace(unknown, l2_cache_bytes=None),))).last_level_cache_bytes is None


def test_without_gpus_the_cpu_is_the_device():
    device = detect(facts())
    assert (device.kind, device.torch_device, device.arch, device.compute_units) == ("cpu", "cpu", "x86_64", 32)
    assert device == detect_cpu(facts("H200"))


def test_the_index_chooses_among_visible_gpus():
    both = facts(gpus=(gpu("H200"), gpu("H100 SXM")))
    assert detect(both, index=1).name == "NVIDIA H100 80GB HBM3"
    assert detect(both, index=1).torch_device == "cuda:1"
    with pytest.raises(HardwareError, match="no GPU number 2") as error:
        detect(dataclasses.replace(both, visible_devices={"CUDA_VISIBLE_DEVICES": "4,5"}), index=2)
    assert "4,5" in str(error.value) and error.value.next_step


def test_a_gpu_that_cannot_be_opened_is_an_error_with_its_cause():
    with pytest.raises(HardwareError, match="CUDA driver version is insufficient"):
        detect(facts(gpu_error="CUDA driver version is insufficient", driver="nvidia 470.82"))


def test_a_device_can_be_a_key_of_a_cache():
    assert len({detect(facts("H200")), detect(facts("H200"))}) == 1


def test_this_machine_is_detected():
    here = detect_cpu(collect_facts())
    assert here.compute_units >= 1 and here.memory_bytes > 0 and here.name


@given(st.from_regex(r"gfx[0-9a-f]{3,5}", fullmatch=True), st.lists(st.sampled_from(["sramecc+", "xnack-", "xnack+"])))
def test_gcn_features_are_dropped_from_the_architecture(base, features):
    assert parse_gcn_arch(":".join([base, *features])) == base


@given(st.text(max_size=12).filter(lambda text: not text.startswith("gfx")))
def test_what_is_no_gcn_architecture_is_refused(text):
    with pytest.raises(HardwareError):
        parse_gcn_arch(text)
