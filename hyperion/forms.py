"""Read parsed JSON and TOML as dataclasses, strictly: what does not fit is refused with its place, the fault and the value."""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hyperion.errors import HyperionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Form = TypeVar("Form")


class FieldError(HyperionError):
    """A field that is unknown, missing or has a value that does not fit."""


def read_form(form: type[Form], value: object, place: str, extra: bool = False) -> Form:
    """Return `value`, as `json.loads`, `tomllib.loads` or `dataclasses.asdict` returned it, as `form`.

    Neither "8", 8.0 nor True is a whole number, and numbers must be finite. The fields of dataclasses may have constraints of
    pydantic, such as Annotated[float, Field(gt=0)]. A ValueError of `__post_init__` is reported with the place of the dataclass.

    Args:
        form: a dataclass, or another type that pydantic knows, such as dict[str, X].
        place: the name of the value, for the error; the field follows it.
        extra: ignore fields that a dataclass does not have instead of refusing them.

    Raises:
        FieldError: names the first field that does not fit, what is wrong, and its value.
    """
    from pydantic import ValidationError

    document = {place: value}
    try:
        # By way of JSON: there a strict form takes lists for tuples and tables for nested dataclasses.
        return _adapter(form, extra).validate_json(json.dumps(document, default=_refuse))[place]
    except ValidationError as error:
        first = error.errors()[0]
    field, what, found = _place(first["loc"] or (place,), document), first["msg"], first["input"]
    if first["type"] == "missing":
        raise _field_error(f"missing field {field}")
    if first["type"] == "unexpected_keyword_argument":
        raise _field_error(f"unknown field {field}")
    if first["type"] == "value_error":  # raised by the dataclass itself
        raise _field_error(f"{field}: {what.removeprefix('Value error, ')}")
    _, _, demand = what.partition(" should ")  # "Input should be a valid integer"
    raise _field_error(f"{field} must {demand}, not {found!r:.60}" if demand else f"{field}: {what}")


@functools.cache
def _adapter(form: Any, extra: bool) -> "TypeAdapter":
    # Imported here: importing `hyperion.results` should not take the time of importing pydantic.
    from pydantic import ConfigDict, TypeAdapter

    # Inside a dict, because pydantic allows no settings for a dataclass at the top; so the place is a part of its errors, too.
    settings = ConfigDict(strict=True, extra="ignore" if extra else "forbid", allow_inf_nan=False)
    inside = dict[str, form]  # pyright: ignore[reportInvalidTypeForm]  # known only when this runs
    return TypeAdapter(inside, config=settings)


def _place(location: Sequence[int | str], document: Any) -> str:
    """Return the place of an error, such as `specs.toml.device[3: 'AMD Instinct MI210'].memory.bus_bits`."""
    place = ""
    for part in location:
        if isinstance(document, dict):
            place += f".{part}"
            document = document.get(part)
        elif isinstance(document, list | tuple) and isinstance(part, int):
            document = document[part]
            name = document.get("name") if isinstance(document, dict) else None
            place += f"[{part}: {name!r:.60}]" if isinstance(name, str) else f"[{part}]"
        # Any other part names a member of a union of types.
    return place.removeprefix(".")


def _refuse(value: object) -> None:
    raise _field_error(f"{value!r:.60} is no text, number, list or table")


def _field_error(what: str) -> FieldError:
    return FieldError(what, next_step="write it with the version of Hyperion that reads it")
