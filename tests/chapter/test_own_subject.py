"""A subject outside of the library, with an experiment, options, a metric, sizes, a figure and a notebook, under reproduce."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hyperion.results import Run
from hyperion.results.metrics import REGISTRY
from tests.reproduce.small_book import write_notebook

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "__init__.py": '"""A toy subject."""\n',
    "doubling.py": '''
        """How long does it take to double a list?"""

        import pandas as pd

        from hyperion.chapter import Context, Experiment, Forecast, Options, Result
        from toy.work import double


        class DoublingOptions(Options):
            """Args:
            lengths: lengths of the list.
            """

            lengths: tuple[int, ...]


        def forecast(context: Context) -> list[Forecast]:
            shortest = DoublingOptions.of(context).lengths[0]
            return [Forecast(variant="list", metric="doublings", estimate=float(shortest), basis="one each")]


        def run(context: Context, report) -> Result:
            rows = [
                context.row("list", "doublings", float(len(double(length))), params={"length": length})
                for length in DoublingOptions.of(context).lengths
            ]
            return Result(rows, pd.DataFrame({"length": [row.params["length"] for row in rows]}))


        EXPERIMENT = Experiment(forecast, run, options=DoublingOptions)
        ''',
    "work.py": '''
        """What is measured."""


        def double(length: int) -> list[int]:
            return [2 * number for number in range(length)]
        ''',
    "metrics.py": '''
        """A metric that the library lacks."""

        from hyperion.results import Metric

        METRICS = (Metric("doublings", "doublings", "higher", "numbers doubled"),)
        ''',
    "figures.py": '''
        """The toy's figure."""

        import pandas as pd

        from hyperion.figures.material import Material, Panel, Plot, Quote
        from hyperion.figures.style import new_figure


        def doubling(material: Material):
            rows = material.of("doubling")
            figure, (axes,) = new_figure("Doubling", material.machine("doubling"), 1)
            axes.plot([row.params["length"] for row in rows], [row.value for row in rows])
            return figure


        def headlines(rows, is_steady):
            for row in rows:
                if row.experiment == "doubling":
                    yield Quote(f"numbers doubled in a list of {row.params['length']}", row)


        def summary_panels(material: Material):
            return [Panel("doubling", lambda axes, length=length: axes.plot([length])) for length in (1, 10)]


        def flat_tables(runs):
            values = [row.value for rows in runs for row in rows if row.experiment == "doubling"]
            return {"toy/doubled.csv": pd.DataFrame({"Doubled": values})}


        TITLES = {"doubling": "Doubling lists"}
        PLOTS = (Plot("doubling", "doubling", "Numbers doubled by length.", doubling),)
        ''',
    "sizes.toml": """
        [smoke.doubling]
        lengths = [1, 10]

        [full.doubling]
        lengths = [1, 10, 100]
        """,
}
CELL = """
from hyperion.book import show
from hyperion.chapter import open_chapter
chapter = open_chapter("01_toy", profile=profile, data_source=data_source, output=output, seed=seed)
doubling = chapter.run("doubling")
chapter.expect(len(doubling.rows) == len(chapter.options("doubling").lengths), "a row is missing")
"""


@pytest.fixture
def toy(tmp_path):
    """The subject's folder."""
    folder = tmp_path / "site" / "toy"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    write_notebook(folder, "01_toy", [CELL], produces=["doubling"])
    return folder


def named(toy: Path) -> dict[str, str]:
    """The environment in which the subject is a path."""
    return {"HYPERION_SUBJECTS": str(toy)}


def installed(toy: Path) -> dict[str, str]:
    """The environment in which the subject is an installed package with an entry point."""
    facts = toy.parent / "toy-1.0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[hyperion.subjects]\ntoy = toy\n")
    return {"PYTHONPATH": str(toy.parent)}


def hyperion(tmp_path: Path, added: dict[str, str], *words: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "HYPERION_SUBJECTS"}
    environment |= {"HYPERION_RESULTS": str(tmp_path / "results"), "HYPERION_DATA": str(tmp_path / "data"), **added}
    command = [sys.executable, "-m", "hyperion", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def reproduce(tmp_path: Path, added: dict[str, str]) -> str:
    done = hyperion(tmp_path, added, "reproduce", "--profile", "smoke", "--only", "01_toy")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.book
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("register", [named, pytest.param(installed, marks=pytest.mark.long)])
def test_a_subject_of_ones_own_runs_and_is_measured_again_when_its_files_change(toy, tmp_path, register):
    assert "done" in reproduce(tmp_path, register(toy))
    run = Run.open((tmp_path / "results" / "latest").resolve())
    assert [(row.value, row.unit, row.params, row.predicted) for row in run.rows("01_toy")] == [
        (1.0, "doublings", {"length": 1}, 1.0),
        (10.0, "doublings", {"length": 10}, 1.0),
    ]
    assert "doublings" not in REGISTRY, "this process does not have the package: the run's own definition is used"
    assert (run.folder / "benchmarks" / "toy" / "doubling.png").stat().st_size > 1000
    page = (run.folder / "report.html").read_text()
    assert "Doubling lists" in page and "numbers doubled in a list of 10" in page
    assert (run.folder / "benchmarks" / "summary.png").stat().st_size > 1000
    flat = tmp_path / "flat"
    assert hyperion(tmp_path, register(toy), "export", str(run.folder), "--to", "csv", "--out", str(flat)).returncode == 0
    assert (flat / "toy" / "doubled.csv").read_text() == "Doubled\n1.0\n10.0\n"
    assert hyperion(tmp_path, {}, "verify", str(run.folder)).returncode == 0, "without the package"

    replace(toy / "work.py", "range(length)", "range(length + 1)")
    assert "done" in reproduce(tmp_path, register(toy)), "a file that the experiment imports makes its notebook stale"
    assert [row.value for row in Run.open(run.folder).rows("01_toy")] == [2.0, 11.0]


@pytest.mark.book
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
def test_a_figure_makes_no_measurement_stale_and_other_sizes_do(toy, tmp_path):
    reproduce(tmp_path, named(toy))
    run = Run.open((tmp_path / "results" / "latest").resolve())
    finished = run.finished("01_toy", "doubling")
    replace(toy / "figures.py", "Doubling lists", "Twice")
    assert "up to date" in reproduce(tmp_path, named(toy))
    assert "Twice" in (run.folder / "report.html").read_text()
    assert Run.open(run.folder).finished("01_toy", "doubling") == finished

    replace(toy / "sizes.toml", "[1, 10]", "[5]")
    assert "done" in reproduce(tmp_path, named(toy))
    assert [row.value for row in Run.open(run.folder).rows("01_toy")] == [5.0]


@pytest.mark.book
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("sizes.toml", "lengths = [1, 10]", "length = [1]", "lengths"),
        ("sizes.toml", "lengths = [1, 10]", "lengths = [1]\nlenghts = [2]", "lenghts"),
        ("sizes.toml", "[smoke.doubling]", "[smok.doubling]", "smok"),
        ("sizes.toml", "[smoke.doubling]", "[smoke.dubling]", "dubling"),
        ("sizes.toml", "[smoke.doubling]", "[smoke.figures]", "the module 'figures' has no EXPERIMENT"),
        ("sizes.toml", "lengths = [1, 10]", "lengths = [", "not valid TOML"),
        ("metrics.py", '"doublings", "doublings"', '"step_time_s", "doublings"', "step_time_s"),
        ("metrics.py", "METRICS =", "METRIC =", "METRICS is None, not a tuple of Metric"),
        ("metrics.py", 'doubled"),)', 'doubled"))', "METRICS is Metric("),
        ("doubling.py", "EXPERIMENT =", "EXPERIMNT =", "the module 'doubling' has no EXPERIMENT"),
        ("doubling.py", "EXPERIMENT = ", "EXPERIMENT = = ", "doubling.py:30"),
        ("doubling.py", "import pandas as pd", "import pandsa as pd", "doubling.py:3"),
    ],
)
def test_a_mistake_in_a_subject_is_named(toy, tmp_path, name, old, new, says):
    path = toy / name
    path.write_text(path.read_text().replace(old, new))
    done = hyperion(tmp_path, named(toy), "reproduce", "--profile", "smoke", "--only", "01_toy")
    assert done.returncode == 2 and says in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_relative_path_is_that_of_the_folder_in_which_the_command_was_started(toy, tmp_path):
    assert "01_toy: done" in reproduce(tmp_path, {"HYPERION_SUBJECTS": os.path.relpath(toy, ROOT)})


@pytest.mark.slow
@pytest.mark.parametrize("value", ["missing", "site", "site/toy/doubling.py"])
def test_a_path_that_is_no_subject_is_named(toy, tmp_path, value):
    done = hyperion(tmp_path, {"HYPERION_SUBJECTS": str(tmp_path / value)}, "reproduce", "--only", "01_toy")
    assert done.returncode == 2 and "HYPERION_SUBJECTS" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_subject_cannot_take_the_name_of_one_of_the_librarys(toy, tmp_path):
    clash = toy.rename(toy.parent / "scaling")
    done = hyperion(tmp_path, named(clash), "reproduce", "--only", "01_toy")
    assert done.returncode == 2 and "two subjects are called 'scaling'" in done.stdout + done.stderr
