"""The command `hyperion monitor`: watch all devices while a command runs, or for a duration. It never changes a device."""

import csv
import io
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hyperion.commands.console import parse_duration
from hyperion.errors import HyperionError
from hyperion.hardware.monitoring import COLUMNS, DeviceSummary, Monitor, csv_rows, system_devices
from hyperion.terminal import say

_NO_ENERGY = "no energy per token: no device reports its power"
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
        typer.Option(help="Run whose rows of tokens_per_s give the energy per token, as `latest`.", show_default=False),
    ] = None,
) -> None:
    """Watch utilisation, memory, temperature, power, clocks and throttling of all devices: `hyperion monitor -- python train.py`.

    The values come from NVML, amdsmi, sysfs or the operating system, and nothing is written to a device. Without a GPU, the CPU
    is watched. Output and exit code of the command are unchanged. A quantity that cannot be read is listed with the reason.
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
    started_s = time.time()
    with Monitor(system_devices(), interval_s) as watching:
        code = run_watched(command) if command else _wait(parse_duration(duration or "", "--duration"))
    summaries = watching.summaries()
    if csv_file is not None:
        csv_file.write_text(csv_text(csv_rows(watching.devices, watching.readings)), encoding="utf-8")
    if plot is not None:
        plot.write_bytes(plot_png(csv_rows(watching.devices, watching.readings)))
    rates = _rates(run, started_s) if run is not None else {}
    for line in summary_lines(summaries, watching.overhead, tokens, rates):
        say(line)
    raise typer.Exit(code)


def run_watched(command: Sequence[str]) -> int:
    """Run a command until it ends, and return its exit code.

    If a signal ended the command, the exit code is 128 plus the number of the signal. SIGINT and SIGTERM are passed on to the
    command, and the monitor waits until it ends.

    Raises:
        HyperionError: the command cannot be started.
    """
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise HyperionError(
            f"the command cannot be started: {error.strerror}", where=command[0], next_step="check its name"
        ) from error
    # A terminal sends Ctrl-C to both processes. The command decides how it ends.
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
    try:
        time.sleep(duration_s)
    except KeyboardInterrupt:  # the monitor stops and shows the readings so far
        return 130
    return 0


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


def _rates(run: str, started_s: float) -> dict[str, float]:
    """Return the tokens per second in the rows of a run, by experiment and variant.

    Raises:
        HyperionError: the run is older than the monitored command, so that its power was not measured.
    """
    from hyperion.results import Run, find_run

    store = Run.open(find_run(run))
    rows = store.folder / "rows.csv"
    if not rows.is_file() or rows.stat().st_mtime < started_s:
        raise HyperionError("no row of this run was measured while the monitor ran", where=store.folder, next_step="use --tokens")
    found = (row for row in store.rows() if row.metric == "tokens_per_s" and row.value)
    return {f"{row.experiment} {row.variant} {row.dtype or ''}".strip(): row.value for row in found if row.value is not None}


def summary_lines(
    summaries: Sequence[DeviceSummary], overhead: float, tokens: int | None = None, rates: dict[str, float] | None = None
) -> list[str]:
    """Return the summary as lines of text: one line for each device, followed by the energy per token.

    Args:
        summaries: one for each device.
        overhead: share of one core that the monitor used.
        tokens: number of tokens of the whole command.
        rates: tokens per second by name. The energy per token is the mean power of all devices divided by the rate.
    """
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
        rate = "" if one.rate_error is None else f", interval {one.rate_error:+.1%} from the requested one"
        lines.append(f"{one.device}: {'; '.join(parts) or 'nothing can be read'} ({one.samples} readings{rate})")
        lines += [f"  {name}: {reason}" for name, reason in one.unreadable.items()]
    energies, powers = [one.energy_j for one in summaries], [one.power_w for one in summaries]
    # The second die of an MI250X reports no power, because the first die reports the power of the whole module.
    energy = sum(value for value in energies if value is not None) if any(value is not None for value in energies) else None
    power = sum(value for value in powers if value is not None) if any(value is not None for value in powers) else None
    if tokens is not None:
        lines.append(f"energy per token: {energy / tokens:.4g} J" if energy is not None else _NO_ENERGY)
    for name, rate in (rates or {}).items():
        lines.append(
            f"{name}: {power / rate:.4g} J per token, at the mean power" if power is not None else f"{name}: {_NO_ENERGY}"
        )
    lines.append(f"the monitor used {overhead:.2%} of one core")
    return lines
