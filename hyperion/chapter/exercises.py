"""Exercises with automatic marking.

The reader writes a check or a timer. The exercise applies this function to a correct object and to objects that are broken on
purpose, and reports for which objects the function gave the right answer.
"""

import functools
import inspect
import linecache
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import pandas as pd

from hyperion.errors import HyperionError

Subject = TypeVar("Subject")
Answer = TypeVar("Answer")
Rest = ParamSpec("Rest")


def explains_errors(
    judge: Callable[Concatenate[Answer, Rest], pd.DataFrame],
) -> Callable[Concatenate[Answer, Rest], pd.DataFrame]:
    """Decorate a function that judges a function of the reader, so that errors are explained to the reader.

    If the reader's function fails, or returns an object of the wrong type, a HyperionError says so instead of a traceback through
    this library. It quotes the reader's line that failed, and what `judge` documents about its first argument.
    """

    @functools.wraps(judge)
    def judge_or_explain(answer: Answer, *args: Rest.args, **kwargs: Rest.kwargs) -> pd.DataFrame:
        try:
            return judge(answer, *args, **kwargs)
        except HyperionError:
            raise
        except Exception as error:  # the reader's code may raise any exception
            name, wanted = _documented_argument(judge)
            raise HyperionError(
                f"{name} cannot be judged: {type(error).__name__}: {error}",
                where=_line_of_reader(answer, error.__traceback__) or name,
                next_step=f"correct {name} and run the cell again. It must be a {wanted}",
            ) from error

    return judge_or_explain


def _documented_argument(judge: Callable) -> tuple[str, str]:
    """Return the name and the description of the first argument in the docstring of `judge`."""
    found = re.search(r"Args:\n\s+(\w+): (.+?)(?=\n\s*\n|\n\s+\w+: |$)", inspect.getdoc(judge) or "", re.DOTALL)
    assert found is not None, f"the docstring of {judge} does not describe its argument"
    return found[1], " ".join(found[2].split())


def _line_of_reader(answer: object, trace: TracebackType | None) -> str | None:
    """Return the last line of the reader's function in a traceback, or None if the error was not raised there."""
    shown = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is getattr(answer, "__code__", None):
            shown = f"{code.co_name}: {linecache.getline(code.co_filename, trace.tb_lineno).strip()}"
        trace = trace.tb_next
    return shown


def mutation_score(check: Callable[[Subject], bool], clean: Subject, mutants: Mapping[str, Subject]) -> pd.DataFrame:
    """Apply a check to one correct object and to several broken objects.

    Args:
        check: function that returns True for an object that it considers correct. An exception counts as False.
        clean: the correct object. The check must return True for it.
        mutants: broken objects, as {description of the fault: object}. The check must return False for each of them.

    Returns:
        A table with one line per object: its description, the check's answer, and whether the answer was right.
    """
    lines = [("sound", clean, True), *((name, mutant, False) for name, mutant in mutants.items())]
    verdicts = [(name, _verdict(check, subject), wanted) for name, subject, wanted in lines]
    return pd.DataFrame(
        [{"subject": name, "your check says sound": said, "right": said == wanted} for name, said, wanted in verdicts]
    )


@dataclass(frozen=True)
class Question:
    """Exercise question whose answer is a number. The notebook contains the question, but not the answer.

    Args:
        expected: right answer.
        hint: hint shown if the answer is wrong.
        tolerance: largest relative difference from the right answer that counts as right.
    """

    expected: float
    hint: str
    tolerance: float = 0.01

    def judge(self, answer: float | None) -> str:
        """Return a sentence about the reader's answer, which is None if the reader has not answered yet."""
        if answer is None:
            return "not answered yet: set `answer` and run the cell again"
        # bool is a subclass of int, so it would pass the test for numbers.
        if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
            return f"the answer is a {type(answer).__name__}: set `answer` to a number, for example answer = 12.5"
        if abs(answer - self.expected) <= self.tolerance * abs(self.expected):
            return "right"
        return f"{float(answer):g} is not the answer. Hint: {self.hint}"


def _verdict(check: Callable[[Subject], bool], subject: Subject) -> bool:
    try:
        return bool(check(subject))
    except Exception as objection:  # the reader's code may raise any exception, which counts as False
        print(f"your check raised {type(objection).__name__}: {objection}")
        return False
