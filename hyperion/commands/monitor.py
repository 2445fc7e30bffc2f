"""The command `hyperion monitor`: watch all devices while a command runs, or for a duration. It never changes a device."""

import csv
import io
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from hyperion.commands.console import parse_duration
from hyperion.errors import HyperionError
from hyperion.hardware.device import Device
from hyperion.hardware.monitoring import COLUMNS, DeviceSummary, Monitor, Reading, csv_rows, mean_power, system_devices
from hyperion.hardware.visible import selected_devices, visible_devices
from hyperion.terminal import INTERRUPTED, say

_GROWTH_GIB = 0.05  # less than this is noise of other programs
_PANELS = {
    "utilization_percent": "utilisation (%)",
    "memory_gib": "memory (GiB)",
    "power_w": "power (W)",
    "clock_mhz": "clock (MHz)",
}


def monitor(
    command: Annotated[list[str] | None, typer.Argument(help="Command to run, after --.", show_default=False)] = None,
    interval: Annotated[str, typer.Option(help="Time between two readings, as 0.5s.")] = "0.5s",
    duration: Annotated[str | None, typer.Option(help="Without a command: how long to watch, as 30s or 5m.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write every reading to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the readings to this PNG file.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the command processes, for the energy per token.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Run in which the command measures tokens_per_s, for the energy per token, as `latest`.", show_default=False
        ),
    ] = None,
) -> None:
    """Watch utilisation, memory, temperature, power, clocks and throttling of all devices: `hyperion monitor -- python train.py`.

    The values come from NVML, amdsmi, sysfs or the operating system, and nothing is written to a device. Without a GPU, the CPU
    is watched. Output and exit code of the command are unchanged. A quantity that cannot be read is listed with the reason.
    --tokens divides the energy of the devices that CUDA_VISIBLE_DEVICES and its like make visible to the command.

    Exit codes without a command: 0 after --duration; 130 or 143 if Ctrl-C or SIGTERM ended the watch, whose readings are kept. If
    --csv or --plot cannot be written at the end, a warning says so, and the exit code is 2 unless the command failed.
    """
    if bool(command) == bool(duration):
        raise HyperionError(
            "give either a command or --duration", next_step="hyperion monitor -- python train.py, or --duration 30s"
        )
    interval_s = parse_duration(interval, "--interval")
    if interval_s < 0.01:
        raise HyperionError(
            f"--interval {interval} is too short", next_step="use at least 0.01s; a GPU updates its sensors at 0.1s"
        )
    duration_s = parse_duration(duration, "--duration") if duration else 0.0
    if plot is not None and plot.suffix != ".png":
        raise HyperionError(f"{plot.name!r} does not end in .png", where="--plot", next_step="the picture is a PNG file")
    for file in filter(None, (csv_file, plot)):
        file.open("ab").close()  # an error here costs nothing; after the command, its readings would be lost
    started_s, clock_s = time.time(), time.time() - time.monotonic()
    devices = system_devices()
    counted = visible_devices(devices, os.environ) if tokens is not None else devices
    with Monitor(devices, interval_s) as watching:
        code = run_watched(command) if command else _wait(duration_s)
    for line in summary_lines(watching.summaries(), watching.overhead, tokens, [device.index for device in counted]):
        say(line)
    rows = csv_rows(watching.devices, watching.readings)
    # Both files are tried. The exit code of a command that failed says more than that of a failed write.
    written = [csv_file is None or _written(csv_file, csv_text(rows).encode()), plot is None or _written(plot, plot_png(rows))]
    code = code or (0 if all(written) else HyperionError.exit_code)
    try:
        rates = measured_rates(run, started_s) if run is not None else []
    except HyperionError as error:
        if code == 0:
            raise
        # A command that failed measured nothing. Its exit code says more than that of this error.
        rates = []
        say(f"no energy per token: {error.what}")
    for rate in rates:
        readings, working = working_devices(watching.devices, watching.readings, rate.devices)
        power = mean_power(readings, rate.started_s - clock_s, rate.ended_s - clock_s, working)
        say(energy_line(rate.name, None if power is None else power / rate.tokens_per_s))
    raise typer.Exit(code)


def working_devices(
    devices: Sequence[Device], readings: Sequence[Sequence[Reading]], count: int | None, root: Path = Path("/")
) -> tuple[list[Sequence[Reading]], int | None]:
    """Return the readings of the devices that a training may have used, and how many of them worked.

    If the training used all devices that the environment selects, the second value is None: the power of all of them counts,
    also if they are first dies of different modules.
    """
    try:
        selected = selected_devices(devices, os.environ, root)
        visible = visible_devices(devices, os.environ, root)
    except HyperionError:  # a part of a GPU, or numbers whose meaning only CUDA knows
        return list(readings), count
    chosen = [series for device, series in zip(devices, readings, strict=True) if device in visible]
    return chosen, None if count is not None and count >= len(selected) else count


def run_watched(command: Sequence[str]) -> int:
    """Run a command until it ends, and return its exit code.

    If a signal ended the command, the exit code is 128 plus the number of the signal. SIGTERM is passed on to the command. A
    terminal sends Ctrl-C to both. The monitor waits until the command ends.

    Raises:
        HyperionError: the command cannot be started.
    """
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise HyperionError(
            f"the command cannot be started: {error.strerror}",
            where=command[0],
            next_step="check its name, and start a script by its interpreter: hyperion monitor -- python train.py",
        ) from error
    # The command decides how it ends.
    earlier = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number)),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _wait(duration_s: float) -> int:
    """Wait, and return the exit code: 0, 130 if Ctrl-C ended the wait, or 143 if SIGTERM ended it."""
    terminated = 128 + signal.SIGTERM
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(terminated))
    try:
        time.sleep(duration_s)
    # The monitor stops and shows the readings so far.
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit:
        return terminated
    finally:
        signal.signal(signal.SIGTERM, earlier)
    return 0


def _written(file: Path, content: bytes) -> bool:
    """Write a file. If this fails, print a warning and return False."""
    try:
        file.write_bytes(content)
    except OSError as error:
        say(f"warning: {file} cannot be written: {error.strerror}")
        return False
    return True


def csv_text(rows: Sequence[dict]) -> str:
    """Return the rows as CSV with a header. Unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def plot_png(rows: Sequence[dict]) -> bytes:
    """Return a picture with one panel for each quantity that was read, and one line for each device."""
    from hyperion.figures.style import new_figure

    shown = [name for name in _PANELS if any(row[name] is not None for row in rows)]
    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure, axes = new_figure("Monitor", ", ".join(devices), max(1, len(shown)), width=4.0 * max(1, len(shown)))
    for panel, name in zip(axes, shown, strict=False):
        for device in devices:
            points = [(row["time_s"], row[name]) for row in rows if row["device"] == device and row[name] is not None]
            panel.plot(*zip(*points, strict=True), label=device)
        largest = max(row[name] for row in rows if row[name] is not None)
        panel.set(xlabel="time (s)", ylabel=_PANELS[name], ylim=(0, 1.1 * largest or 1))
    if shown:
        axes[0].legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


@dataclass(frozen=True)
class TokenRate:
    """A measured rate with the time in which it was measured.

    Args:
        name: experiment, variant, format and parameters of the row.
        tokens_per_s: tokens of all ranks per second.
        started_s, ended_s: start of the experiment, and when its samples were stored, in seconds since 1970.
        devices: number of devices that processed the tokens.
    """

    name: str
    tokens_per_s: float
    started_s: float
    ended_s: float
    devices: int


def measured_rates(run: str, since_s: float) -> list[TokenRate]:
    """Return the rates in tokens per second of the experiments of a run that started at or after a time.

    Rates of single ranks are left out, because the power is that of all devices of the experiment.

    Args:
        run: the run, such as `latest`.
        since_s: time in seconds since 1970.

    Raises:
        HyperionError: no such experiment has a rate, so that its power was not measured.
    """
    from hyperion.results import Run, find_run
    from hyperion.results.store import samples_name

    store, rates = Run.open(find_run(run)), []
    for place, entry in store.experiments().items():
        # Only the recorded start counts: a file that is copied or touched is new, but its rows are not.
        started_s = datetime.fromisoformat(entry["started_at"]).timestamp() if entry.get("started_at") else -math.inf
        if started_s < since_s:
            continue
        notebook, _, experiment = place.partition("/")
        ended_s = (store.folder / samples_name(notebook, experiment)).stat().st_mtime
        for row in store.rows(notebook, experiment):
            if row.metric == "tokens_per_s" and row.rank is None and row.value:
                words = [experiment, row.variant, row.dtype or "", *(f"{key}={value}" for key, value in row.params.items())]
                name, devices = " ".join(filter(None, words)), row.params.get("ranks", 1)
                rates.append(TokenRate(name, row.value, started_s, ended_s, devices))
    if not rates:
        raise HyperionError(
            "no experiment of this run with a rate in tokens per second started while the monitor ran",
            where=store.folder,
            next_step="let the command measure (RUN=new), or give --tokens",
        )
    return rates


def energy_line(name: str, energy_j: float | None) -> str:
    """Return the line with the energy per token of a measured rate.

    Args:
        name: name of the rate.
        energy_j: the mean power of its devices during the experiment, divided by the rate, or None if no power was read.
    """
    reason = "no energy per token: no device has two readings of its power in this time"
    return f"{name}: {reason if energy_j is None else f'{energy_j:.4g} J per token, at the mean power of the experiment'}"


def summary_lines(
    summaries: Sequence[DeviceSummary], overhead: float, tokens: int | None = None, counted: Container[int] | None = None
) -> list[str]:
    """Return the summary as lines of text: one line for each device, followed by the energy per token.

    Args:
        summaries: one for each device.
        overhead: share of one core that the monitor used.
        tokens: number of tokens of the whole command.
        counted: indices of the devices whose energy is that of the tokens; default: all.
    """
    from hyperion.figures.material import signed_number

    lines = []
    for one in summaries:
        parts = [
            f"{label} {value:.4g} {unit}"
            for label, value, unit in (
                ("mean utilisation", one.utilization_percent, "%"),
                ("largest memory", one.memory_gib, "GiB"),
                ("highest temperature", one.temperature_c, "°C"),
                ("mean power", one.power_w, "W"),
                ("energy", one.energy_j, "J"),
            )
            if value is not None
        ]
        parts += [f"throttled: {one.throttle}"] if one.throttle is not None else []
        rate = "" if one.rate_error is None else f", interval {signed_number(100 * one.rate_error, 1)}% from the requested one"
        lines.append(f"{one.device}: {'; '.join(parts) or 'nothing can be read'} ({one.samples} readings{rate})")
        if (one.memory_growth_gib or 0) >= _GROWTH_GIB:
            lines.append(
                f"  memory still growing at the end: +{one.memory_growth_gib:.4g} GiB since the first third of the readings"
            )
        lines += [f"  {name}: {reason}" for name, reason in one.unreadable.items()]
        lines += [f"  warning: failed readings: {count} ({error})" for error, count in one.errors.items()]
    if tokens is not None:
        lines.append(_energy_per_token([one for one in summaries if counted is None or one.index in counted], tokens))
    lines.append(f"the monitor used {overhead:.2%} of one core")
    return lines


def _energy_per_token(summaries: Sequence[DeviceSummary], tokens: int) -> str:
    """Return the line with the energy of these devices together, divided by the number of tokens."""
    if not summaries:
        return "no energy per token: the command can use no GPU"
    # The second die of an MI250X reports no energy, because the first die reports that of the whole module.
    energy_j = {f"{one.index}: {one.device}": one.energy_j for one in summaries if one.energy_j is not None}
    if energy_j:
        return f"energy per token: {sum(energy_j.values()) / tokens:.4g} J, of {', '.join(energy_j)}"
    silent = all(one.samples > 1 and one.power_w is None for one in summaries)
    return f"no energy per token: {'no device reports its power' if silent else 'no device has two readings of its power'}"
