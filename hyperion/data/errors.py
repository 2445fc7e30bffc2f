"""Errors of data sets."""

from hyperion.errors import HyperionError


class DataError(HyperionError):
    """The data are wrong (truncated, miscounted, unsafe), or the request is invalid. Never skipped."""


class DataUnavailable(DataError):
    """This source does not have the data. With `data_source=auto` the next source is tried, and the reason is printed."""
