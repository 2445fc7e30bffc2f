"""How much longer does a training step take while `hyperion monitor` watches the devices?

The experiment runs the monitor as a user does, as a command in a separate process. Steps are timed in pairs of blocks: one block
with the monitor and one without it, in random order. Signals stop and continue the monitor between blocks. A slow drift of the
machine then affects both kinds of blocks equally.
"""

import csv
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.errors import HyperionError
from hyperion.results import mean_estimate
from hyperion.workloads.reference_steps import TrainingStep

_LONGEST_S = 60.0  # time limit for the monitor to start, and to print its last output and exit
STOPPED, RUNNING = "stopped", "running"


class MonitorOverheadOptions(Options):
    """Options for the `monitor_overhead` experiment.

    Args:
        model: name of the reference model.
        batch_size: number of samples in a batch.
        interval_s: time between two readings of the monitor in seconds.
        block_s: duration in seconds of a block of steps. A block with the monitor contains at least one reading.
        pairs: number of pairs of blocks.
    """

    model: str
    batch_size: int
    interval_s: float
    block_s: float
    pairs: int


def forecast(context: Context) -> list[Forecast]:
    """Predict an overhead of 0, because the monitor runs in a separate process."""
    options = MonitorOverheadOptions.of(context)
    basis = "the monitor reads in a process of its own, on a core that the step does not need, and writes nothing to a device"
    return [Forecast(options.model, "monitor_overhead", 0.0, basis, dtype="fp32", params=_params(options))]


def run(context: Context, report: Report) -> Result:
    """Time pairs of blocks of steps, one block with the monitor and one without it.

    The row's value is the mean relative difference of the step times over all pairs, with its interval from Student's t.
    """
    options, file = MonitorOverheadOptions.of(context), context.workspace / "monitor.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    chance = random.Random(context.seed)
    step = TrainingStep(options.model, options.batch_size, "fp32", context.device, context.seed)
    times: dict[str, list[float]] = {STOPPED: [], RUNNING: []}
    with step.products(), monitor(options.interval_s, file) as set_running:
        seconds_per_step(step, context.device.kind, options.block_s)  # warm-up
        for number in range(options.pairs):
            report(number, options.pairs, f"pair {number + 1}")
            for state in chance.sample((STOPPED, RUNNING), 2):
                set_running(state == RUNNING)
                times[state].append(seconds_per_step(step, context.device.kind, options.block_s))
    with file.open(encoding="utf-8", newline="") as lines:
        devices = [row["device"] for row in csv.DictReader(lines)]
    overheads = [running / stopped - 1 for stopped, running in zip(times[STOPPED], times[RUNNING], strict=True)]
    row = context.row(
        options.model,
        "monitor_overhead",
        mean_estimate(overheads),
        dtype="fp32",
        params=_params(options) | {"readings": len(devices), "devices": len(set(devices))},
        limit_source="no limit: noise can make the steps with the monitor the faster ones",
    )
    report(options.pairs, options.pairs, "done")
    frames = [
        pd.DataFrame({"variant": options.model, "dtype": "fp32", "kind": f"monitor {state}", "index": range(len(s)), "time_s": s})
        for state, s in times.items()
    ]
    return Result([row], pd.concat(frames, ignore_index=True))


EXPERIMENT = Experiment(forecast, run, options=MonitorOverheadOptions, stand_in=("monitor", "monitor_overhead"))


@contextmanager
def monitor(interval_s: float, file: Path) -> Iterator[Callable[[bool], None]]:
    """Run `hyperion monitor` in the background until the `with` block ends. Afterwards `file` contains its readings.

    Yields:
        A function that stops the monitor (False) or continues it (True). The monitor is running when the `with` block begins.

    Raises:
        HyperionError: the monitor did not start, or failed.
    """
    # The monitor starts `cat` once it watches the devices. If `cat` echoes a line, the monitor is therefore running.
    command = [sys.executable, "-m", "hyperion", "monitor", "--interval", f"{interval_s}s", "--csv", str(file), "--", "cat"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write("running\n")
        process.stdin.flush()
        is_ready, _, _ = select.select([process.stdout], [], [], _LONGEST_S)
        if not is_ready:
            raise HyperionError(
                f"the monitor did not start within {_LONGEST_S:.0f} s",
                where=" ".join(command),
                next_step="run this command in a shell, and type a line: the monitor must repeat it",
            )
        if (line := process.stdout.readline()) != "running\n":
            raise HyperionError(
                f"the monitor did not start: {line + process.communicate(timeout=_LONGEST_S)[0]}"[:500],
                where=" ".join(command),
                next_step="run this command in a shell",
            )
        yield lambda running: process.send_signal(signal.SIGCONT if running else signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)
        printed, _ = process.communicate(timeout=_LONGEST_S)
        if process.returncode:
            fault, remedy = f"the monitor failed: {printed}"[:500], "run this command in a shell, and end its input with Ctrl-D"
            raise HyperionError(fault, where=" ".join(command), next_step=remedy)
    finally:
        process.kill()
        process.wait()


def seconds_per_step(step: TrainingStep, kind: str, block_s: float) -> float:
    """Return the mean step time of one block in seconds.

    The device is synchronized after each step. The first step is not timed, because the monitor has been stopped or continued
    immediately before it.

    Args:
        step: the training step.
        kind: "cpu", "cuda" or "rocm".
        block_s: duration of the block in seconds. It contains at least one step.
    """
    steps, begin = -1, 0.0
    while steps < 1 or time.perf_counter() - begin < block_s:
        step(lambda name: nullcontext())
        if kind != "cpu":
            torch.cuda.synchronize()
        steps += 1
        if steps == 0:
            begin = time.perf_counter()
    return (time.perf_counter() - begin) / steps


def _params(options: MonitorOverheadOptions) -> dict:
    return {"batch": options.batch_size, "interval_s": options.interval_s, "block_s": options.block_s, "pairs": options.pairs}
