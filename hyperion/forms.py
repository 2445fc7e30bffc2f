"""Convert parsed JSON and TOML to dataclasses, with strict checks of all fields.

If a value does not fit its field, the error names the field, what is wrong, and the value.
"""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hyperion.errors import HyperionError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Form = TypeVar("Form")


class FieldError(HyperionError):
    """Raised if a field is unknown, is missing, or has a value that does not fit."""


def read_form(form: type[Form], value: object, place: str, extra: bool = False) -> Form:
    """Return `value` as an instance of the type `form`.

    The check is strict: "8", 8.0 and True are errors in an integer field, and numbers must be finite. Fields of dataclasses may
    have pydantic constraints, such as Annotated[float, Field(gt=0)]. If `__post_init__` raises a ValueError, the error message
    contains the position of the dataclass.

    Args:
        form: a dataclass, or another type that pydantic supports, such as dict[str, X].
        value: the result of `json.loads`, `tomllib.loads` or `dataclasses.asdict`.
        place: name of the value for error messages. The name of the field is appended to it.
        extra: if True, ignore fields that a dataclass does not have. If False, they are errors.

    Raises:
        FieldError: a field does not fit. The message names the first such field, what is wrong, and the value.
    """
    from pydantic import ValidationError

    document = {place: value}
    try:
        # Pass the document as JSON: only then does pydantic's strict mode accept lists for tuples and dicts for dataclasses.
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
    # pydantic is imported here to keep `import hyperion.results` fast.
    from pydantic import ConfigDict, TypeAdapter

    # The form is wrapped in a dict, because pydantic accepts no settings for a dataclass at the top level. The key of the dict is
    # `place`, so that it appears in pydantic's errors.
    settings = ConfigDict(strict=True, extra="ignore" if extra else "forbid", allow_inf_nan=False)
    inside = dict[str, form]  # pyright: ignore[reportInvalidTypeForm]  # known only when this runs
    return TypeAdapter(inside, config=settings)


def _place(location: Sequence[int | str], document: Any) -> str:
    """Return the position of an error in a document, such as `specs.toml.device[3: 'AMD Instinct MI210'].memory.bus_bits`."""
    place = ""
    for part in location:
        if isinstance(document, dict):
            place += f".{part}"
            document = document.get(part)
        elif isinstance(document, list | tuple) and isinstance(part, int):
            document = document[part]
            name = document.get("name") if isinstance(document, dict) else None
            place += f"[{part}: {name!r:.60}]" if isinstance(name, str) else f"[{part}]"
        # Any other part of the location is the name of a type in a union.
    return place.removeprefix(".")


def _refuse(value: object) -> None:
    raise _field_error(f"{value!r:.60} is not a text, number, list or table")


def _field_error(what: str) -> FieldError:
    return FieldError(what, next_step="write the file with the same version of Hyperion that reads it")
