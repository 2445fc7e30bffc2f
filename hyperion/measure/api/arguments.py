"""The arguments of the functions in `hyperion.measure`: devices, functions to measure, and labels.

Invalid arguments are errors that name the argument.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Device, detect, detect_cpu

Function = Callable[[], object]


def device_of(device: Device | str | torch.device | None) -> Device:
    """Return the `Device` for a PyTorch device name. None means the current GPU, or the CPU if there is no GPU.

    Raises:
        HyperionError: this machine has no such device, or this kind of device is not supported.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise HyperionError(f"{device!r} is not a device", where="device=", next_step='pass "cpu" or "cuda:0"') from error
    if place.type not in ("cpu", "cuda"):
        raise HyperionError(
            f"devices of type {place.type!r} are not supported", where="device=", next_step='use "cpu" or "cuda:<index>"'
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise HyperionError(
            "PyTorch finds no GPU", where=f"device={str(device)!r}", next_step='run hyperion doctor, or pass device="cpu"'
        )
    if place.type == "cpu" and place.index:
        raise HyperionError(f"there is no device {str(place)!r}: all CPUs are one device", where="device=", next_step='use "cpu"')
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise HyperionError(
            f"{str(place)!r} does not exist: PyTorch sees {torch.cuda.device_count()} GPUs",
            where="device=",
            next_step=f'use "cuda:0" to "cuda:{torch.cuda.device_count() - 1}"',
        )
    index = torch.cuda.current_device() if place.type == "cuda" and place.index is None else place.index or 0
    return _described(place.type, index)


@functools.cache
def _described(kind: str, index: int) -> Device:
    # Cached, because detection takes about a second and its result cannot change within a process.
    return detect_cpu() if kind == "cpu" else detect(index=index)


def checked_callable(function: object, question: str, arguments: tuple = ()) -> Function:
    """Return the function after checking that it is callable and that calling it actually runs its body.

    Args:
        function: the function to measure.
        question: name of the measuring function, such as "time", for error messages.
        arguments: names of the positional arguments that the function must accept.

    Raises:
        HyperionError: the function is not callable, only creates a coroutine or a generator, or takes other arguments.
    """
    where, given = f"hyperion.measure.{question}", " batch" if arguments else ""
    if not callable(function):
        raise HyperionError(
            f"{type(function).__name__} is not callable",
            where=where,
            next_step=f"pass a function, not its result: measure.{question}(lambda{given}: model(x))",
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HyperionError(
            f"calling {name_of(function, 'it')} only creates a coroutine or generator and does no work",
            where=where,
            next_step="pass a function that runs the coroutine or generator to its end",
        )
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise HyperionError(
                f"{name_of(function, 'the function')}{signature} is called with {', '.join(arguments) or 'nothing'}: {error}",
                where=where,
                next_step=f"bind its arguments: measure.{question}(lambda{given}: {name_of(function, 'f')}(...))",
            ) from None
    return function


def checked_label(label: str | None) -> str | None:
    """Return the label unchanged if it is valid.

    Raises:
        HyperionError: the label is blank or not a string.
    """
    if label is not None and not (isinstance(label, str) and label.strip()):
        raise HyperionError(
            f"label is {label!r}, which is not a name", where="label=", next_step="pass a name, or None for the function's name"
        )
    return label


def checked_labels(labels: tuple[str, str] | None) -> tuple[str, str] | None:
    if labels is None:
        return None
    if isinstance(labels, str) or not hasattr(labels, "__len__") or len(labels) != 2 or labels[0] == labels[1]:
        raise HyperionError(
            f"labels are {labels!r}, which is not a pair of different names",
            where="labels=",
            next_step="pass two different names, or None",
        )
    first, second = labels
    return (checked_label(first) or "", checked_label(second) or "")


def name_of(function: object, otherwise: str) -> str:
    if isinstance(function, functools.partial):
        return name_of(function.func, otherwise)
    name = getattr(function, "__name__", type(function).__name__)
    return otherwise if name == "<lambda>" else name


def two_names(function_a: Function, function_b: Function) -> tuple[str, str]:
    a, b = name_of(function_a, "A"), name_of(function_b, "B")
    return (a, b) if a != b else (f"{a} (A)", f"{b} (B)")


@contextlib.contextmanager
def noting(question: str, label: str) -> Iterator[None]:
    """Add a note to exceptions that the measured function raises, without changing their type."""
    try:
        yield
    except HyperionError:
        raise
    except Exception as error:
        error.add_note(f"raised while hyperion.measure.{question} called {label}")
        raise
