"""Which machine a result was measured on: the run's own, or the reference machine it was replayed from."""

from hyperion.results import Run

_REPLAY = "replay:"


def device_name(information: dict) -> str:
    """The device that run.json names: its first GPU, else its CPU.

    Args:
        information: contents of run.json, with the hardware fingerprint under "environment".
    """
    environment = information.get("environment") or {}
    gpus = environment.get("gpus") or []
    if gpus:
        return gpus[0]["name"]
    cpu = environment.get("cpu")
    return f"{cpu['name']} ({cpu['cores']} cores)" if cpu else "a machine that run.json does not describe"


def replayed_from(run: Run, notebook: str, experiment: str) -> str:
    """The reference machine an experiment of this run was replayed from, "" when it was measured here."""
    finished = run.finished(notebook, experiment)
    digest = finished["input_hash"] if finished else ""
    return digest.removeprefix(_REPLAY).partition(":")[0] if digest.startswith(_REPLAY) else ""


def machine_name(run: Run, notebook: str, experiment: str) -> str:
    """For titles: the device the experiment ran on, or the reference machine and the word replay."""
    reference = replayed_from(run, notebook, experiment)
    return f"{reference} (replay)" if reference else device_name(run.information())
