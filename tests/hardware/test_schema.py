import copy
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.hardware.device import PATHS
from hyperion.hardware.schema import AGREEMENT, Cell, Link, Memory, SchemaFault, SpecificationFile, build
from hyperion.hardware.specs import SPECS_FILE

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
        build(SpecificationFile, content)
    elif abs(1 / factor - 1) > AGREEMENT * 1.001:
        with pytest.raises(SchemaFault, match="fp16: units x ops x clock"):
            build(SpecificationFile, content)


@settings(max_examples=60, deadline=None)  # machines are shared: a slow example says nothing
@given(st.data(), JUNK)
def test_junk_in_any_field_is_a_fault_with_a_place_and_nothing_else(data, junk):
    content = copy.deepcopy(GOOD)
    entry = content["device"][data.draw(st.integers(0, len(content["device"]) - 1))]
    name = entry["name"]
    field = data.draw(st.sampled_from(sorted(set(entry) - {"name"})))
    entry[field] = junk
    try:
        build(SpecificationFile, content)
    except SchemaFault as fault:
        assert fault.what and (name in fault.place or name in fault.what)
    else:  # a text of three letters may do as a reason, positive numbers as counts of units
        assert isinstance(junk, str) or (field == "enumerated_units" and (junk is None or junk and min(junk) > 0))


@pytest.mark.parametrize("field", ["sources", "device"])
def test_a_missing_section_is_named(field):
    with pytest.raises(SchemaFault, match=f"missing field {field}"):
        build(SpecificationFile, {key: value for key, value in GOOD.items() if key != field})


def test_an_empty_cell_needs_its_reason():
    with pytest.raises(SchemaFault, match="needs a reason"):
        Cell()
    with pytest.raises(SchemaFault, match="a note must say why"):
        Cell(ops=8, published=3.0)
    with pytest.raises(SchemaFault, match="limit_ops"):
        Cell(ops=8, limit_ops=4, published=3.0, clock_mhz=1.0)


def test_bandwidth_and_link_explain_themselves():
    with pytest.raises(SchemaFault, match="bus x rate gives 1638"):
        Memory(bandwidth_gb_s=3276.8, bus_bits=4096, rate_gbps=3.2)
    with pytest.raises(SchemaFault, match="or a reason"):
        Link(gb_s=50)
    with pytest.raises(SchemaFault, match="a part of gb_s"):
        Link(gb_s=50, to="its neighbour", per_peer_gb_s=64)


def test_true_is_not_a_number():
    with pytest.raises(SchemaFault, match="above 0, not True"):
        build(int, True, "x")
