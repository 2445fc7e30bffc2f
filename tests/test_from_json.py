"""JSON read back as dataclasses: what fits is the same again, what does not is refused by the field's name."""

import json
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.untrusted import FieldError, from_json


@dataclass(frozen=True)
class Part:
    name: str
    size: int | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    rate: float
    flags: dict[str, str | bool]
    free: dict = field(default_factory=dict)
    sure: bool = True


PARTS = st.builds(Part, st.text(), st.none() | st.integers())
WHOLES = st.builds(
    Whole,
    st.lists(PARTS).map(tuple),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(), st.text() | st.booleans()),
    st.dictionaries(st.text(), st.integers()),
    st.booleans(),
)


@given(WHOLES)
def test_what_was_written_is_read_back(whole):
    assert from_json(Whole, json.loads(json.dumps(asdict(whole))), "whole") == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": [{"name": "a", "colour": "red"}]}, "unknown field whole.parts[0].colour"),
        ({"parts": [{"size": 3}]}, "missing field whole.parts[0].name"),
        ({"parts": {}}, "whole.parts must be a list"),
        ({"parts": [{"name": "a", "size": True}]}, "whole.parts[0].size must be a whole number, not True"),
        ({"rate": float("nan")}, "whole.rate must be a finite number"),
        ({"rate": "fast"}, "whole.rate must be a finite number, not 'fast'"),
        ({"flags": {"x": 3}}, "whole.flags.x must be true or false, not 3"),
        ({"sure": 1}, "whole.sure must be true or false"),
        ({"free": []}, "whole.free must be an object"),
        ({"more": 1}, "unknown field whole.more"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, said):
    good = {"parts": [], "rate": 1, "flags": {}}
    assert from_json(Whole, good, "whole") == Whole((), 1.0, {})
    with pytest.raises(FieldError) as error:
        from_json(Whole, good | change, "whole")
    assert said in error.value.what


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["parts", "rate", "flags", "x"]), inner, max_size=3)
        ),
    )
)
def test_junk_is_refused_and_nothing_else(junk):
    try:
        from_json(Whole, junk, "whole")
    except FieldError as error:
        assert "whole" in error.what
