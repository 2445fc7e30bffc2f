import copy
import dataclasses
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.forms import FieldError, read_form
from hyperion.hardware import PATHS, detect, detect_cpu, lookup, peak, specification
from hyperion.hardware.specs import (
    AGREEMENT,
    SPECS_FILE,
    LinkEntry,
    MemoryEntry,
    PeakEntry,
    SpecificationError,
    SpecificationFile,
    load_specifications,
)
from tests.hardware.machines import GPUS, facts, gpu

CELLS = [(entry, path) for entry in load_specifications().device for path in PATHS]


@pytest.mark.parametrize(("entry", "path"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_every_cell_is_derived_within_one_percent_or_says_why_not(entry, path):
    cell = entry.paths[path]
    if cell.ops is None:
        assert cell.reason
    elif cell.published is None or cell.clock_mhz is None:
        assert cell.note
    else:
        assert entry.compute_units * cell.ops * cell.clock_mhz / 1e6 == pytest.approx(cell.published, rel=0.01)


def test_every_value_has_a_vendor_document_with_a_date():
    sheet = load_specifications()
    for entry in sheet.device:
        vendor = {"rocm": "AMD", "cuda": "NVIDIA"}[entry.kind]
        for name in [entry.source, entry.memory.source, *(cell.source for cell in entry.paths.values())]:
            assert name is None or sheet.sources[name].publisher == vendor


def test_no_source_is_listed_without_being_cited():
    sheet = load_specifications()
    cited = {entry.source for entry in sheet.device} | {entry.memory.source for entry in sheet.device}
    cited |= {cell.source for entry in sheet.device for cell in entry.paths.values()}
    assert sheet.sources.keys() == cited - {None}


def test_the_devices_asked_for_are_there():
    assert len(load_specifications().device) >= 15
    assert all(specification(detect(facts(machine))) for machine in GPUS)


@pytest.mark.parametrize("machine", GPUS)
def test_no_limit_lies_below_its_published_value(machine):
    sheet = specification(detect(facts(machine)))
    for path in PATHS:
        found = sheet.peak(path)
        assert (found.limit_tflops is None) == (found.reason is not None)
        if found.limit_tflops is not None and found.published_tflops is not None:
            assert found.limit_tflops >= found.published_tflops * 0.99
        if found.limit_tflops is not None:
            assert "MHz" in found.limit_source and found.source in found.limit_source and found.date
    assert sheet.memory_bandwidth_limit_gb_s >= sheet.memory_bandwidth_gb_s > 0
    assert sheet.link


def test_the_h200_limit_uses_the_maximum_clock_and_not_the_data_sheets():
    bf16 = peak(detect(facts("H200")), "bf16")
    assert bf16.published_tflops == 989.4
    assert bf16.derived_tflops == pytest.approx(132 * 4096 * 1.830e9 / 1e12)
    assert bf16.limit_tflops == pytest.approx(132 * 4096 * 1.980e9 / 1e12)  # 1070.5
    assert bf16.nominal_tflops == 989.4


def test_an_mi250x_is_one_die_not_the_module():
    sheet = specification(detect(facts("MI250X")))
    assert sheet.peak("bf16").published_tflops == 191.5
    assert sheet.memory_bandwidth_gb_s == 1638.4
    assert sheet.peak("fp32_vector").limit_tflops == pytest.approx(47.87, rel=1e-3)  # packed fp32
    assert sheet.peak("fp8").limit_tflops is None and "fp8" in sheet.peak("fp8").reason


def test_a_link_is_shared_by_the_peers_that_there_are():
    limit = {name: specification(detect(facts(name))).link_limit_gb_s for name in ("H200", "MI300X", "MI250X", "H100 PCIe")}
    assert [limit["H200"](ranks)[0] for ranks in (2, 4, 8)] == [450, 450, 450]
    assert [limit["MI300X"](ranks)[0] for ranks in (2, 4, 8)] == [64, 192, 448]
    assert limit["MI250X"](2)[0] == 200 and "NVLink 4" in limit["H200"](4)[1]
    for unknown in (limit["MI250X"](8), limit["H100 PCIe"](2)):
        assert unknown[0] is None and unknown[1]


def test_a_shared_name_is_told_apart_by_compute_units():
    assert specification(detect(facts("MI250X"))).name == "AMD Instinct MI250X (one GCD)"
    assert specification(detect(facts("MI250"))).name == "AMD Instinct MI250 (one GCD)"


def test_a_radeon_card_may_be_counted_in_pairs_of_compute_units():
    pairs, units = gpu("RX 7900 XTX"), gpu("RX 7900 XTX", multi_processor_count=96)
    both = [peak(detect(facts(gpus=(card,))), "fp16").limit_tflops for card in (pairs, units)]
    assert both[0] == both[1] == pytest.approx(96 * 512 * 2526e6 / 1e12)


def test_a_radeon_card_without_a_readable_clock_has_no_limit():
    found = peak(detect(facts(gpus=(gpu("RX 9070 XT", max_clock_mhz=None),))), "fp16")
    assert found.limit_tflops is None and "boost" in found.reason
    assert found.nominal_tflops == 195


def test_a_clock_above_the_data_sheets_raises_the_limit_and_one_below_does_not_lower_it():
    limits = [peak(detect(facts(gpus=(gpu("H200", max_clock_mhz=mhz),))), "bf16").limit_tflops for mhz in (2000, 1200)]
    assert limits == pytest.approx([132 * 4096 * 2000 / 1e6, 132 * 4096 * 1980 / 1e6])


@pytest.mark.parametrize(
    ("machine", "changes", "said"),
    [
        ("H100 SXM", {"multi_processor_count": 114}, "114 compute units, expected 132"),
        ("MI300X", {"multi_processor_count": 38, "total_memory_bytes": 24 * 2**30}, "38 compute units, expected 304"),
        ("H100 SXM", {"total_memory_bytes": 94 * 2**30}, "94.0 GiB of memory, expected 79.2"),
        ("MI250X", {"multi_processor_count": 220}, "220 compute units"),
        ("A100-40", {"major": 9}, "architecture sm_90, expected sm_80"),
        ("H200", {"name": "NVIDIA H200 NVL"}, "no data sheet entry for 'NVIDIA H200 NVL'"),
        ("B200", {"name": "NVIDIA GB200"}, "no data sheet entry"),
        ("RX 7900 XTX", {"name": "AMD Radeon Graphics"}, "no data sheet entry"),
    ],
)
def test_a_device_that_differs_from_its_data_sheet_has_no_peak(machine, changes, said):
    device = detect(facts(gpus=(gpu(machine, **changes),)))
    assert specification(device) is None
    assert said in lookup(device)[1]
    assert peak(device, "bf16").limit_tflops is None and said in peak(device, "bf16").reason


def test_an_unknown_path_is_an_error():
    with pytest.raises(HyperionError, match="Unknown peak"):
        specification(detect(facts("H200"))).peak("fp4")


def test_cpu_limit_needs_the_maximum_clock_and_the_estimate_the_nominal_one():
    cpu = detect_cpu(facts())
    found = peak(cpu, "fp32_vector")
    assert found.limit_tflops == pytest.approx(32 * 32 * 4300e6 / 1e12)
    assert found.nominal_tflops == pytest.approx(32 * 32 * 3850e6 / 1e12)
    virtual = peak(dataclasses.replace(cpu, max_clock_mhz=None), "fp32_vector")
    assert virtual.limit_tflops is None and "not readable" in virtual.reason
    assert virtual.nominal_tflops == found.nominal_tflops and virtual.limit_source is None
    assert specification(cpu).memory_bandwidth_gb_s is None and specification(cpu).memory_bandwidth_source


@pytest.mark.parametrize(
    ("flags", "vendor", "family", "path", "ops"),
    [
        (("avx2", "fma"), "GenuineIntel", 6, "fp32_vector", 32),
        (("avx2", "fma", "avx512f"), "GenuineIntel", 6, "fp64_vector", 32),
        (("avx2", "fma", "avx512f"), "AuthenticAMD", 25, "fp64_vector", 16),
        (("avx2", "fma", "avx512f"), "AuthenticAMD", 26, "fp64_vector", 32),
        (("avx512_bf16", "amx_bf16"), "GenuineIntel", 6, "bf16", 1024),
        (("amx_int8", "avx512_vnni"), "GenuineIntel", 6, "int8", 2048),
        (("asimd", "sve"), "", None, "fp32_vector", None),
        (("avx2", "fma"), "GenuineIntel", 6, "tf32", None),
    ],
)
def test_cpu_operations_follow_the_instruction_set(flags, vendor, family, path, ops):
    cpu = dataclasses.replace(detect_cpu(facts()), isa=flags, vendor=vendor, family=family)
    found = peak(cpu, path)
    expected = None if ops is None else pytest.approx(32 * ops * 4300e6 / 1e12)
    assert found.limit_tflops == expected
    assert ops is not None or found.reason


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("published = 81.7", "published = 84.7", "fp64_vector: units x ops x clock gives 81.7, not 84.7"),
        ('tf32 = { reason = "CDNA 2', 'tf32 = { ops = 7, reason = "CDNA 2', "may have a note, but not a reason"),
        ("compute_units = 304", "compute_units = -304", ".compute_units must be greater than 0, not -304"),
        ("compute_units = 304", "compute_units = true", ".compute_units must be a valid integer, not True"),
        ("compute_units = 304", "compute_units = inf", ".compute_units must be a valid integer, not inf"),
        ("published = 81.7", "published = nan", ".published must be a finite number, not nan"),
        ("[sources]", "[sources.none]", "missing field specs.toml.sources"),
        ('kind = "rocm"', 'kind = "amd"', ".kind must be 'cuda' or 'rocm', not 'amd'"),
        ("bus_bits = 8192", "bus_bits = 4096", "bus x rate gives 2662 GB/s"),
        ("max_clock_mhz = 2100", "max_clok_mhz = 2100", "unknown field specs.toml.device[3: 'AMD Instinct MI300X'].max_clok_mhz"),
        ('source = "mi300_rocm"', 'source = "a blog"', "unknown source a blog"),
        ("[[device]]", "[[device", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, old, new, said):
    text = SPECS_FILE.read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "specs.toml"
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SpecificationError) as error:
        load_specifications(broken)
    assert said in str(error.value) and "specs.toml" in str(error.value.where) and error.value.next_step


GOOD = tomllib.loads(SPECS_FILE.read_text(encoding="utf-8"))
JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.integers(-5, 0), st.just(float("nan")), st.lists(st.integers())
)


@given(st.integers(1, 512), st.integers(1, 65536), st.floats(100, 4000), st.floats(0.9, 1.1))
def test_a_published_value_is_accepted_exactly_within_the_agreement(units, ops, clock_mhz, factor):
    content = copy.deepcopy(GOOD)
    entry = content["device"][0]
    derived = units * ops * clock_mhz / 1e6
    entry.update(compute_units=units, max_clock_mhz=clock_mhz)
    entry["paths"] = {path: {"reason": "not of interest here"} for path in PATHS}
    entry["paths"]["fp16"] = {"ops": ops, "clock_mhz": clock_mhz, "published": derived * factor}
    if abs(1 / factor - 1) < AGREEMENT * 0.999:
        read_form(SpecificationFile, content, "specs.toml")
    elif abs(1 / factor - 1) > AGREEMENT * 1.001:
        with pytest.raises(FieldError, match="fp16: units x ops x clock"):
            read_form(SpecificationFile, content, "specs.toml")


@settings(max_examples=60, deadline=None)  # machines are shared: a slow example says nothing
@given(st.data(), JUNK)
def test_junk_in_any_field_is_a_fault_with_a_place_and_nothing_else(data, junk):
    content = copy.deepcopy(GOOD)
    entry = content["device"][data.draw(st.integers(0, len(content["device"]) - 1))]
    name = entry["name"]
    field = data.draw(st.sampled_from(sorted(set(entry) - {"name"})))
    entry[field] = junk
    try:
        read_form(SpecificationFile, content, "specs.toml")
    except FieldError as fault:
        assert name in fault.what
    else:  # a text of three letters may do as a reason, positive numbers as counts of units
        assert isinstance(junk, str) or (field == "enumerated_units" and (junk is None or junk and min(junk) > 0))


@pytest.mark.parametrize("field", ["sources", "device"])
def test_a_missing_section_is_named(field):
    with pytest.raises(FieldError, match=f"missing field specs.toml.{field}"):
        read_form(SpecificationFile, {key: value for key, value in GOOD.items() if key != field}, "specs.toml")


def test_an_empty_entry_needs_its_reason():
    with pytest.raises(ValueError, match="needs a reason"):
        PeakEntry()
    with pytest.raises(ValueError, match="a note must say why"):
        PeakEntry(ops=8, published=3.0)
    with pytest.raises(ValueError, match="limit_ops"):
        PeakEntry(ops=8, limit_ops=4, published=3.0, clock_mhz=1.0)


def test_bandwidth_and_link_explain_themselves():
    with pytest.raises(ValueError, match="bus x rate gives 1638"):
        MemoryEntry(bandwidth_gb_s=3276.8, bus_bits=4096, rate_gbps=3.2)
    with pytest.raises(ValueError, match="or a reason"):
        LinkEntry(gb_s=50)
    with pytest.raises(ValueError, match="a part of gb_s"):
        LinkEntry(gb_s=50, to="its neighbour", per_peer_gb_s=64)
