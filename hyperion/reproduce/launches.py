"""Measure experiments in several launches, and publish the launches in results/reference/.

A launch is one run of the experiments in new processes. The headlines in docs/headlines.md are medians over several launches,
with intervals. The launches of one call are the runs results/<name>/1, results/<name>/2, ….
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from hyperion.chapter.chapter import open_chapter
from hyperion.chapter.profiles import REPLAY, default_profile
from hyperion.errors import HyperionError, nearest_first
from hyperion.hardware import detect
from hyperion.paths import project_root, reference_folder
from hyperion.processes import Job, run_job
from hyperion.reproduce.notebooks import read_book
from hyperion.reproduce.publishing import require_no_machine_paths, require_unused, room_for, staged_reference, stored_size
from hyperion.reproduce.runs import claimed_launch
from hyperion.results import Run, is_run
from hyperion.results.places import checked_name
from hyperion.results.store import ENVIRONMENTS, EXPERIMENTS, PREDICTIONS, ROWS, RUN

# The files of a launch that headlines need. Tables and pictures of a single launch are not published.
_FILES = (RUN, ROWS, EXPERIMENTS, ENVIRONMENTS, PREDICTIONS)


def measure_launches(
    folder: Path,
    experiments: Iterable[str],
    count: int,
    *,
    profile: str = "auto",
    data_source: str = "auto",
    on_line: Callable[[str], object] = print,
) -> None:
    """Measure experiments in several launches, one after the other.

    If a launch already has the rows of an experiment for the same inputs, the experiment is not measured again, so a second call
    continues where the first one stopped.

    Args:
        folder: folder of all launches. The launches are the subfolders 1, 2, ….
        experiments: names of experiments, in the order in which they are measured. An experiment that uses the rows of another
            experiment comes after it.
        count: number of launches.
        profile: as in `open_chapter`.
        data_source: as in `open_chapter`.
        on_line: called with each line of output.

    Raises:
        HyperionError: an experiment does not exist, its measurement failed, the profile is replay, `folder` is a run, or another
            call measures these launches.
    """
    if is_run(folder):
        raise HyperionError("this is a run, not a folder of launches", where=folder, next_step="choose another name")
    if profile.partition(":")[0] == REPLAY:
        raise HyperionError(
            f"the profile {profile!r} measures nothing, so its launches would be copies of one run",
            where="--profile or PROFILE",
            next_step="use smoke, full, study or auto",
        )
    pairs = [(notebook_of(experiment), experiment) for experiment in experiments]
    chosen = default_profile(detect().kind) if profile == "auto" else profile
    # The launches stay locked until the end, so that no call publishes them while some are still missing.
    with contextlib.ExitStack() as claimed:
        for number in range(1, count + 1):
            launch = folder / str(number)
            claimed.enter_context(claimed_launch(launch))
            on_line(f"launch {number} of {count}")
            params = {"folder": str(launch), "pairs": pairs, "profile": chosen, "data_source": data_source}
            run_job(Job(measure_launch, params), on_line=on_line)


def measure_launch(folder: str, pairs: list[list[str]], profile: str, data_source: str) -> dict:
    """Measure experiments and store their rows in a run. `measure_launches` calls this function in a new process.

    Args:
        folder: folder of the run.
        pairs: pairs [notebook, experiment].
        profile: name of the profile.
        data_source: source of the data.

    Returns:
        The number of rows of each experiment.
    """
    counts = {}
    for notebook, experiment in pairs:
        chapter = open_chapter(notebook, profile=profile, data_source=data_source, output=folder)
        counts[experiment] = len(chapter.run(experiment).rows)
        print(f"{experiment}: {counts[experiment]} rows")
    return counts


def notebook_of(experiment: str) -> str:
    """Return the stem of the notebook that runs an experiment.

    Raises:
        HyperionError: no notebook runs this experiment.
    """
    owners = {name: notebook.stem for notebook in read_book(project_root()) for name in notebook.produces}
    if experiment not in owners:
        raise HyperionError(
            f"no chapter has the experiment {experiment!r}", next_step=f"choose one of {nearest_first(experiment, owners)}"
        )
    return owners[experiment]


def publish_launches(launches: Iterable[Path], name: str, folder: Path | None = None) -> Path:
    """Copy the rows and samples of several launches to the reference results, and write their page README.md.

    Existing launches of the same name are replaced completely or not at all.

    Args:
        launches: folders of the runs. Every file is first verified against the manifest of its run.
        name: name of the folder of all launches, such as `h200-launches`.
        folder: folder of all references; default: `reference_folder()`.

    Returns:
        The folder of all launches.

    Raises:
        HyperionError: a run was edited or is still in use, two launches have the same rows, a file contains a local path, or the
            launches are too large.
    """
    from hyperion.book.headline_page import launches_page

    folder = folder or reference_folder()
    target = folder / checked_name(name)
    if is_run(target):
        raise HyperionError("this is the reference of a machine", where=target, next_step="choose another name for the launches")
    launches = sorted(launches, key=lambda path: path.name)
    if others := [path.name for path in launches if not path.name.isdecimal()]:
        raise HyperionError(
            f"{', '.join(others[:3])}: launches are the runs 1, 2, … in one folder",
            where=launches[0].parent,
            next_step="name a folder that `hyperion launches` wrote",
        )
    for path in launches:
        require_unused(path)
    contents = {path.name: _files_of(Run.open(path)) for path in launches}
    by_rows: dict[bytes, str] = {}
    for number, files in contents.items():
        other = by_rows.setdefault(files[ROWS], number)
        if other != number:
            raise HyperionError(
                f"the launches {other} and {number} have the same rows, so one is a copy of the other",
                where=target,
                next_step="remove one of them",
            )
    room_for(sum(stored_size(content) for files in contents.values() for content in files.values()), folder, target)
    with staged_reference(target) as staged:
        for number, files in contents.items():
            Run(staged / number).write(files)
        runs = [Run.open(staged / number) for number in contents]
        (staged / "README.md").write_text(launches_page(name, runs), encoding="utf-8")
    return target


def _files_of(run: Run) -> dict[str, bytes]:
    names = [name for name in run.verify() if name in _FILES or name.startswith("samples/")]
    contents = {name: run.read(name) for name in names}
    for name, content in contents.items():
        require_no_machine_paths(name, content)
    return contents
