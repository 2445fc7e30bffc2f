"""Floors: cited as published, resolved for one device, and a file with a fault is refused with the place."""

import copy
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.forms import FieldError, read_form
from hyperion.hardware import detect, detect_cpu, floors_for, lookup
from hyperion.hardware.floors import FLOORS_FILE, METRICS, OURS, FloorFile, load_floors
from hyperion.hardware.specs import SpecificationError
from hyperion.results import metric_named
from tests.hardware.machines import GPUS, facts, gpu

GOOD = tomllib.loads(FLOORS_FILE.read_text(encoding="utf-8"))
JUNK = st.one_of(st.none(), st.booleans(), st.text(max_size=3), st.integers(-5, 0), st.just(float("nan")), st.just([]))


def of(machine: str, devices: int = 8) -> dict:
    floors, reason = floors_for(detect(facts(machine)), devices)
    assert not reason
    return {(floor.quantity, floor.dtype): floor for floor in floors}


@pytest.mark.parametrize("machine", ["MI250X", "MI250"])
def test_a_gcd_has_amds_published_floors(machine):
    floors = of(machine)
    published = {key[0]: floor.value for key, floor in floors.items() if not floor.ours}
    assert published == {"copy": 1200, "scale": 1200, "add": 1100, "triad": 1100, "dot": 1200, "gemm": 30, "all_reduce": 125}
    for floor in floors.values():
        assert floor.ours or (floor.source.startswith("AMD, ") and "mi250.md" in floor.source and floor.date == "2026-06-24")
    gemm, reduction = floors["gemm", "fp32"], floors["all_reduce", "fp32"]
    assert (gemm.size, gemm.unit) == (4000, "TFLOPS") and (reduction.size, reduction.ranks) == (8 * 2**30, 8)


@pytest.mark.parametrize("machine", ["MI300X", "MI325X"])
def test_a_misprint_of_the_page_is_said_to_be_one(machine):
    floor = of(machine)["gemm", "fp32"]
    assert floor.value == 94.1 and "the page says 94100 TFLOPS, taken for GFLOPS" in floor.conditions


@pytest.mark.parametrize("machine", GPUS)
def test_floors_lie_below_the_limits_and_say_whose_they_are(machine):
    device = detect(facts(machine))
    sheet = lookup(device)[0]
    floors = of(machine)
    assert floors, "every device of the data sheets has at least a bound of ours"
    for floor in floors.values():
        assert floor.unit == metric_named(floor.metric).unit and floor.conditions
        assert floor.ours == floor.source.startswith(OURS) == (floor.date == "")
        if floor.metric == "bandwidth_gb_s":
            assert 0 < floor.value < sheet.memory_bandwidth_gb_s
    if not machine.startswith("MI"):
        assert all(floor.ours for floor in floors.values())


def test_a_bound_of_ours_names_its_share_and_no_vendor():
    copy_floor = of("H200")["copy", "fp32"]
    assert copy_floor.value == 2400 and copy_floor.source == f"{OURS}: 0.5 x memory bandwidth of the data sheet, 4800 GB/s"
    assert all("AMD" not in floor.source and "NVIDIA" not in floor.source for floor in of("H200").values())


def test_one_device_has_no_all_reduce_to_bound_by_its_link():
    assert ("all_reduce", "fp32") not in of("H200", devices=1)
    assert of("H200", devices=4)["all_reduce", "fp32"].ranks == 4


@pytest.mark.parametrize(
    "device",
    [
        detect_cpu(facts()),
        detect(facts(gpus=(gpu("H200", name="NVIDIA H200 NVL"),))),
        detect(facts(gpus=(gpu("MI300X", multi_processor_count=38, total_memory_bytes=24 * 2**30),))),
    ],
)
def test_an_unknown_or_partitioned_device_has_none_with_the_reason(device):
    floors, reason = floors_for(device)
    assert floors == [] and reason.startswith(f"no floor is known for {device.name}: ")


def test_every_source_is_cited_and_every_quantity_is_a_metric():
    assert {entry.source for entry in load_floors().floor} == set(load_floors().sources)
    assert all(metric_named(metric).needs_interval for metric in METRICS.values())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('unit = "TFLOPS"', 'unit = "GFLOPS"', "gemm is measured in TFLOPS, not in GFLOPS"),
        ("value = 1200", "value = -1200", ".value must be greater than 0, not -1200"),
        ('quantity = "copy"', 'quantity = "copies"', "quantity must be one of"),
        ('arch = "gfx90a"', 'arch = "gfx942"', "architecture gfx90a, not gfx942"),
        ('"AMD Instinct MI300X"]', '"AMD Instinct MI300"]', "is not in specs.toml"),
        ('quantity = "scale"', 'quantity = "copy"', "two floors for copy"),
        ('dtype = "fp64"', 'dtype = "float64"', "dtype must be one of fp64, "),
        ('source = "mi250"', 'source = "a blog"', "unknown source a blog"),
        ("ranks = 8", "# no ranks", "ranks is needed for all_reduce"),
        ("share = 0.5", "share = 1.5", ".share must be less than 1, not 1.5"),
        ('of = "link"', 'of = "luck"', ".of must be 'memory bandwidth', 'peak' or 'link', not 'luck'"),
        ("[[floor]]", "[[floor", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, old, new, said):
    text = FLOORS_FILE.read_text(encoding="utf-8")
    header, body = text[: text.index("[sources]")], text[text.index("[sources]") :]
    assert old in body
    broken = tmp_path / "floors.toml"
    broken.write_text(header + body.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SpecificationError) as error:
        load_floors(broken)
    assert said in str(error.value) and "floors.toml" in str(error.value.where) and error.value.next_step


@settings(max_examples=60, deadline=None)  # machines are shared: a slow example says nothing
@given(st.data(), JUNK)
def test_junk_in_any_field_is_a_fault_and_nothing_else(data, junk):
    content = copy.deepcopy(GOOD)
    entry = data.draw(st.sampled_from(content["floor"] + content["sanity"]))
    field = data.draw(st.sampled_from(sorted(entry)))
    entry[field] = junk
    try:
        read_form(FloorFile, content, "floors.toml")
    except FieldError as fault:
        assert fault.what
    else:
        assert field == "conditions" and isinstance(junk, str) and junk.strip()
