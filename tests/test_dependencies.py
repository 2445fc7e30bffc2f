"""What a module reaches through its imports, and that its hash follows."""

import ast
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion import dependencies
from hyperion.dependencies import code_of, imported_modules, reached_files, reached_source_hash


def names(files):
    return {str(path.relative_to(dependencies._PACKAGE)) for path in files}


def test_an_experiment_reaches_what_it_imports_and_not_what_it_does_not():
    reached = names(reached_files(["hyperion.experiments.hardware.gemm"]))
    assert {"experiments/hardware/gemm.py", "measure/clock/timing.py", "hardware/specs.toml", "results/rows.py"} <= reached
    assert not any(name.startswith(("book/", "figures/", "reproduce/", "training/", "install/", "data/")) for name in reached)


def test_the_toml_files_of_experiments():
    def tables(experiment):
        reached = reached_files([f"hyperion.experiments.{experiment}"])
        return {path.name for path in reached if path.suffix == ".toml"}

    assert tables("hardware.gemm") == {"specs.toml", "cpu_specs.toml", "efficiency.toml"}
    own = {"advice.toml", "parser_options.toml", "rocm_readers.toml"}
    assert tables("megatron.adaptation_advice") >= own and not tables("megatron.pipeline_bubble") & own


def test_a_module_that_is_named_by_a_string_is_an_input():
    # Frameworks are imported by their names, and other processes run these modules.
    reached = names(reached_files(["hyperion.experiments.frameworks.framework_parity"]))
    assert {"engines/deepspeed_zero.py", "engines/plain.py", "processes/worker.py"} <= reached
    reached = names(reached_files(["hyperion.experiments.serving.server_answers"]))
    assert {"experiments/serving/front.py", "experiments/serving/without_cudnn_attention.py"} <= reached


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
    found = imported_modules("from hyperion.processes import process_group, run_job")
    assert found == {"hyperion.processes.group", "hyperion.processes.job"}


@settings(deadline=None)  # the first call parses all files
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


def test_a_toml_file_counts_only_if_a_reached_module_names_it(tmp_path, monkeypatch):
    package = tmp_path / "hyperion"
    (package / "room").mkdir(parents=True)
    (package / "room" / "b.py").write_text('x = __file__ + "/../named.toml"\ny = open("plain.toml")\n')
    (package / "room" / "c.py").write_text('"""Not reached."""\ny = "other.toml"\n')
    (package / "room" / "d.py").write_text('"""Explains documented.toml.\n\nSee `documented.toml`."""  # commented.toml\n')
    (package / "room" / "a.py").write_text("import hyperion.room.d\nfrom hyperion.room.b import x\n")
    monkeypatch.setattr(dependencies, "_PACKAGE", package)

    def digest():
        reached_source_hash.cache_clear()
        return reached_source_hash("hyperion.room.a")

    files = ("named", "plain", "other", "documented", "commented", "sizes")
    for name in files:
        (package / "room" / f"{name}.toml").write_text("a = 1\n")
    before = digest()
    for name in files:
        (package / "room" / f"{name}.toml").write_text("a = 2\n")
        assert (digest() != before) is (name in ("named", "plain")), name
        (package / "room" / f"{name}.toml").write_text("a = 1\n")
    assert digest() == before
    reached_source_hash.cache_clear()


def _syntax(source: bytes) -> ast.Module:
    """Return the syntax tree of a source without docstrings and `pass`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            start = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body = [part for part in node.body[start:] if not isinstance(part, ast.Pass)]
    return tree


def _are_same(one: object, other: object) -> bool:
    """Whether two syntax trees are the same, wherever their nodes stand in the source. `ast.dump` would take longer."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        return all(_are_same(getattr(one, name, None), getattr(other, name, None)) for name in one._fields)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one == other


def test_the_code_of_each_file_of_the_library_is_complete():
    files = sorted(dependencies._PACKAGE.rglob("*.py"))
    assert len(files) > 200
    assert not _are_same(_syntax(b"x = [1, f(y)]"), _syntax(b"x = [1, f(z)]"))
    for path in files:
        source = path.read_bytes()
        assert _are_same(_syntax(code_of(source)), _syntax(source)), path


WRITTEN = '''"""A module."""

x = 1


class A(Exception):
    """Raised."""


def f():
    """Return a text."""
    text = """one

    # two
    """
    return text  # not a comment of the string


def g(): "short"; return 2
'''


@pytest.mark.parametrize(
    "before, after, same",
    [
        ("A module.", "Another\n\nmodule.", True),
        ("Return a text.", "Return a ü.", True),
        ("x = 1\n", "x = 1  # one\n", True),
        ("x = 1\n", "\n# one\nx = 1\n", True),
        ('    """Raised."""', "    pass", True),
        ('"short"', '"longer"', True),
        ("x = 1", "x = 2", False),
        ("one\n\n", "one\n", False),
        ("# two", "# three", False),
        ('"short"; return 2', '"short"; return 3', False),
        ("    return text", "return text", False),
        ('"short"; return 2', '"#"; return "#"', False),
        ('"short"; return 2', '"ä"; return "ü"  # 2', False),
    ],
)
def test_only_code_counts(before, after, same):
    assert before in WRITTEN
    changed = WRITTEN.replace(before, after)
    assert (code_of(changed.encode()) == code_of(WRITTEN.encode())) is same
    assert (code_of(changed.replace("\n", "\r\n").encode()) == code_of(WRITTEN.encode())) is same


@pytest.mark.parametrize(
    "one, other",
    [
        (b"x = 1 \\\n# c\n-y\n", b"x = 1 \\\n-y\n"),
        (b"x = 1 \\\n\n-y\n", b"x = 1 \\\n-y\n"),
        ("# coding: latin-1\nx = 'é'\n".encode(), "# coding: utf-8\nx = 'é'\n".encode()),
    ],
)
def test_different_code_in_other_forms(one, other):
    assert ast.dump(ast.parse(one)) != ast.dump(ast.parse(other)) and code_of(one) != code_of(other)


@pytest.mark.parametrize("source", [b"-" * 200_000 + b"1", b"x=" + b"+".join([b"a"] * 100_000), b"def f(:\n", b"x = '\xff'\n"])
def test_a_source_that_cannot_be_parsed_is_hashed_as_it_is(source):
    assert code_of(source) == source
    assert imported_modules(source.decode(errors="replace")) == set()
