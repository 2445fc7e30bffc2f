"""Read dataclasses from JSON that others wrote; a field that is unknown, missing or of another type is named."""

import dataclasses
import sys
import types
import typing
from typing import Any, TypeVar

from hyperion.errors import HyperionError

Form = TypeVar("Form")


class FieldError(HyperionError):
    """A field that is unknown, missing or of another type."""


@typing.overload
def from_json(form: type[Form], value: object, place: str, extra: bool = False) -> Form: ...
@typing.overload
def from_json(form: Any, value: object, place: str, extra: bool = False) -> Any: ...
def from_json(form: Any, value: Any, place: str, extra: bool = False) -> Any:
    """Return `value`, as `json.loads` or `dataclasses.asdict` returned it, as `form`.

    Args:
        form: a dataclass of such fields, tuple[X, ...], list[X], dict[str, X], dict, X | None, Literal, or bool, int, float, str.
        place: the name of the value, for the error; the field follows it.
        extra: ignore fields that a dataclass does not have instead of refusing them.

    Raises:
        FieldError: an unknown or missing field, a value of another type, a number that is not finite.
    """
    origin, arguments = typing.get_origin(form), typing.get_args(form)
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, value, place, extra)
    if dataclasses.is_dataclass(form):
        return _dataclass(form, value, place, extra)
    if origin in (tuple, list):
        _require(isinstance(value, list | tuple), place, "a list", value)
        return origin(from_json(arguments[0], item, f"{place}[{index}]", extra) for index, item in enumerate(value))
    if origin is dict:
        _require(isinstance(value, dict), place, "an object", value)
        return {key: from_json(arguments[1], item, f"{place}.{key}", extra) for key, item in value.items()}
    if origin is typing.Literal:
        _require(value in arguments, place, f"one of {', '.join(map(repr, arguments))}", value)
        return value
    if form is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number of JSON may have thousands of digits, more than a float can hold.
        _require(number and abs(value) <= sys.float_info.max, place, "a finite number", value)
        return float(value)
    words = {dict: "an object", bool: "true or false", int: "a whole number", str: "a text"}[form]
    _require(isinstance(value, form) and (form is bool or not isinstance(value, bool)), place, words, value)
    return value


def _one_of(forms: tuple, value: Any, place: str, extra: bool) -> Any:
    if value is None and types.NoneType in forms:
        return None
    for form in (candidates := [form for form in forms if form is not types.NoneType]):
        try:
            return from_json(form, value, place, extra)
        except FieldError:
            if form is candidates[-1]:
                raise
    raise AssertionError(f"no form to read {place} as")


def _dataclass(form: Any, value: Any, place: str, extra: bool) -> Any:
    _require(isinstance(value, dict), place, "an object", value)
    fields, hints = {field.name: field for field in dataclasses.fields(form)}, typing.get_type_hints(form)
    if (unknown := sorted(value.keys() - fields.keys())) and not extra:
        raise _error(f"unknown field {place}.{unknown[0]}")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in value and not optional:
            raise _error(f"missing field {place}.{name}")
    known = {name: item for name, item in value.items() if name in fields}
    return form(**{name: from_json(hints[name], item, f"{place}.{name}", extra) for name, item in known.items()})


def _require(holds: bool, place: str, words: str, value: object) -> None:
    if not holds:
        raise _error(f"{place} must be {words}, not {value!r:.60}")


def _error(what: str) -> FieldError:
    return FieldError(what, next_step="write it with the version of Hyperion that reads it")
