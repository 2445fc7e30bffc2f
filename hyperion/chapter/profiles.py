"""Profiles: the sizes of every experiment, so that the same cells run on a laptop and on a GPU.

`profiles.toml` lists the profiles; each subject's `sizes.toml` holds the sizes of its experiments, one table a profile and
experiment: `[full.gemm]`. A profile inherits from its parent, experiment by experiment and option by option.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hyperion.chapter.subjects import Subject, subjects
from hyperion.errors import HyperionError

REPLAY = "replay"
_FILE = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True)
class Profile:
    """One profile.

    Args:
        name: smoke, full, study or replay.
        allow_synthetic: whether `data_source=auto` may fall back to synthetic data.
        synthetic: sizes of the synthetic data sets.
        experiments: {experiment: sizes} of every registered subject, empty for replay: there the reference run states them.
    """

    name: str
    allow_synthetic: bool
    synthetic: dict
    experiments: dict[str, dict]

    def settings(self, experiments: tuple[str, ...]) -> dict:
        """Return all of the profile that the rows of these experiments depend on: sizes, and how synthetic data are made."""
        return {
            "sizes": {name: self.experiments[name] for name in experiments if name in self.experiments},
            "synthetic": self.synthetic,
            "allow_synthetic": self.allow_synthetic,
        }

    def sizes(self, experiment: str) -> dict:
        """Return an experiment's sizes.

        Raises:
            HyperionError: the profile has none for it.
        """
        if experiment not in self.experiments:
            raise HyperionError(
                f"profile {self.name!r} has no sizes for the experiment {experiment!r}",
                where="sizes.toml of the experiment's subject",
                next_step=f"add a table [{self.name}.{experiment}]",
            )
        return self.experiments[experiment]


def profile_names() -> list[str]:
    """Return the names of all profiles, `replay` last."""
    return [*sorted(_declared()), REPLAY]


def load_profile(name: str) -> Profile:
    """Return a profile by name.

    Raises:
        HyperionError: no such profile (the message lists them), or a subject's sizes.toml is malformed.
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
                experiments[experiment] = experiments.get(experiment, {}) | sizes
    return Profile(name, settings["allow_synthetic"], settings["synthetic"], experiments)


def default_profile(device_kind: str) -> str:
    """Return `smoke` for a CPU, `full` for an accelerator."""
    return "smoke" if device_kind == "cpu" else "full"


def lineage(name: str) -> list[str]:
    """Return the names of the profile's ancestors, the oldest first, and of the profile itself."""
    parent = _declared()[name].get("parent")
    return [*(lineage(parent) if parent else ()), name]


@functools.cache
def _declared() -> dict[str, dict]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _sizes_of(subject: Subject) -> dict[str, dict[str, dict]]:
    """{profile: {experiment: sizes}} of a subject.

    Raises:
        HyperionError: its sizes.toml cannot be parsed, or names a profile or an experiment that does not exist.
    """
    path = subject.folder / "sizes.toml"
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HyperionError(f"not valid TOML: {error}", where=path, next_step="correct the file") from error
    for profile, tables in content.items():
        if profile not in _declared():
            raise HyperionError(
                f"unknown profile {profile!r}", where=path, next_step=f"use one of {', '.join(sorted(_declared()))}"
            )
        for experiment, sizes in tables.items() if isinstance(tables, dict) else [(str(tables), None)]:
            if not isinstance(sizes, dict) or experiment not in subject.modules:
                raise HyperionError(
                    f"[{profile}.{experiment}] is no table of an experiment of the subject {subject.name!r}",
                    where=path,
                    next_step=f"name a table [{profile}.<module>] after one of its modules: {', '.join(subject.modules)}",
                )
    return content
