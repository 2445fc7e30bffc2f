"""Options: the typed sizes of an experiment, one documented field each. Profiles state them; unknown names are refused."""

import json
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperion.chapter.context import Context
from hyperion.errors import HyperionError

# Strict: neither "8" nor 8.0 stands for the count 8.
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Table(BaseModel):
    """Base of a table inside options, such as one of several shapes. A subclass documents each field under "Args"."""

    model_config = _STRICT


class Options(BaseModel):
    """Base of an experiment's options. A subclass documents each field under "Args" and gives a default only where most
    profiles agree.

    Args:
        timeout_s: seconds after which a process that the experiment starts is killed.
    """

    model_config = _STRICT

    timeout_s: float = Field(default=3600.0, gt=0)

    @classmethod
    def of(cls, context: Context) -> Self:
        """Return the options that an experiment was given.

        Raises:
            HyperionError: an unknown, missing or invalid option, by name.
        """
        return cls.parse(context.sizes, context.experiment)

    @classmethod
    def parse(cls, sizes: dict, experiment: str) -> Self:
        """Return the options in a table of a profile.

        Raises:
            HyperionError: an unknown, missing or invalid option, by name.
        """
        try:
            # By way of JSON: there a strict model takes lists for tuples and tables for nested models.
            return cls.model_validate_json(json.dumps(sizes))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            known = ", ".join(cls.model_fields)
            raise HyperionError(
                f"option {name!r} of the experiment {experiment!r}: {first['msg']}",
                where="sizes of the experiment: sizes.toml of its subject, or the call that gave them",
                next_step=f"correct it; the options are {known}",
            ) from error
