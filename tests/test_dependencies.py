"""What a module reaches through its imports, and that its hash follows."""

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from hyperion import dependencies
from hyperion.dependencies import imported_modules, reached_files, reached_source_hash


def names(files):
    return {str(path.relative_to(dependencies._PACKAGE)) for path in files}


def test_an_experiment_reaches_what_it_imports_and_not_what_it_does_not():
    reached = names(reached_files(["hyperion.experiments.hardware.gemm"]))
    assert {"experiments/hardware/gemm.py", "measure/clock/timing.py", "hardware/specs.toml", "results/rows.py"} <= reached
    assert not any(name.startswith(("book/", "figures/", "reproduce/", "training/", "install/", "data/")) for name in reached)


def test_imports_are_found_in_every_form():
    source = textwrap.dedent(
        """
        import hyperion.measure.products.gemm as g
        from hyperion import paths
        from hyperion.data.text import wikitext2
        from .clock import timing
        from ..results.rows import Row
        def f():
            import hyperion.models
        import torch
        """
    )
    found = imported_modules(source, "hyperion.measure")
    wanted = {"hyperion.measure.products.gemm", "hyperion.paths", "hyperion.data.text.wikitext2", "hyperion.measure.clock.timing"}
    assert wanted | {"hyperion.results.rows", "hyperion.models"} <= found
    assert not any(name.startswith("torch") for name in found)


def test_a_name_that_a_face_imports_at_first_use_leads_to_the_module_that_defines_it():
    found = imported_modules("from hyperion.processes import World, run_job")
    assert found == {"hyperion.processes.group", "hyperion.processes.job"}


@given(
    st.lists(
        st.sampled_from(["hyperion.results.rows", "hyperion.measure.products.gemm", "hyperion.errors"]), min_size=1, unique=True
    )
)
def test_the_hash_depends_on_the_modules_and_on_nothing_else(modules):
    assert reached_source_hash(*modules) == reached_source_hash(*modules)
    assert len(reached_source_hash(*modules)) == 16


def test_a_changed_file_changes_the_hash(tmp_path, monkeypatch):
    package = tmp_path / "hyperion"
    (package / "room").mkdir(parents=True)
    (package / "room" / "a.py").write_text("from hyperion.room.b import x\n")
    (package / "room" / "b.py").write_text("x = 1\n")
    (package / "room" / "c.py").write_text("y = 1\n")
    monkeypatch.setattr(dependencies, "_PACKAGE", package)
    reached_source_hash.cache_clear()
    before = reached_source_hash("hyperion.room.a")
    for changed, differs in (("c.py", False), ("b.py", True)):
        (package / "room" / changed).write_text("changed = 2\n")
        reached_source_hash.cache_clear()
        assert (reached_source_hash("hyperion.room.a") != before) is differs
    reached_source_hash.cache_clear()
