"""Documents read as dataclasses: what fits is the same again, what does not is refused by the field's name."""

import json
from dataclasses import asdict, dataclass, field
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.forms import FieldError, read_form


@dataclass(frozen=True)
class Part:
    name: str
    size: int | None = None

    def __post_init__(self):
        if self.size is not None and self.size < 0:
            raise ValueError("size is negative")


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    rate: float
    flags: dict[str, str | bool]
    free: dict = field(default_factory=dict)
    sure: bool = True


PARTS = st.builds(Part, st.text(), st.none() | st.integers(0))
WHOLES = st.builds(
    Whole,
    st.lists(PARTS).map(tuple),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(), st.text() | st.booleans()),
    st.dictionaries(st.text(), st.integers()),
    st.booleans(),
)


@settings(deadline=None)  # the first call imports pydantic
@given(WHOLES)
def test_what_was_written_is_read_back(whole):
    assert read_form(Whole, json.loads(json.dumps(asdict(whole))), "whole") == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": [{"name": "a", "colour": "red"}]}, "unknown field whole.parts[0: 'a'].colour"),
        ({"parts": [{"size": 3}]}, "missing field whole.parts[0].name"),
        ({"parts": {}}, "whole.parts must be a valid array"),
        ({"parts": [{"name": "a", "size": True}]}, "whole.parts[0: 'a'].size must be a valid integer, not True"),
        ({"rate": float("nan")}, "whole.rate must be a finite number"),
        ({"rate": "fast"}, "whole.rate must be a valid number, not 'fast'"),
        ({"flags": {"x": 3}}, "whole.flags.x must be a valid string, not 3"),
        ({"sure": 1}, "whole.sure must be a valid boolean"),
        ({"free": []}, "whole.free must be an object"),
        ({"more": 1}, "unknown field whole.more"),
        ({"rate": True}, "whole.rate must be a valid number, not True"),
        ({"rate": 10**400}, "whole.rate must be a finite number"),
        ({"parts": [{"name": "a", "size": "8"}]}, "whole.parts[0: 'a'].size must be a valid integer, not '8'"),
        ({"parts": [{"name": "a", "size": 8.0}]}, "whole.parts[0: 'a'].size must be a valid integer, not 8.0"),
        ({"parts": [{"name": "a", "size": -1}]}, "whole.parts[0: 'a']: size is negative"),
        ({"free": {"day": date(2026, 11, 23)}}, "datetime.date(2026, 11, 23) is not a text, number, list or table"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, said):
    good = {"parts": [], "rate": 1, "flags": {}}
    assert read_form(Whole, good, "whole") == Whole((), 1.0, {})
    with pytest.raises(FieldError) as error:
        read_form(Whole, good | change, "whole")
    assert said in error.value.what


def test_fields_that_a_form_lacks_are_ignored_on_request():
    content = {"parts": [{"name": "a", "colour": "red"}], "rate": 1, "flags": {}, "more": 1}
    assert read_form(Whole, content, "whole", extra=True) == Whole((Part("a"),), 1.0, {})


@settings(deadline=None)
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
        read_form(Whole, junk, "whole")
    except FieldError as error:
        assert "whole" in error.what
