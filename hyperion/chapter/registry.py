"""Find an experiment by its name, which is that of its module."""

from hyperion.chapter.context import Experiment
from hyperion.chapter.profiles import Profile
from hyperion.chapter.subjects import subject_of, subjects
from hyperion.errors import HyperionError


def experiment_names() -> list[str]:
    """Return the names of all experiments. Imports every module of every subject."""
    return [
        name
        for subject in subjects()
        for name in subject.modules
        if isinstance(getattr(subject.module(name), "EXPERIMENT", None), Experiment)
    ]


def module_of(name: str) -> str:
    """Return the dotted name of an experiment's module; of an unknown experiment the name itself."""
    subject = subject_of(name)
    return f"{subject.package}.{name}" if subject else name


def require_valid_sizes(profile: Profile) -> None:
    """Check the sizes of every experiment in a profile against the experiment's options.

    Raises:
        HyperionError: an unknown, missing or invalid option, by name.
    """
    for name, sizes in profile.experiments.items():
        options = experiment_named(name).options
        if options is not None:
            options.parse(sizes, f"{name} in profile {profile.name}")


def experiment_named(name: str) -> Experiment:
    """Return the experiment of a name; no other experiment is imported.

    Raises:
        HyperionError: there is none; the message lists them.
    """
    subject = subject_of(name)
    experiment = getattr(subject.module(name), "EXPERIMENT", None) if subject else None
    if not isinstance(experiment, Experiment):
        raise HyperionError(f"no experiment {name!r}", next_step=f"use one of {', '.join(experiment_names())}")
    return experiment
