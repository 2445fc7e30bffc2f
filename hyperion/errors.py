"""The exception for errors that a user can correct, and checks of arguments that raise it."""

import difflib
import errno
import math
import numbers
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar


class HyperionError(Exception):
    """Raised for an error that a user can correct.

    Args:
        what: what is wrong, with the wrong value.
        where: the file, record, cell or device that has the error.
        next_step: what the user should do next, as a command or an instruction.
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

    def __reduce__(self) -> tuple:
        # By default, unpickling passes all arguments of an exception positionally, which `__init__` does not accept. Without
        # this method, a process pool raises a TypeError instead of the worker's error.
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def as_dict(self) -> dict[str, str | None]:
        """Return the parts of the error as a JSON-serializable dict, to pass the error to another process."""
        return {"what": self.what, "where": None if self.where is None else str(self.where), "next_step": self.next_step}

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows in a notebook: the message without a traceback."""
        return [f"{type(self).__name__}: {self}"]


Error = TypeVar("Error", bound=HyperionError)
Value = TypeVar("Value")
LARGEST_SEED = 2**32 - 1  # the largest seed that numpy accepts


def require_seed(seed: int) -> int:
    """Return `seed` if the random generators of Python, numpy and torch accept it.

    Raises:
        HyperionError: the seed is not an integer from 0 to 2^32 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise HyperionError(
            f"seed is {seed!r}, which is not a whole number from 0 to {LARGEST_SEED}",
            where="the seed of the run",
            next_step="give another seed, for example --seed 0 or SEED=0",
        )
    return int(seed)


def nearest_first(name: str, known: Iterable[str]) -> str:
    """Return the known names as text, for the message about an unknown name. Similar names come first and are marked."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    others = ", ".join(one for one in names if one not in close)
    return f"{', '.join(close)} (similar){others and f', {others}'}" if close else others


def require_writable(folder: Path, kind: type[Error], *, action: str, unchanged: str, elsewhere: str) -> None:
    """Create a folder if it does not exist, and check that a file can be written to it. For the arguments see `refused_write`.

    Raises:
        HyperionError: an error of this kind, if the folder cannot be created, or no file can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits show neither quotas nor read-only file systems, so a file is written.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"hyperion")
    except OSError as error:
        raise refused_write(error, kind, action=action, unchanged=unchanged, where=folder, elsewhere=elsewhere) from error


def refused_write(error: OSError, kind: type[Error], *, action: str, unchanged: str, where: object, elsewhere: str) -> Error:
    """Return an exception that explains a failed write, for example on a full disk or on a read-only file system.

    Args:
        error: the error of the operating system.
        kind: class of the returned exception.
        action: what failed, such as "cannot write".
        unchanged: what is unchanged, such as "nothing was changed".
        where: the file or folder.
        elsewhere: how to choose another file or folder, such as "name another one with …".
    """
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, remedy = f"the disk is full; {unchanged} ({reason})", "free some space and run the same command again"
    elif error.errno == errno.EROFS:
        what, remedy = f"{action}: {reason}; {unchanged}", "make its file system writable"
    elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST):
        what, remedy = f"{action}: {reason}", "move away the file or folder that is in the way"
    elif error.errno == errno.ENOENT:
        what, remedy = f"{action}: {reason}", "create the folder"
    else:
        what, remedy = f"{action}: {reason}", "make the folder writable"
    return kind(what, where=where, next_step=f"{remedy}, or {elsewhere}")


def is_finite_number(value: object) -> bool:
    """Return True if the value is a number that a finite float can hold. Booleans are not numbers here, NumPy's scalars are."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


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
    """Check that an argument is a finite number within bounds. Booleans are not accepted.

    Args:
        name: name of the argument, for the error message.
        value: value of the argument.
        where: function or class that has the argument, for the error message.
        whole: if True, accept only integers, including NumPy's.
        at_least: smallest accepted value.
        above: exclusive lower bound.
        at_most: largest accepted value.
        below: exclusive upper bound.

    Raises:
        HyperionError: the argument is not a finite number within the bounds. The message contains the value and the bounds.
    """
    if is_finite_number(value) and isinstance(value, numbers.Integral if whole else numbers.Real):
        number: Any = value  # numbers.Real declares no comparison with float
        if at_least <= number <= at_most and above < number < below:
            return
    bounds = {"from": at_least, "above": above, "to": at_most, "below": below}
    within = " ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))
    raise HyperionError(
        f"{name} is {value!r:.80}, which is not a {'whole' if whole else 'finite'} number{within and ' ' + within}",
        where=where,
        next_step=f"give a {'whole' if whole else 'finite'} number {within}".rstrip(),
    )


def not_none(value: Value | None) -> Value:
    """Return `value` with a type that excludes None, for values that a type checker cannot prove to be present.

    Raises:
        ValueError: the value is None.
    """
    if value is None:
        raise ValueError("a value that must not be None is None")
    return value
