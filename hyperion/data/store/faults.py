"""The two ways a data set can fail a reader: it is not here, or it is here and must not be believed."""

from hyperion.errors import HyperionError


class DataError(HyperionError):
    """Data that is present but wrong (truncated, miscounted, unsafe), or a senseless request. Never skipped."""


class DataUnavailable(DataError):
    """A source that does not have the data at all: `auto` says so and tries the next one."""
