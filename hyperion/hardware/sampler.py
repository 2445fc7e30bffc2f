"""Read a device's telemetry once, or sample it while a block of code runs."""

import functools
import threading
import time
from dataclasses import replace

from hyperion.hardware.device import Device
from hyperion.hardware.readers import amd_reader, cpu_reader, nvml_reader
from hyperion.hardware.telemetry import Reader, Telemetry, median_of


def read(device: Device) -> Telemetry:
    """The device's state now. Never raises for an unreadable quantity: it is None and named in `unreadable`."""
    return reader_for(device)()


@functools.cache
def reader_for(device: Device) -> Reader:
    """The open connection (NVML, amdsmi, sysfs, cpufreq) that reads this device."""
    return {"cuda": nvml_reader, "rocm": amd_reader, "cpu": cpu_reader}[device.kind](device)


class Sampler:
    """Reads a device about `1 / interval_s` times a second beside the code in its `with` block.

        with Sampler(device) as sampler:
            work()
        sampler.telemetry            # medians over the block

    At least one reading is taken however short the block. An error in the reader is raised when the block ends.
    """

    def __init__(self, device: Device, interval_s: float = 0.1, reader: Reader | None = None):
        self._read = reader or reader_for(device)
        self._interval_s = interval_s
        self._readings: list[Telemetry] = []
        self._moments_s: list[float] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and exception[0] is None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                reading = self._read()
                self._moments_s.append(time.monotonic())
                self._readings.append(reading)
                if self._stop.wait(self._interval_s):
                    return
        except Exception as error:  # handed to the caller's thread by __exit__
            self._error = error

    @property
    def telemetry(self) -> Telemetry:
        """Medians over the readings so far; throttle joins every reason seen."""
        readings = list(self._readings)
        moments_s = self._moments_s[: len(readings)]
        window_s = moments_s[-1] - moments_s[0] if readings else 0.0
        return replace(median_of(readings), window_s=window_s, interval_s=self._interval_s)
