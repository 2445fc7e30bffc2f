"""One exception type for everything a user can put right: what was wrong, where, and the next step."""

import errno
import math
import numbers
from typing import TypeVar


class HyperionError(Exception):
    """An error with a remedy.

    Args:
        what: the fault in one sentence, with the offending value.
        where: the file, record, cell or device it was found in.
        next_step: what the reader should do now, as a command or an instruction.
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
        """The error's parts, JSON-able, for a process that passes it on."""
        return {"what": self.what, "where": None if self.where is None else str(self.where), "next_step": self.next_step}

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the error in its own words. Its way through the library helps no reader."""
        return [f"{type(self).__name__}: {self}"]


Error = TypeVar("Error", bound=HyperionError)
Value = TypeVar("Value")
LARGEST_SEED = 2**32 - 1  # numpy's generators take no larger one


def require_seed(seed: int) -> int:
    """Return `seed` if Python's, numpy's and torch's generators all take it.

    Raises:
        HyperionError: it is no whole number from 0 to 2^32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise HyperionError(
            f"seed is {seed!r}",
            where="the seed of the run",
            next_step=f"give a whole number from 0 to {LARGEST_SEED}, as --seed 0 or SEED=0",
        )
    return int(seed)


def refused_write(error: OSError, kind: type[Error], *, action: str, kept: str, where: object, elsewhere: str) -> Error:
    """The system's refusal to write, in words: a full disk apart from a place that may not be written to.

    Args:
        kind: class of the error to make.
        action: what could not be done ("cannot write").
        kept: what the refusal left as it was ("nothing was changed").
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
    """Refuse an argument that is not a finite number within bounds; True and False are no numbers.

    Args:
        name: of the argument, for the message.
        where: the function or class that takes it.
        whole: integers alone, NumPy's among them.

    Raises:
        HyperionError: with the value and the bounds.
    """
    kind = numbers.Integral if whole else numbers.Real
    number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    if number and at_least <= value <= at_most and above < value < below:
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
