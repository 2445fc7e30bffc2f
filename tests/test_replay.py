"""Every notebook runs in the profile `replay`, on the rows of a reference run, and all of its checks hold.

The notebooks run in this process, because they would take three times as long with kernels and executed copies.
test_readme_variants runs the command.
"""

import pytest

from hyperion.results.execution import LOG, executed, unexpected
from tests.test_notebooks import PATHS, cells_of

pytestmark = pytest.mark.book
REPLAYED = ("04_limits_explained", "12_inference_and_quantization")  # by the tests of every change


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replay") / "run"


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.long] * (path.stem not in REPLAYED), id=path.stem) for path in PATHS]
)
def test_a_notebook_replays(path, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    log = tmp_path / "log"
    monkeypatch.setenv(LOG, str(log))
    names = {"__name__": "__main__"}
    for cell in cells_of(path, "code"):
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
        if "parameters" in cell["metadata"].get("tags", []):
            names |= {"profile": "replay", "output": str(run_folder)}
    assert executed(log, path.stem) and not unexpected(log, path.stem)
