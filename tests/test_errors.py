"""What the system refuses, in words that tell a full disk from a place that may not be written to."""

import copy
import errno
import os
import pickle

import pytest

from hyperion.errors import HyperionError, refused_write, require_number


class RoomError(HyperionError):
    pass


def refusal(number):
    error = OSError(number, os.strerror(number))
    return refused_write(
        error, RoomError, action="cannot write", unchanged="nothing was changed", where="/place", elsewhere="go elsewhere"
    )


@pytest.mark.parametrize(
    "number, what, remedy",
    [
        (errno.ENOSPC, "the disk is full; nothing was changed (No space left on device)", "free some space"),
        (errno.EDQUOT, "the disk is full; nothing was changed (Disk quota exceeded)", "free some space"),
        (errno.EROFS, "cannot write: Read-only file system; nothing was changed", "make its file system writable"),
        (errno.EACCES, "cannot write: Permission denied", "make the folder writable"),
        (errno.EISDIR, "cannot write: Is a directory", "move away the file or folder"),
        (errno.ENOENT, "cannot write: No such file or directory", "create the folder"),
    ],
)
def test_a_refusal_names_cause_place_and_remedy(number, what, remedy):
    error = refusal(number)
    assert isinstance(error, RoomError)
    assert (error.what, error.where) == (what, "/place")
    assert error.next_step.startswith(remedy) and error.next_step.endswith(", or go elsewhere")


class CountedError(HyperionError):
    """An error with another signature and an attribute of its own."""

    def __init__(self, count: int):
        super().__init__(f"{count} bad records", where="/place", next_step="remove them")
        self.count = count


@pytest.mark.parametrize("error", [HyperionError("bad", where="/place", next_step="go on"), RoomError("bad"), CountedError(3)])
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_an_error_reaches_another_process_whole(error, copied):
    found = copied(error)
    assert type(found) is type(error) and str(found) == str(error)
    assert found.as_dict() == error.as_dict() and vars(found) == vars(error)


@pytest.mark.parametrize("value", [10**400, float("inf"), True, "1"], ids=["too large", "infinite", "boolean", "text"])
def test_what_is_no_finite_number_is_refused_by_name(value):
    with pytest.raises(HyperionError, match="rate is .*, which is not a finite number"):
        require_number("rate", value, "a function")
