"""Exercises for the chapters about the hardware.

In chapter 1.1 the reader writes a timer for a simulated asynchronous device.

A good benchmark takes several precautions, such as a warm-up. The first exercise of chapter 1.4 omits one precaution at a time
and shows the resulting error. In the second exercise the reader writes a check that detects such errors.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Queue

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.exercises import Question, explains_errors, mutation_score
from hyperion.hardware import Device, detect

BYTES_OF_TRIAD = Question(3 * 1_000_000 * 2, "two arrays are read, one is written, and bf16 has 16 bits")
WAVES_OF_TILES = Question(math.ceil((4096 / 128) ** 2 / 132), "the number of tiles divided by the number of units, rounded up")
FLOPS_OF_FFT = Question(5 * 4096 * 12, "5 N log2 N with N = 4096, and 4096 is two to the power of 12")
FUSED_STENCIL = Question(20 / 2, "a fused kernel reads one array and writes one; PyTorch reads or writes 20")

PRECAUTIONS = ("synchronise", "warm_up", "flush", "random_data")
_ELEMENTS, _CALLS, _WARM_CALLS = 1 << 22, 15, 3
_M, _N, _K, _CALL_S, _PEAK_TFLOPS = 48, 64, 32, 1e-3, 1e-3


class ToyDevice:
    """Simulated asynchronous device: a call returns before its work is done, as on a GPU.

    `launch()` adds 5 ms of work to a queue, and `synchronize()` waits until the queue is empty. The first launch takes longer, as
    if a kernel were compiled.
    """

    work_s = 5e-3
    first_call_s = 0.2

    def __init__(self):
        self._queue: Queue = Queue()
        self._warm = False
        self.launches = 0
        # The thread waits in `get` forever. As a daemon it does not keep the kernel alive.
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self) -> None:
        """Queue one unit of work and return at once."""
        self.launches += 1
        self._queue.put(self.work_s if self._warm else self.first_call_s)
        self._warm = True

    def synchronize(self) -> None:
        """Wait until all launched work is done."""
        # `join` returns after `task_done` was called for every item, so it also waits for the item that is being processed.
        self._queue.join()

    def _serve(self) -> None:
        while True:
            time.sleep(self._queue.get())
            self._queue.task_done()


@explains_errors
def judge_timer(my_timer: Callable[[ToyDevice], float]) -> pd.DataFrame:
    """Test the reader's timer on a simulated device: it must wait for the device, warm up, and repeat the measurement.

    Args:
        my_timer: function that takes a ToyDevice and returns the time in seconds of the work of one `launch()` after warm-up.

    Returns:
        A table with one line per requirement: whether the timer meets it, and what was observed.
    """
    device = ToyDevice()
    seconds = float(my_timer(device))
    requirements = {
        # `sleep` and the scheduler are not exact. The bounds distinguish the faults: without waiting, a call takes microseconds;
        # a counted first call dominates the mean.
        "the clock stops after the work is done": (seconds >= 0.8 * device.work_s, f"{seconds * 1e3:.2f} ms"),
        "the slow first call is not counted": (seconds <= 4 * device.work_s, f"{seconds * 1e3:.2f} ms"),
        "there are at least 10 samples": (device.launches >= 10, f"{device.launches} launches"),
    }
    return pd.DataFrame([{"requirement": name, "right": bool(met), "seen": seen} for name, (met, seen) in requirements.items()])


def toy_timer(
    device: Device | None = None,
    *,
    synchronise: bool = True,
    warm_up: bool = True,
    flush: bool = True,
    random_data: bool = True,
    elements: int = _ELEMENTS,
) -> float:
    """Return the time in seconds of a copy of float32 numbers on this machine.

    Each precaution of the benchmark, such as the warm-up, can be switched off. The copy runs asynchronously: in a queue on a GPU,
    and in a thread on a CPU.

    Args:
        device: device of the copy. None selects the first device.
        synchronise: whether to wait for the copy to finish before reading the clock.
        warm_up: if True, copy three times before timing and return the median of fifteen timed calls. If False, time only the
            first call.
        flush: whether to read other memory before each call, so that the source is not in the cache.
        random_data: if True, copy normally distributed numbers. If False, copy zeros from an `np.zeros` array that was never
            written. On a CPU, the operating system maps all pages of this array to a single page of memory. On a GPU, constant
            data need less power.
        elements: number of elements.
    """
    device = device or detect()
    where, queue = device.torch_device, _Launches(device)
    source = torch.randn(elements) if random_data else torch.from_numpy(np.zeros(elements, np.float32))
    source = source.to(where)
    target, other = torch.empty(elements, device=where), torch.ones(_flush_elements(device), device=where)
    for _ in range(_WARM_CALLS if warm_up else 0):
        queue.launch(lambda: target.copy_(source))
    seconds = []
    for _ in range(_CALLS if warm_up else 1):
        if flush:
            queue.launch(other.sum)
        queue.wait()
        started = time.perf_counter()
        queue.launch(lambda: target.copy_(source))
        if synchronise:
            queue.wait()
        seconds.append(time.perf_counter() - started)
    queue.wait()
    return float(np.median(seconds))


def broken_benchmarks(device: Device | None = None, *, elements: int = _ELEMENTS, rounds: int = 5) -> pd.DataFrame:
    """Time the copy of `toy_timer` with all precautions, then with each precaution omitted in turn.

    Args:
        device: device of the copy. None selects the first device.
        elements: number of elements.
        rounds: number of repetitions. Each repetition times the copy in every way. The table gives the medians over the
            repetitions.

    Returns:
        A table with one line for each way of timing: the omitted precaution, the time in milliseconds, the resulting GB/s, and
        the ratio of this rate to the correct rate.
    """
    ways = {"nothing": {}, **{name: {name: False} for name in PRECAUTIONS}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, left_out in ways.items():
            seconds[name].append(toy_timer(device, elements=elements, **left_out))
    medians = {name: float(np.median(taken)) for name, taken in seconds.items()}
    moved = 2 * 4 * elements / 1e9
    return pd.DataFrame(
        [
            {
                "omitted precaution": name,
                "ms": 1e3 * s,
                "apparent GB/s": moved / s,
                "ratio to the correct rate": medians["nothing"] / s,
            }
            for name, s in medians.items()
        ]
    )


class _Launches:
    """Simulated device that runs functions asynchronously.

    `launch` returns before the function has run. `wait` returns once all functions have run.
    """

    def __init__(self, device: Device):
        self._device = device
        self._last: Future | None = None
        self._thread = ThreadPoolExecutor(1) if device.kind == "cpu" else None

    def launch(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            work()
        else:
            self._last = self._thread.submit(work)

    def wait(self) -> None:
        if self._thread is None:
            torch.cuda.synchronize(self._device.torch_device)
        elif self._last is not None:
            self._last.result()


def _flush_elements(device: Device) -> int:
    return max(2 * (device.last_level_cache_bytes or 0), 1 << 24) // 4


@dataclass(frozen=True)
class ToyMeasurement:
    """Results of a benchmark of a matrix product C = A B, passed to the reader's check.

    Args:
        a_MK, b_KN: operands A and B, float32 of shapes [48, 32] and [32, 64].
        c_MN: output C, float32 of shape [48, 64]. It was filled with NaN before the calls.
        flops: floating-point operations per call, used to compute the rate.
        samples_s: time in seconds of each timed call, in call order.
        in_a_row_s: time in seconds of ten back-to-back calls, divided by ten. The device is idle before and after them.
        cold: True if the benchmark reports a rate for cold caches.
        flushes: number of cache flushes during the benchmark.
        peak_tflops: peak of the device in TFLOPS.
    """

    a_MK: torch.Tensor
    b_KN: torch.Tensor
    c_MN: torch.Tensor
    flops: int
    samples_s: np.ndarray
    in_a_row_s: float
    cold: bool
    flushes: int
    peak_tflops: float

    @property
    def tflops(self) -> float:
        """Reported rate in TFLOPS."""
        return self.flops / float(np.median(self.samples_s)) / 1e12


def toy_measurement(noise: float = 0.02, seed: int = 0) -> ToyMeasurement:
    """Return a synthetic measurement without faults: 50 timed calls of about 1 ms each.

    Args:
        noise: relative standard deviation of the call times.
        seed: seed for the operands and the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    a_MK, b_KN = (torch.randn(*shape, generator=generator) for shape in ((_M, _K), (_K, _N)))
    samples_s = _CALL_S * np.random.default_rng(seed).lognormal(0, noise, 50)
    return ToyMeasurement(
        a_MK, b_KN, a_MK @ b_KN, 2 * _M * _N * _K, samples_s, 1.02 * _CALL_S, True, len(samples_s), _PEAK_TFLOPS
    )


def _ones(sound: ToyMeasurement) -> ToyMeasurement:
    a_MK, b_KN = torch.ones_like(sound.a_MK), torch.ones_like(sound.b_KN)
    return replace(sound, a_MK=a_MK, b_KN=b_KN, c_MN=a_MK @ b_KN)


def _half_written(sound: ToyMeasurement) -> ToyMeasurement:
    c_MN = sound.c_MN.clone()
    c_MN[_M // 2 :] = float("nan")
    return replace(sound, c_MN=c_MN)


def _scaled(factors: np.ndarray) -> Callable[[ToyMeasurement], ToyMeasurement]:
    return lambda sound: replace(sound, samples_s=sound.samples_s * factors)


TOY_FAULTS: dict[str, Callable[[ToyMeasurement], ToyMeasurement]] = {
    "no synchronisation": lambda sound: replace(_scaled(np.array(0.01))(sound), peak_tflops=1.0),
    "no warm-up": _scaled(np.r_[np.full(15, 5.0), np.ones(35)]),
    "no flush": lambda sound: replace(sound, flushes=0),
    "constant data": _ones,
    "a multiply-add counted as one FLOP": lambda sound: replace(sound, flops=_M * _N * _K),
    "clock drift": _scaled(np.linspace(1.0, 1.3, 50)),
    "half of the output never written": _half_written,
    "a value above the peak": lambda sound: replace(sound, peak_tflops=sound.tflops / 1.4),
}


def judge_harness_check(my_check: Callable[[ToyMeasurement], bool], fault: str | None = None) -> pd.DataFrame:
    """Test the reader's check: it must accept correct measurements and reject faulty ones.

    Args:
        my_check: function that takes a measurement and returns True if it finds no fault.
        fault: the only fault to test, a key of `TOY_FAULTS`. None tests all faults.

    Raises:
        KeyError: `fault` is not in `TOY_FAULTS`.
    """
    sound = toy_measurement()
    faults = TOY_FAULTS if fault is None else {fault: TOY_FAULTS[fault]}
    score = mutation_score(my_check, sound, {name: breaks(sound) for name, breaks in faults.items()})
    noisy = mutation_score(my_check, toy_measurement(noise=0.08, seed=1), {})
    return pd.concat([score, noisy.replace({"subject": {"sound": "sound, on a noisy machine"}})], ignore_index=True)
