import pandas as pd
import pytest

from hyperion.errors import HyperionError
from hyperion.reproduce.freshness import reference_for
from hyperion.reproduce.notebooks import read_notebook
from hyperion.results import Row, Run
from tests.reproduce.small_book import write_notebook


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with the references a_empty, b_half and c_whole, of 01_x's experiments counting and weighing."""
    (tmp_path / "pyproject.toml").write_text("")
    write_notebook(tmp_path / "phase1_hardware", "01_x", ["1"], produces=["counting", "weighing"])
    for machine, experiments in (("a_empty", ()), ("b_half", ["counting"]), ("c_whole", ["counting", "weighing"])):
        run = Run.create(tmp_path / "results/reference" / machine, {})
        for experiment in experiments:
            row = Row(notebook="01_x", experiment=experiment, variant="v", metric="count", value=2.0)
            run.record("01_x", experiment, [row], pd.DataFrame({"x": [1.0]}), input_hash="h")
    monkeypatch.chdir(tmp_path)
    return read_notebook(tmp_path / "phase1_hardware/01_x.ipynb")


def test_the_first_machine_that_holds_every_experiment_is_taken(checkout):
    reference, reason = reference_for(checkout, None)
    assert reference.machine == "c_whole" and reason == ""
    assert reference_for(checkout, "c_whole") == (reference, "")


@pytest.mark.parametrize("changed", ["value", "sample", "nothing"])
def test_a_reference_published_again_is_another_one_if_anything_replayed_differs(checkout, tmp_path, changed):
    before, _ = reference_for(checkout, "c_whole")
    row = Row(notebook="01_x", experiment="weighing", variant="v", metric="count", value=3.0 if changed == "value" else 2.0)
    samples = pd.DataFrame({"x": [9.0 if changed == "sample" else 1.0]})
    Run.open(tmp_path / "results/reference/c_whole").record("01_x", "weighing", [row], samples, input_hash="h")
    assert (reference_for(checkout, "c_whole")[0] == before) == (changed == "nothing")


def test_a_named_machine_without_them_gives_the_reason_and_an_unknown_one_is_an_error(checkout):
    assert reference_for(checkout, "b_half") == (None, "no rows of it in the reference run (b_half)")
    with pytest.raises(HyperionError, match="no reference run of 'd'") as caught:
        reference_for(checkout, "d")
    assert "a_empty, b_half, c_whole" in caught.value.next_step
