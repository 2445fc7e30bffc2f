"""The environment a page shows is that of the measurements, whichever run they lie in."""

import pandas as pd

from hyperion.book.export import reference_readme
from hyperion.book.outline import environment, versions
from hyperion.figures.material import Material
from hyperion.results import Row, Run
from tests.book.made_up.run import GPU

LAPTOP = {"gpus": [], "cpu": {"name": "Laptop", "cores": 4}, "torch": "2.13", "source": {"hash": "a" * 64}}


def run_of(tmp_path, *experiments):
    """A run of a laptop with experiments of (name, input hash, provenance, environment)."""
    run = Run.create(tmp_path, {"profile": "smoke", "seed": 0, "environment": LAPTOP})
    for name, digest, provenance, measured_in in experiments:
        row = Row(notebook="nb", experiment=name, variant="v", metric="count", value=1.0)
        run.record("nb", name, [row], pd.DataFrame({"x": [1]}), input_hash=digest, provenance=provenance, environment=measured_in)
    return environment(Material(run)).set_index("")


def test_one_environment_is_one_column(tmp_path):
    shown = run_of(tmp_path, ("a", "h", {"seed": 3}, LAPTOP), ("b", "h", {"seed": 3}, LAPTOP))
    assert list(shown) == ["of this run"]
    assert shown.loc["device", "of this run"] == "Laptop (4 cores)" and shown.loc["seed", "of this run"] == "3"


def test_settings_of_the_communication_library_are_shown_where_there_are_any(tmp_path):
    assert "collective settings" not in run_of(tmp_path / "none", ("a", "h", {}, LAPTOP)).index
    told = LAPTOP | {"collective_settings": {"NCCL_NVLS_ENABLE": "0", "NCCL_PROTO": "LL"}}
    shown = run_of(tmp_path / "some", ("a", "h", {}, told))
    assert shown.loc["collective settings", "of this run"] == "NCCL_NVLS_ENABLE=0, NCCL_PROTO=LL"


def test_a_replay_shows_the_reference_machines_environment(tmp_path):
    shown = run_of(tmp_path, ("a", "replay:h200:h", {"profile": "full", "seed": 0}, GPU))
    assert list(shown) == ["of h200 (replay)"]
    column = shown["of h200 (replay)"]
    assert column["device"] == "NVIDIA Test GPU" and column["profile"] == "full" and "Laptop" not in str(shown)


def test_an_upgrade_in_the_middle_of_a_run_is_seen(tmp_path):
    upgraded = LAPTOP | {"torch": "2.14"}
    shown = run_of(tmp_path, ("a", "h", {}, LAPTOP), ("b", "h", {}, upgraded), ("c", "h", {}, upgraded))
    assert list(shown) == ["of this run: a", "of this run: b, c"]
    assert list(shown.loc["torch"]) == ["2.13", "2.14"]


def test_what_a_replay_does_not_tell_is_not_taken_from_this_machine(tmp_path):
    shown = run_of(tmp_path, ("a", "replay:h200:h", None, None))
    assert "Laptop" not in str(shown) and "2.13" not in str(shown)


def made_by(tmp_path, *commits):
    """A run whose experiments a, b, c … were measured by the given commits, without local changes."""
    created = LAPTOP | {"source": {"commit": commits[0], "hash": "a" * 64, "modified": False}}
    run = Run.create(tmp_path, {"profile": "smoke", "seed": 0, "environment": created})
    for name, commit in zip("abcdef", commits, strict=False):
        row = Row(notebook="nb", experiment=name, variant="v", metric="count", value=1.0)
        made = {"source": {"commit": commit, "hash": "a" * 64, "modified": False}} if commit else {}
        run.record("nb", name, [row], pd.DataFrame({"x": [1]}), input_hash="h", provenance=made, environment=LAPTOP)
    return Material(run)


def test_a_page_names_the_parts_of_each_version_of_the_code(tmp_path):
    material = made_by(tmp_path, "1" * 40, "2" * 40, "1" * 40)
    assert versions(material)[["commit", "experiments"]].values.tolist() == [["1" * 12, "a, c"], ["2" * 12, "b"]]
    page = reference_readme(material.run, material)["README.md"].decode()
    assert "**2 versions of the code measured this run.**" in page and f"| {'2' * 12} | no | b |" in page
    assert f"Version {'1' * 12} is the oldest of them." in page


def test_a_page_of_one_version_names_it(tmp_path):
    material = made_by(tmp_path, "1" * 40, None)  # the second states no version, so it is that of the run
    page = reference_readme(material.run, material)["README.md"].decode()
    assert f"One version of the code measured this run: commit `{'1' * 12}`." in page and "versions of the code" not in page
