"""What the system refuses, in words that tell a full disk from a place that may not be written to."""

import errno
import os

import pytest

from hyperion.errors import HyperionError, refused_write


class RoomError(HyperionError):
    pass


def told(number):
    error = OSError(number, os.strerror(number))
    return refused_write(
        error, RoomError, action="cannot write", kept="nothing was changed", where="/place", elsewhere="go elsewhere"
    )


@pytest.mark.parametrize(
    "number, what, remedy",
    [
        (errno.ENOSPC, "the disk is full; nothing was changed (No space left on device)", "free some space"),
        (errno.EDQUOT, "the disk is full; nothing was changed (Disk quota exceeded)", "free some space"),
        (errno.EROFS, "cannot write: Read-only file system; nothing was changed", "make its file system writable"),
        (errno.EACCES, "cannot write: Permission denied", "make the folder writable"),
    ],
)
def test_a_refusal_names_cause_place_and_remedy(number, what, remedy):
    error = told(number)
    assert isinstance(error, RoomError)
    assert (error.what, error.where) == (what, "/place")
    assert error.next_step.startswith(remedy) and error.next_step.endswith(", or go elsewhere")
