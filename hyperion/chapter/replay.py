"""Reference runs for replay: find one, and read its experiments' provenance and environment."""

from hyperion.chapter.profiles import load_profile
from hyperion.errors import HyperionError
from hyperion.paths import reference_folder
from hyperion.results import Run, find_run


def reference_runs() -> list[Run]:
    """Return the stored reference runs: real data before synthetic data, then more GPUs before fewer."""
    runs = [Run.open(path.parent) for path in sorted(reference_folder().glob("*/run.json"))]

    def place(run: Run) -> tuple:
        asked = run.information()
        gpus = asked.get("environment", {}).get("gpus") or []
        return asked.get("data_source") == "synthetic", -len(gpus), run.folder.name

    return sorted(runs, key=place)


def reference_run(machine: str, notebook: str) -> Run:
    """Return the named reference run, or the first with rows of the notebook.

    Raises:
        HyperionError: there is no such run.
    """
    if machine:
        return Run.open(find_run(str(reference_folder() / machine)))
    for run in reference_runs():
        if run.rows(notebook):
            return run
    raise HyperionError(f"no reference run holds {notebook}", where=reference_folder(), next_step="run it here: PROFILE=smoke")


def finished_in(reference: Run, notebook: str, experiment: str) -> dict:
    """Return the record of a finished experiment of the reference run.

    Raises:
        HyperionError: the reference run has no such experiment.
    """
    kept = reference.finished(notebook, experiment)
    if kept is None:
        raise HyperionError(
            f"the reference run of {reference.folder.name} holds no experiment {experiment}",
            where=reference.folder,
            next_step="run it on a machine with PROFILE=smoke or full, or choose another reference",
        )
    return kept


def measured_under(reference: Run, notebook: str, experiment: str) -> tuple[dict, dict]:
    """Return provenance and environment of an experiment of the reference run; without provenance, those of run.json."""
    asked = reference.information()
    provenance = finished_in(reference, notebook, experiment).get("provenance")
    if not provenance:
        sizes = load_profile(asked["profile"]).sizes(experiment)
        provenance = {"profile": asked["profile"], "seed": asked["seed"], "sizes": sizes}
    environment = reference.environments().get(provenance.get("environment", ""))
    return provenance, asked["environment"] if environment is None else environment
