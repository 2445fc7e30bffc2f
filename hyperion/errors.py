"""The exception for errors that a user can correct: what is wrong, where, and the next step. Checks of arguments."""

import errno
import math
import numbers
from typing import Any, TypeVar


class HyperionError(Exception):
    """An error that a user can correct.

    Args:
        what: the error in one sentence, with the wrong value.
        where: the file, record, cell or device.
        next_step: what to do now, as a command or an instruction.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: object = None, next_step: str | None = None):
        self.what, self.where, self.next_step = what, where, next_step
        super().__init__(what, where, next_step)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.next_step is not None:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str | None]:
        """Return the parts of the error, JSON-able, to pass it to another process."""
        return {"what": self.what, "where": None if self.where is None else str(self.where), "next_step": self.next_step}

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in a notebook: the message without a traceback through the library."""
        return [f"{type(self).__name__}: {self}"]


Error = TypeVar("Error", bound=HyperionError)
Value = TypeVar("Value")
LARGEST_SEED = 2**32 - 1  # the limit of numpy's generators


def require_seed(seed: int) -> int:
    """Return `seed` if the generators of Python, numpy and torch accept it.

    Raises:
        HyperionError: it is no integer from 0 to 2^32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise HyperionError(
            f"seed is {seed!r}",
            where="the seed of the run",
            next_step=f"give a whole number from 0 to {LARGEST_SEED}, as --seed 0 or SEED=0",
        )
    return int(seed)


def refused_write(error: OSError, kind: type[Error], *, action: str, kept: str, where: object, elsewhere: str) -> Error:
    """Return an error for a failed write: a full disk, a read-only file system, or missing permissions.

    Args:
        kind: class of the returned error.
        action: what failed ("cannot write").
        kept: what is unchanged ("nothing was changed").
        where: the file or folder.
        elsewhere: how to choose another place, as the end of a sentence ("name another one with …").
    """
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, remedy = f"the disk is full; {kept} ({reason})", "free some space and run the same again"
    elif error.errno == errno.EROFS:
        what, remedy = f"{action}: {reason}; {kept}", "make its file system writable"
    else:
        what, remedy = f"{action}: {reason}", "make the folder writable"
    return kind(what, where=where, next_step=f"{remedy}, or {elsewhere}")


def require_number(
    name: str,
    value: object,
    where: str,
    *,
    whole: bool = False,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Check that an argument is a finite number within bounds; True and False are no numbers.

    Args:
        name: name of the argument, for the message.
        where: the function or class of the argument.
        whole: accept integers only, including NumPy's.

    Raises:
        HyperionError: with the value and the bounds.
    """
    if isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        number: Any = value  # numbers.Real declares no comparison with float
        if at_least <= number <= at_most and above < number < below:
            return
    bounds = {"from": at_least, "above": above, "to": at_most, "below": below}
    within = " ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
    raise HyperionError(
        f"{name} is {value!r:.80}", where=where, next_step=f"give a {'whole' if whole else 'finite'} number {within}".rstrip()
    )


def not_none(value: Value | None) -> Value:
    """Return a value that is not None where the caller knows it, which a type checker does not.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError("a value that must be there is None")
    return value
