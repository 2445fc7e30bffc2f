"""Examine this machine in a separate process, because the driver must not use an accelerator while notebooks measure."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import hyperion
from hyperion.errors import HyperionError
from hyperion.reproduce.kernels import library_environment

if TYPE_CHECKING:
    from hyperion.hardware import Device

# Prefix of the answer in the output, because imported libraries may print other lines.
_MARK = "hyperion-machine:"
_REPLAYED_AT_ONCE = 8  # maximum number of simultaneous replays; a kernel with torch takes about 1 GB of memory


@dataclass(frozen=True)
class MachineProfile:
    """The profile of a call, and facts about this machine that torch provides.

    Args:
        profile: name of the requested profile, or of the machine's default profile if `auto` was requested.
        settings: the part of the profile on which rows depend: a dict with the keys "sizes" (a dict that maps the name of an
            experiment to its sizes), "synthetic" and "allow_synthetic".
        setting: device and versions. A run with another device or other versions is not continued.
        information: content of run.json for a new run.
        masks: for each notebook that may run at the same time, the environment variables that hide all accelerators except that
            of the notebook. For a replay, which measures nothing, the entries are empty.
    """

    profile: str
    settings: dict
    setting: dict
    information: dict
    masks: tuple[dict[str, str], ...] = ()


def examine_machine(profile: str, data_source: str, seed: int, experiments: Iterable[str]) -> MachineProfile:
    """Detect the device, resolve the profile, and check the sizes of the experiments that will run.

    Args:
        profile: name of a profile, or `auto`.
        data_source: name of a data source.
        seed: seed of the run.
        experiments: names of the experiments that will run. The check imports their modules, which takes a second for the whole
            book.

    Raises:
        HyperionError: the profile or the data source does not exist, or the library cannot be imported on this machine.
    """
    # `-s` excludes the user's site-packages, as in the kernels.
    command = [sys.executable, "-s", "-m", "hyperion.reproduce.machine", profile, data_source, str(seed), *experiments]
    environment = library_environment()
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=environment, check=False)
    answer = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if answer is None:
        raise HyperionError(
            f"this machine could not be examined (exit code {done.returncode}):\n{done.stderr.strip()[-2000:]}",
            where=sys.executable,
            next_step="run `hyperion doctor`",
        )
    content = json.loads(answer.removeprefix(_MARK))
    if "error" in content:
        error = content["error"]
        # Raise the error here again, so that the user sees the same message as without a separate process.
        raise HyperionError(error["what"], where=error["where"], next_step=error["next_step"])
    return MachineProfile(**content)


def _answer(profile: str, data_source: str, seed: int, experiments: Sequence[str]) -> dict:
    from hyperion.chapter.chapter import run_information
    from hyperion.chapter.profiles import default_profile, load_profile, require_valid_sizes
    from hyperion.data.store.sources import require_known_source
    from hyperion.hardware import collect_facts, detect

    require_known_source(data_source)
    facts = collect_facts()
    device = detect(facts)
    name = default_profile(device.kind) if profile == "auto" else profile
    chosen = load_profile(name)
    require_valid_sizes(chosen, experiments)
    setting = {"device": device.name, "arch": device.arch, "torch": facts.torch, "hyperion": hyperion.__version__}
    return {
        "profile": name,
        "settings": chosen.settings(tuple(chosen.experiments)),
        "setting": setting,
        "information": run_information(name, data_source, seed),
        "masks": _masks(name, device, len(facts.gpus)),
    }


def _masks(profile: str, device: "Device", count: int) -> list[dict[str, str]]:
    from hyperion.chapter.profiles import REPLAY
    from hyperion.hardware.cpu import read_cpu
    from hyperion.hardware.facts import one_at_a_time

    if profile == REPLAY:
        return [{}] * min(read_cpu().cores, _REPLAYED_AT_ONCE)
    return one_at_a_time(device, count, os.environ)


def _main(profile: str, data_source: str, seed: str, *experiments: str) -> None:
    try:
        content = _answer(profile, data_source, int(seed), experiments)
    except HyperionError as error:
        content = {"error": error.as_dict()}
    print(_MARK + json.dumps(content), flush=True)


if __name__ == "__main__":
    gc.disable()  # this process imports torch and the experiments, which leaves no garbage, and ends
    _main(*sys.argv[1:])
