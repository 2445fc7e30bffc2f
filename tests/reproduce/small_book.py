"""A small real book for the driver's tests: its notebooks record rows through the package results, in real kernels."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hyperion.reproduce.machine import MachineProfile

# One cell that records a row the way an experiment does; {value} may be any expression.
RECORD = """
import pandas as pd
from hyperion.results import Row, Run
run = Run.open(output)
row = Row(notebook="{stem}", experiment="{experiment}", variant="v", metric="count", value=float({value}))
run.record("{stem}", "{experiment}", [row], pd.DataFrame({{"x": [1.0]}}), input_hash="h")
"""
# A cell that opens a chapter whose experiment counts: two values, of which {error} decides whether the second passes its check.
CHAPTER = """
import pandas as pd
from hyperion.chapter import Result, open_chapter
from hyperion.chapter import chapter as chapters
from hyperion.chapter.context import Experiment
def measure(context, report):
    rows = [context.row(name, "count", 7.0, check="as counted", check_error=error, check_tolerance=0.1)
            for name, error in (("good", 0.0), ("bad", {error}))]
    return Result(rows, pd.DataFrame({{"x": [1.0]}}))
chapters.experiment_named = lambda name: Experiment(lambda context: [], measure, isolated={isolated})
chapters.reached_source_hash = lambda module: "the same code"
chapter = open_chapter("{stem}", profile=profile, data_source=data_source, output=output, seed=seed)
chapter.sizes = lambda experiment: {{}}
counting = chapter.run("counting")
"""
MACHINE = MachineProfile("smoke", {"sizes": {}}, {"device": "a CPU", "arch": "x86_64", "torch": "2"}, {"profile": "smoke"})
# One that shows its notebooks two devices, one each; what is tested is who gets what, which takes no device.
TWO_DEVICES = replace(MACHINE, masks=({"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}))


def write_notebook(folder: Path, stem: str, cells: list[str], **metadata) -> Path:
    """A notebook with a parameters cell, `cells`, and metadata.hyperion."""
    parameters = 'profile = "auto"\ndata_source = "auto"\noutput = None\nseed = 0'
    code = [_cell(parameters, tags=["parameters"]), *map(_cell, cells)]
    prose = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": f"# {stem}\nThe rate is $\\frac{{a}}{{b}}$."}
    hyperion = {"needs": [], "optional": [], "produces": ["counting"], "time_budget_s": {"smoke": 5}} | metadata
    for number, cell in enumerate(code):
        cell["id"] = f"cell-{number}"
    document = {
        "cells": [prose, *code],
        "metadata": {"hyperion": hyperion, "kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.ipynb"
    path.write_text(json.dumps(document))
    return path


def recording(stem: str, value: str = "1", experiment: str = "counting") -> str:
    """Source of a cell that records one row."""
    return RECORD.format(stem=stem, value=value, experiment=experiment)


def counting(stem: str, error: str = "0.0", isolated: bool = False) -> str:
    """Source of a cell that measures through a chapter; `error` is an expression."""
    return CHAPTER.format(stem=stem, error=error, isolated=isolated)


def make_book(root: Path, second: list[str] | None = None) -> Path:
    """A checkout with the chapters 01_first, 02_second (needs first), 03_third (needs second) and 04_alone."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text("")
    phase = root / "phase1_hardware"
    write_notebook(phase, "01_first", [recording("01_first")])
    write_notebook(phase, "02_second", second or [recording("02_second")], needs=["01_first"])
    write_notebook(phase, "03_third", [recording("03_third")], needs=["02_second"])
    write_notebook(phase, "04_alone", [recording("04_alone")])
    return root


# The driver as a process of its own, with the machine given: asking it costs seconds of importing torch.
DRIVER = """
import json, sys
from hyperion.errors import HyperionError
from hyperion.reproduce import Request, reproduce
from tests.reproduce import small_book
try:
    sys.exit(reproduce(Request(**json.loads(sys.argv[1])), machine=getattr(small_book, sys.argv[2])))
except HyperionError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start_driver(root: Path, machine: str = "MACHINE", **request) -> subprocess.Popen:
    """Start a call in the checkout `root`, on the machine of that name here; its runs go to root/results."""
    here = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}
    environment.pop("HYPERION_RESULTS", None)
    environment.pop("HYPERION_DATA_MIRROR", None)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(request), machine],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _cell(source: str, tags: list[str] | None = None) -> dict:
    metadata = {"tags": tags} if tags else {}
    return {"cell_type": "code", "metadata": metadata, "execution_count": None, "outputs": [], "source": source}
