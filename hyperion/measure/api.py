"""Four questions about a function of your own: how long, which of two is faster, how much memory, how many FLOPs.

    from hyperion import measure

    print(measure.time(lambda: model(x)))
    print(measure.compare(eager, compiled, labels=("eager", "compiled")))

A function takes no arguments: close over them with a lambda. Everything is timed by `time_interleaved`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from torch.utils._pytree import tree_flatten

from hyperion.errors import HyperionError
from hyperion.hardware import Device, detect, detect_cpu
from hyperion.measure.answers import ComparisonAnswer, TimeAnswer
from hyperion.measure.answers_counted import FlopsAnswer, MemoryAnswer
from hyperion.measure.counting import count_flops, watch_memory
from hyperion.measure.memory import GIB, PeakMemoryRegion
from hyperion.measure.timing import MINIMUM_SAMPLES, time_interleaved
from hyperion.measure.verify import relative_error

# What two right ways to compute the same leave between them: another order of the sums, with room. Exact types: nothing.
OUTPUT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}

Function = Callable[[], object]


def time(
    function: Function,
    *,
    device: Device | str | torch.device | None = None,
    cold: bool = True,
    label: str | None = None,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 5.0,
    back_to_back: int = 0,
) -> TimeAnswer:
    """Seconds of one call: warmed up until flat, at least `minimum_samples` samples, until the 95 % interval is within 1 %.

    Args:
        function: takes nothing and does one unit of work; it need not synchronise.
        device: a `hyperion.hardware.Device` or a name as PyTorch's ("cpu", "cuda:1"); None takes the one torch uses here.
        cold: flush the last-level cache before each call, as a call among others finds it. False leaves it as the call
            before left it: right for whole steps, and for what really runs in a tight loop.
        label: what to call the function in print; None takes its name.
        time_limit_s: seconds of sampling, once the minimum is reached.
        back_to_back: above 0, a sample is the mean of that many calls in a row on the host's clock: what a loop around
            the function sees, the host's cost to launch it included. Needs cold=False.

    Raises:
        HyperionError: it cannot be called so. What the function raises itself comes through as it is, with a note.
    """
    function, label = checked_callable(function, "time"), label or _name_of(function, "the function")
    device = device_of(device)
    with noting("time", label):
        (timing,) = time_interleaved(
            [function], device, cold=cold, minimum_samples=minimum_samples, time_limit_s=time_limit_s,
            back_to_back=back_to_back,
        )  # fmt: skip
    return TimeAnswer(label, timing, device)


def compare(
    function_a: Function,
    function_b: Function,
    *,
    device: Device | str | torch.device | None = None,
    cold: bool = True,
    labels: tuple[str, str] | None = None,
    tolerance: float | None = None,
    minimum_samples: int = MINIMUM_SAMPLES,
    time_limit_s: float = 5.0,
    back_to_back: int = 0,
) -> ComparisonAnswer:
    """Which of two functions is faster: timed in turn, so that drift meets both alike, and their outputs compared.

    Before the timing each is called once from the same random state; where both return tensors (or the same nest of them),
    these are compared in float64.

    Args:
        labels: what to call them in print; None takes their names, or A and B.
        tolerance: largest relative Frobenius error between the outputs; None takes that of the coarser of their dtypes,
            `OUTPUT_TOLERANCE`.

    The other arguments and errors are those of `time`.
    """
    functions = [checked_callable(function_a, "compare"), checked_callable(function_b, "compare")]
    labels = labels or _two_names(*functions)
    device = device_of(device)
    with noting("compare", " or ".join(labels)):
        outputs = [_output_of(function, device) for function in functions]
        error, allowed, reason = _distance(*outputs)
        del outputs  # they would lie in memory beside what is timed
        timings = time_interleaved(
            functions, device, cold=cold, minimum_samples=minimum_samples, time_limit_s=time_limit_s,
            back_to_back=back_to_back,
        )  # fmt: skip
    allowed = tolerance if tolerance is not None and error is not None else allowed
    return ComparisonAnswer(tuple(labels), tuple(timings), device, error, allowed, reason)


def memory(
    function: Function, *, device: Device | str | torch.device | None = None, label: str | None = None
) -> MemoryAnswer:
    """The most memory a call needs at once: tensors by dispatch on any device, and by the device's allocator on a GPU.

    The function is called three times (a GPU: four): once to warm up, so that lazily made state is there, once to learn which
    tensors it works on, and once for each count. Under the count by dispatch a compiled function runs uncompiled.

    The arguments and errors are those of `time`.
    """
    function, label = checked_callable(function, "memory"), label or _name_of(function, "the function")
    device = device_of(device)
    with noting("memory", label):
        function()
        allocator = _allocated(function, device) if device.kind != "cpu" else {}
        watched = watch_memory(function, device)
    return MemoryAnswer(
        label, device, watched.before_bytes, watched.peak_bytes, watched.peak_operator, tuple(watched.history), **allocator
    )


def flops(function: Function, *, label: str | None = None) -> FlopsAnswer:
    """Floating-point operations of one call by operator and by module, and the operators that no formula is known for.

    Counted where PyTorch dispatches, by its own formulas (torch.utils.flop_counter) for products, convolutions and attention;
    a multiply-add is 2. The function is called once; a compiled one runs uncompiled.

    Errors are those of `time`.
    """
    function, label = checked_callable(function, "flops"), label or _name_of(function, "the function")
    with noting("flops", label):
        return FlopsAnswer(label, *count_flops(function))


def device_of(device: Device | str | torch.device | None) -> Device:
    """The described device behind a name of PyTorch's; None is the one torch uses here: its current GPU, else the CPU.

    Raises:
        HyperionError: a kind of device that nothing here measures.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise HyperionError(f"{device!r} is no device", where="device=", next_step='name one: "cpu", "cuda:0"') from error
    if place.type not in ("cpu", "cuda"):
        raise HyperionError(
            f"devices of the kind {place.type!r} are not measured", where="device=", next_step='use "cpu" or "cuda:<index>"'
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise HyperionError(
            "PyTorch sees no GPU here", where=f"device={str(device)!r}", next_step="hyperion doctor says why; or device=\"cpu\""
        )
    index = torch.cuda.current_device() if place.type == "cuda" and place.index is None else place.index or 0
    return _described(place.type, index)


@functools.cache
def _described(kind: str, index: int) -> Device:
    # Looking takes a second the first time and never sees another device in the same process.
    return detect_cpu() if kind == "cpu" else detect(index=index)


def checked_callable(function: object, question: str, arguments: tuple = ()) -> Function:
    """The function, if calling it with that many arguments does its work.

    Raises:
        HyperionError: it is no function, makes only a coroutine or generator, or wants other arguments.
    """
    where, given = f"hyperion.measure.{question}", " batch" if arguments else ""
    if not callable(function):
        raise HyperionError(
            f"{type(function).__name__} is no function",
            where=where,
            next_step=f"hand over the work itself, not its outcome: measure.{question}(lambda{given}: model(x))",
        )
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise HyperionError(
            f"calling {_name_of(function, 'it')} only makes a coroutine or generator: no work would be done",
            where=where,
            next_step="wrap what runs it to its end in a function",
        )
    with contextlib.suppress(ValueError):  # built-in functions may have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise HyperionError(
                f"{_name_of(function, 'the function')}{signature} is called with {', '.join(arguments) or 'nothing'}: {error}",
                where=where,
                next_step=f"close over its arguments: measure.{question}(lambda{given}: {_name_of(function, 'f')}(...))",
            ) from None
    return function


def _name_of(function: object, otherwise: str) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func, otherwise)
    name = getattr(function, "__name__", type(function).__name__)
    return otherwise if name == "<lambda>" else name


def _two_names(function_a: Function, function_b: Function) -> tuple[str, str]:
    a, b = _name_of(function_a, "A"), _name_of(function_b, "B")
    return (a, b) if a != b else (f"{a} (A)", f"{b} (B)")


@contextlib.contextmanager
def noting(question: str, label: str) -> Iterator[None]:
    """An exception of the reader's own function stays what it is, with a note: another type would hide it."""
    try:
        yield
    except HyperionError:
        raise
    except Exception as error:
        error.add_note(f"raised while hyperion.measure.{question} called {label}")
        raise


def _allocated(function: Function, device: Device) -> dict[str, int]:
    torch.cuda.synchronize(device.torch_device)
    before = torch.cuda.memory_allocated(device.torch_device)
    with PeakMemoryRegion(device) as region:
        function()
    return {"allocator_before_bytes": before, "allocator_peak_bytes": round(region.peak.gib * GIB)}


def _output_of(function: Function, device: Device) -> tuple[list, object]:
    """Leaves and shape of what a call from a fixed random state returns; tensors copied, for the next call may overwrite them."""
    gpus = [torch.device(device.torch_device)] if device.kind != "cpu" else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs that nobody restores
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        leaves, structure = tree_flatten(function())
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure


def _distance(output_a, output_b) -> tuple[float | None, float | None, str]:
    """(relative error, its tolerance, "") of two outputs, or (None, None, why they cannot be compared)."""
    (leaves_a, structure_a), (leaves_b, structure_b) = output_a, output_b
    both = leaves_a and leaves_b
    if not both or not all(isinstance(leaf, torch.Tensor) for leaf in (*leaves_a, *leaves_b)):
        return None, None, "they do not both return tensors"
    if structure_a != structure_b:
        return None, None, "they return different nests of tensors"
    errors, allowed = [], []
    for a, b in zip(leaves_a, leaves_b, strict=True):
        if a.shape != b.shape:
            return None, None, f"they return tensors of different shapes, {tuple(a.shape)} and {tuple(b.shape)}"
        if a.layout != torch.strided or b.layout != torch.strided:
            return None, None, "they return sparse tensors"
        errors.append(relative_error(_real(a), _real(b).to(a.device)))
        allowed.append(max(OUTPUT_TOLERANCE.get(_real(tensor).dtype, 0.0) for tensor in (a, b)))
    # The worst tensor against its own tolerance; NaN is the worst of all.
    worst = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i] - allowed[i]))
    return errors[worst], allowed[worst], ""


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
