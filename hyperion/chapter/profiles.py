"""Profiles: the sizes of every experiment, so that the same notebook cells run on a laptop and on a GPU.

`profiles.toml` lists the profiles. Each subject's `sizes.toml` has one table for each profile and experiment, such as
`[full.gemm]`. A profile inherits every option that it does not state from its parent. The profile `replay` has no sizes, because
it shows a reference run, a stored run of another machine.
"""

import functools
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hyperion.chapter.subjects import Subject, experiment_named, subjects
from hyperion.errors import HyperionError
from hyperion.paths import reference_folder
from hyperion.results import Run, find_run
from hyperion.results.execution import executed_notebooks
from hyperion.results.places import stored_references

REPLAY = "replay"
_FILE = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True)
class Profile:
    """One profile.

    Args:
        name: smoke, full, study or replay.
        allow_synthetic: if True, `data_source=auto` may use synthetic data if no real data are available.
        synthetic: sizes of the synthetic data sets.
        experiments: {experiment: sizes} for all experiments of all subjects. Empty for `replay`, whose sizes are stored in the
            reference run.
    """

    name: str
    allow_synthetic: bool
    synthetic: dict
    experiments: dict[str, dict]

    def settings(self, experiments: tuple[str, ...]) -> dict:
        """Return the settings that the rows of these experiments depend on: their sizes and the synthetic-data settings."""
        return {
            "sizes": {name: self.experiments[name] for name in experiments if name in self.experiments},
            "synthetic": self.synthetic,
            "allow_synthetic": self.allow_synthetic,
        }

    def sizes(self, experiment: str) -> dict:
        """Return the sizes of an experiment.

        Raises:
            HyperionError: the profile has no sizes for the experiment.
        """
        if experiment not in self.experiments:
            raise HyperionError(
                f"profile {self.name!r} has no sizes for the experiment {experiment!r}",
                where="sizes.toml of the experiment's subject",
                next_step=f"add a table [{self.name}.{experiment}]",
            )
        return self.experiments[experiment]


def profile_names() -> list[str]:
    """Return the names of all profiles, with `replay` last."""
    return [*sorted(_declared()), REPLAY]


def load_profile(name: str) -> Profile:
    """Return the profile with this name.

    Raises:
        HyperionError: there is no such profile, or a subject's sizes.toml is invalid. In the first case the message lists all
            profiles.
    """
    if name not in profile_names():
        raise HyperionError(f"unknown profile {name!r}", next_step=f"use PROFILE={' or PROFILE='.join(profile_names())}")
    if name == REPLAY:
        return Profile(REPLAY, allow_synthetic=True, synthetic={}, experiments={})
    settings: dict = {}
    experiments: dict[str, dict] = {}
    for ancestor in lineage(name):
        settings |= _declared()[ancestor]
        for subject in subjects():
            for experiment, sizes in _sizes_of(subject).get(ancestor, {}).items():
                # A child overrides single options of an experiment, not the whole table.
                experiments[experiment] = experiments.get(experiment, {}) | sizes
    return Profile(name, settings["allow_synthetic"], settings["synthetic"], experiments)


def default_profile(device_kind: str) -> str:
    """Return `smoke` for a CPU and `full` for an accelerator."""
    return "smoke" if device_kind == "cpu" else "full"


def lineage(name: str) -> list[str]:
    """Return the names of the profiles that a profile inherits from, most distant first, followed by its own name."""
    parent = _declared()[name].get("parent")
    return [*(lineage(parent) if parent else ()), name]


@functools.cache
def _declared() -> dict[str, dict]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _sizes_of(subject: Subject) -> dict[str, dict[str, dict]]:
    """Return the sizes of all experiments of a subject, as {profile: {experiment: sizes}}.

    Raises:
        HyperionError: sizes.toml cannot be parsed, or it contains a profile or an experiment that does not exist.
    """
    path = subject.folder / "sizes.toml"
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HyperionError(f"not valid TOML: {error}", where=path, next_step="correct the file") from error
    known = subject.experiments
    for profile, tables in content.items():
        if profile not in _declared():
            raise HyperionError(
                f"unknown profile {profile!r}", where=path, next_step=f"use one of {', '.join(sorted(_declared()))}"
            )
        for experiment, sizes in tables.items() if isinstance(tables, dict) else [(str(tables), None)]:
            if not isinstance(sizes, dict) or experiment not in known:
                what = f"[{profile}.{experiment}] must be a table named after an experiment of the subject {subject.name!r}"
                remedy = f"name a table [{profile}.<experiment>] after one of its experiments: {', '.join(known) or 'none'}"
                if experiment in subject.modules:
                    what += f", but the module {experiment!r} has no EXPERIMENT"
                    remedy += "; or define EXPERIMENT in the module"
                raise HyperionError(what, where=path, next_step=remedy)
    return content


def require_valid_sizes(profile: Profile, experiments: Iterable[str]) -> None:
    """Check that a profile's sizes are valid options of the experiments.

    Args:
        profile: profile to check.
        experiments: names of experiments. Those without sizes in the profile are not checked. The modules of the others are
            imported.

    Raises:
        HyperionError: an option is unknown, missing or invalid. The message names the option.
    """
    for name in experiments:
        if name in profile.experiments and (options := experiment_named(name).options) is not None:
            options.parse(profile.experiments[name], name, profile.name)


def reference_runs() -> list[Run]:
    """Return the reference runs in order of preference.

    Runs on real data come before runs on synthetic data. Within each group, runs with more GPUs come first.
    """

    def place(run: Run) -> tuple:
        asked = run.information()
        gpus = asked.get("environment", {}).get("gpus") or []
        # False sorts before True, and more GPUs give a smaller key. The name makes the order unique.
        return asked.get("data_source") == "synthetic", -len(gpus), run.folder.name

    return sorted(stored_references(), key=place)


def reference_run(machine: str, notebook: str) -> Run:
    """Return the reference run of a machine.

    Args:
        machine: name of the machine. "" selects the first reference run that executed the notebook. If none did, it selects the
            first one with rows of the notebook, which may lack some of its experiments.
        notebook: name of the notebook.

    Raises:
        HyperionError: there is no such reference run.
    """
    if machine:
        return Run.open(find_run(str(reference_folder() / machine)))
    holding = [run for run in reference_runs() if run.rows(notebook)]
    whole = [run for run in holding if notebook in executed_notebooks(run)]
    for run in whole or holding:
        return run
    raise HyperionError(f"no reference run holds {notebook}", where=reference_folder(), next_step="run it here: PROFILE=smoke")


def finished_in(reference: Run, notebook: str, experiment: str) -> dict:
    """Return the stored information about a finished experiment of a reference run, as returned by `Run.finished`.

    Raises:
        HyperionError: the reference run does not contain the experiment.
    """
    finished = reference.finished(notebook, experiment)
    if finished is None:
        raise HyperionError(
            f"the reference run of {reference.folder.name} holds no experiment {experiment}",
            where=reference.folder,
            next_step="run the experiment with PROFILE=smoke or PROFILE=full, or choose another reference run",
        )
    return finished


def measured_under(reference: Run, notebook: str, experiment: str) -> tuple[dict, dict]:
    """Return (stored settings (provenance), stored environment) of an experiment of a reference run.

    If the experiment has no provenance, both are taken from run.json.
    """
    asked = reference.information()
    provenance = finished_in(reference, notebook, experiment).get("provenance")
    if not provenance:
        sizes = load_profile(asked["profile"]).sizes(experiment)
        provenance = {"profile": asked["profile"], "seed": asked["seed"], "sizes": sizes}
    environment = reference.environments().get(provenance.get("environment", ""))
    return provenance, asked["environment"] if environment is None else environment
