"""Subjects: folders of experiments with their figures, sizes, metrics and notebooks, and lookup of experiments by name.

A subject is a Python package. It may contain these files:

    <experiment>.py   a module with an `EXPERIMENT`; the module's name is the experiment's name
    figures.py        TITLES {experiment: title} and PLOTS, a tuple of `hyperion.figures.material.Plot`; imports no torch. It may
                      also define `headlines(rows, is_steady)`, which yields a `Quote` for each value that a reader may want to
                      quote, `summary_panels(material)` and `summary_notes(material)` for the summary figure of a run,
                      `explanations(experiment, rows)`, which returns Markdown sentences for the section of an experiment on
                      the pages of a run, and `flat_tables(runs)`, which returns the tables of `hyperion export --to csv` by
                      their paths
    sizes.toml        the sizes of its experiments in each profile
    metrics.py        METRICS, a tuple of additional `hyperion.results.Metric`
    NN_<name>.ipynb   notebooks, which are executed after the notebooks of the library

The subjects of the library are the folders in `hyperion/experiments/`. An installed package adds a subject with an entry point in
the group `hyperion.subjects`, whose value is the name of the package. The environment variable `HYPERION_SUBJECTS` adds folders,
separated by `os.pathsep`.
"""

import functools
import importlib
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from hyperion.chapter.context import Experiment
from hyperion.errors import HyperionError, nearest_first
from hyperion.results.metrics import Metric, register_metric

ENTRY_POINTS = "hyperion.subjects"
VARIABLE = "HYPERION_SUBJECTS"
_BUILT_IN = "hyperion.experiments"
_NOT_EXPERIMENTS = ("figures", "exercises", "metrics")


@dataclass(frozen=True)
class Subject:
    """One subject.

    Args:
        name: name of the folder.
        package: name of the Python package, such as "hyperion.experiments.hardware".
        folder: folder with the subject's files.
    """

    name: str
    package: str
    folder: Path

    @property
    def modules(self) -> list[str]:
        """Names of all modules of the subject. A module with an `EXPERIMENT` is an experiment."""
        return sorted(module.name for module in pkgutil.iter_modules([str(self.folder)]))

    @property
    def experiments(self) -> list[str]:
        """Names of the modules whose text contains `EXPERIMENT`. They are not imported, because this takes seconds."""
        names = [name for name in self.modules if name not in _NOT_EXPERIMENTS]
        return [name for name in names if re.search(r"\bEXPERIMENT\b", self._text_of(name))]

    @property
    def figures(self) -> ModuleType | None:
        """The subject's module `figures`, or None if there is none."""
        return self.module("figures") if "figures" in self.modules else None

    @property
    def results_folder(self) -> str:
        """Name of the folder in `benchmarks/` of a run for the subject's tables and figures.

        It is `RESULTS_FOLDER` in the module `figures` or, without this constant, the name of the subject.
        """
        return getattr(self.figures, "RESULTS_FOLDER", self.name)

    @property
    def notebooks(self) -> list[Path]:
        """Paths of the subject's notebooks in name order."""
        return sorted(self.folder.glob("[0-9][0-9]_*.ipynb"))

    def module(self, name: str) -> ModuleType:
        """Import a module of the subject and return it.

        Raises:
            HyperionError: the module's code raised an exception. The message contains the exception and its line.
        """
        try:
            return importlib.import_module(f"{self.package}.{name}")
        except HyperionError:
            raise
        except Exception as error:
            raise HyperionError(
                f"{self.package}.{name} cannot be imported: {type(error).__name__}: {error}",
                where=_line_of(error, self.folder / f"{name}.py"),
                next_step="correct the module, or install the packages that it imports",
            ) from error

    def _text_of(self, module: str) -> str:
        path = self.folder / f"{module}.py"
        path = path if path.is_file() else self.folder / module / "__init__.py"
        return path.read_text(encoding="utf-8", errors="replace")


@functools.cache
def subjects() -> tuple[Subject, ...]:
    """Return all subjects and register their metrics.

    The library's subjects come first, then those of installed packages, then the folders in HYPERION_SUBJECTS.

    Raises:
        HyperionError: a subject does not exist or is not a Python package, two subjects have the same name, or the metrics of a
            subject cannot be used.
    """
    own = Path(__file__).resolve().parents[1] / "experiments"
    found = [Subject(path.name, f"{_BUILT_IN}.{path.name}", path) for path in sorted(own.iterdir()) if _is_package(path)]
    # Sorted by name, because the order of entry points depends on the installation.
    found += [_installed(point.value) for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)]
    places = [Path(text).expanduser().absolute() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    if places:  # notebooks and worker processes have other working folders
        os.environ[VARIABLE] = os.pathsep.join(map(str, places))
    found += [_at_path(place) for place in places]
    by_name: dict[str, Subject] = {}
    for subject in found:
        other = by_name.setdefault(subject.name, subject)
        if other.folder != subject.folder:
            raise HyperionError(
                f"two subjects are called {subject.name!r}",
                where=f"{other.folder} and {subject.folder}",
                next_step="rename the folder of one of the two subjects",
            )
        for metric in _metrics_of(subject):
            register_metric(metric)
    return tuple(by_name.values())


def _metrics_of(subject: Subject) -> tuple[Metric, ...]:
    if "metrics" not in subject.modules:
        return ()
    metrics = getattr(subject.module("metrics"), "METRICS", None)
    if isinstance(metrics, tuple | list) and all(isinstance(metric, Metric) for metric in metrics):
        return tuple(metrics)
    raise HyperionError(
        f"METRICS is {metrics!r:.80}, not a tuple of Metric",
        where=subject.folder / "metrics.py",
        next_step="write METRICS = (Metric(…),), with the comma",
    )


def subject_of(experiment: str) -> Subject | None:
    """Return the subject of an experiment, or None if no subject has a module with this name.

    Raises:
        HyperionError: two subjects have a module with this name.
    """
    owners = [subject for subject in subjects() if experiment in subject.modules and experiment not in _NOT_EXPERIMENTS]
    if len(owners) > 1:
        raise HyperionError(
            f"two subjects have a module {experiment!r}",
            where=" and ".join(str(owner.folder) for owner in owners),
            next_step="rename one of the two modules",
        )
    return owners[0] if owners else None


def subjects_of(experiments: Iterable[str]) -> list[Subject]:
    """Return the subjects that contain at least one of the experiments, in the order of their first experiments."""
    order = {name: place for place, name in enumerate(dict.fromkeys(experiments))}
    places = {subject: [order[name] for name in subject.modules if name in order] for subject in subjects()}
    return sorted((subject for subject in places if places[subject]), key=lambda subject: min(places[subject]))


def experiment_names() -> list[str]:
    """Return the names of all experiments. All modules of all subjects are imported."""
    return [
        name
        for subject in subjects()
        for name in subject.modules
        if isinstance(getattr(subject.module(name), "EXPERIMENT", None), Experiment)
    ]


def module_of(name: str) -> str:
    """Return the full module name of an experiment. For an unknown experiment, return `name`."""
    subject = subject_of(name)
    return f"{subject.package}.{name}" if subject else name


def experiment_named(name: str) -> Experiment:
    """Return the experiment with this name, without importing other experiments.

    Raises:
        HyperionError: there is no experiment with this name. The message lists all experiments, similar ones first.
    """
    subject = subject_of(name)
    experiment = getattr(subject.module(name), "EXPERIMENT", None) if subject else None
    if not isinstance(experiment, Experiment):
        if subject:
            raise HyperionError(
                f"the module {name!r} has no EXPERIMENT",
                where=subject.folder / f"{name}.py",
                next_step="define EXPERIMENT = Experiment(forecast, run, options=…) in it, or name another experiment",
            )
        raise HyperionError(f"no experiment {name!r}", next_step=f"use one of {nearest_first(name, experiment_names())}")
    return experiment


def _line_of(error: Exception, module: Path) -> str:
    """Return the file and line where an import failed, if possible a line of the module itself."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == module]
    return f"{module}:{lines[-1].lineno}" if lines else str(module)


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def _installed(package: str) -> Subject:
    """Return the subject whose package an entry point names. The package is located without importing it."""
    # `importlib.util.find_spec` would import the parent packages. This loop follows the search locations instead.
    places = sys.path
    for depth, part in enumerate(package.split(".")):
        spec = PathFinder.find_spec(".".join(package.split(".")[: depth + 1]), places) if part else None
        if spec is None or spec.submodule_search_locations is None:
            raise HyperionError(
                f"the entry point {package!r} in {ENTRY_POINTS!r} names a package that cannot be found",
                next_step="correct the entry point of the distribution that declares it, or uninstall that distribution",
            )
        places = list(spec.submodule_search_locations)
    return Subject(package.rpartition(".")[2], package, Path(places[0]))


def _at_path(folder: Path) -> Subject:
    """Return the subject in a folder. The parent of the folder is appended to `sys.path`."""
    folder = folder.expanduser().resolve()
    if not _is_package(folder) or not re.fullmatch(r"[A-Za-z_]\w*", folder.name):
        raise HyperionError(
            f"{VARIABLE} names {str(folder)!r}, which is not a Python package",
            next_step="name the folder that holds the subject's __init__.py; its name must be an identifier",
        )
    if str(folder.parent) not in sys.path:
        # Appended, so that a user's folder cannot shadow a module of the library or the standard library.
        sys.path.append(str(folder.parent))
    spec = PathFinder.find_spec(folder.name, sys.path)
    if spec is None or Path(spec.origin or "").parent != folder:
        raise HyperionError(
            f"the folder of the subject {folder.name!r} cannot be imported: Python imports another module of this name",
            where=folder,
            next_step="rename the subject's folder",
        )
    return Subject(folder.name, folder.name, folder)
