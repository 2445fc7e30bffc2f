"""What this machine is, asked in a process of its own: the driver must hold no accelerator while notebooks measure."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import hyperion
from hyperion.errors import HyperionError
from hyperion.reproduce.kernels import library_environment

_MARK = "hyperion-machine:"


@dataclass(frozen=True)
class Machine:
    """Answers that need torch.

    Args:
        profile: the profile asked for, or the machine's own where `auto` was asked for.
        sections: {notebook: what that profile says of it: sizes of its experiments, how synthetic data are made}.
        setting: device and versions; a run made under another setting is not continued.
        information: contents of a new run's run.json.
        masks: variables that show a process one accelerator, for each of those that notebooks may use side by side.
    """

    profile: str
    sections: dict
    setting: dict
    information: dict
    masks: tuple[dict[str, str], ...] = ()


def ask_machine(profile: str, data_source: str, seed: int) -> Machine:
    """Detect the device and resolve the profile.

    Raises:
        HyperionError: unknown profile, or the library does not load on this machine.
    """
    command = [sys.executable, "-s", "-m", "hyperion.reproduce.machine", profile, data_source, str(seed)]
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
        raise HyperionError(error["what"], where=error["where"], next_step=error["next_step"])
    return Machine(**content)


def _answer(profile: str, data_source: str, seed: int) -> dict:
    import torch

    from hyperion.data.sources import require_known_source
    from hyperion.experiments.chapter import run_information
    from hyperion.experiments.profiles import default_profile, load_profile
    from hyperion.hardware import detect
    from hyperion.hardware.detect import one_at_a_time

    require_known_source(data_source)
    device = detect()
    name = default_profile(device.kind) if profile == "auto" else profile
    chosen = load_profile(name)
    sections = {notebook: chosen.settings(notebook) for notebook in chosen.sections}
    setting = {"device": device.name, "arch": device.arch, "torch": torch.__version__, "hyperion": hyperion.__version__}
    return {
        "profile": name,
        "sections": sections,
        "setting": setting,
        "information": run_information(name, data_source, seed),
        "masks": one_at_a_time(device, torch.cuda.device_count(), os.environ),
    }


def _main(profile: str, data_source: str, seed: str) -> None:
    try:
        content = _answer(profile, data_source, int(seed))
    except HyperionError as error:
        content = {"error": error.as_dict()}
    print(_MARK + json.dumps(content), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
