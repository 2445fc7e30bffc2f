"""Profiles: the sizes of every experiment, one TOML file a profile, so that the same cells run on a laptop and on a GPU."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from hyperion.errors import HyperionError

REPLAY = "replay"
_FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Profile:
    """One profile.

    Args:
        name: smoke, full, study or replay.
        allow_synthetic: whether `data_source=auto` may fall back to synthetic data.
        synthetic: sizes of the synthetic data sets.
        sections: {notebook: {experiment: sizes}}, empty for replay, whose sizes are those of the reference run.
    """

    name: str
    allow_synthetic: bool
    synthetic: dict
    sections: dict

    def settings(self, notebook: str) -> dict:
        """All of the profile that a notebook's rows depend on: its experiments' sizes and how synthetic data are made."""
        return {"sizes": self.sections.get(notebook, {}), "synthetic": self.synthetic, "allow_synthetic": self.allow_synthetic}

    def sizes(self, notebook: str, experiment: str) -> dict:
        """What the profile says of an experiment.

        Raises:
            HyperionError: it says nothing of it.
        """
        try:
            return self.sections[notebook][experiment]
        except KeyError as error:
            raise HyperionError(
                f"profile {self.name!r} has no sizes for {notebook}.{experiment}",
                where=_FOLDER / f"{self.name}.toml",
                next_step=f"add a section [{notebook}.{experiment}]",
            ) from error


def profile_names() -> list[str]:
    """Every profile there is, `replay` last."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml")) + [REPLAY]


def load_profile(name: str) -> Profile:
    """A profile by name.

    Raises:
        HyperionError: no such profile; the message lists them.
    """
    if name not in profile_names():
        raise HyperionError(f"unknown profile {name!r}", next_step=f"use PROFILE={' or PROFILE='.join(profile_names())}")
    if name == REPLAY:
        return Profile(REPLAY, allow_synthetic=True, synthetic={}, sections={})
    sections = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return Profile(name, sections.pop("allow_synthetic"), sections.pop("synthetic"), sections)


def default_profile(device_kind: str) -> str:
    """`smoke` on a CPU, `full` on an accelerator."""
    return "smoke" if device_kind == "cpu" else "full"
