"""The order of the packages, as docs/architecture.md states it: a package imports earlier packages only, and no cycle exists."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import hyperion
from hyperion.dependencies import imported_modules

LIBRARY = Path(hyperion.__file__).resolve().parent
PACKAGES = (
    "results",
    "figures",
    "hardware",
    "processes",
    "measure",
    "data",
    "kernels",
    "models",
    "parallel",
    "checkpoints",
    "training",
    "engines",
    "chapter",
    "workloads",
    "experiments",
    "book",
    "doctor",
    "passport",
    "porting",
    "frameworks",
    "reproduce",
    "commands",
    "cli",
)
# Every package may import these, and they import no package. `install` runs before an environment exists.
GROUND = (
    "errors",
    "paths",
    "untrusted",
    "forms",
    "locks",
    "terminal",
    "compat",
    "dependencies",
    "environ",
    "units",
    "garbage",
    "install",
)
ENTRANCES = ("__init__", "__main__")
FILES = sorted(LIBRARY.rglob("*.py"))


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    """Return the dotted name of the module in a file."""
    parts = ("hyperion", *path.relative_to(LIBRARY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_a_package_imports_only_earlier_packages(path):
    package = name_of(path)
    if package in ENTRANCES:
        return
    folder = ".".join(["hyperion", *path.parent.relative_to(LIBRARY).parts])
    used = {package_of(module) for module in imported_modules(path.read_text(), folder)} - {"", package, *GROUND}
    used = {name for name in used if name in PACKAGES or (LIBRARY / name).is_dir()}
    allowed = set() if package in GROUND else set(PACKAGES[: PACKAGES.index(package)])
    assert used <= allowed, f"{package} may not import {sorted(used - allowed)}"


def test_every_package_has_its_place():
    packages = {name_of(path) for path in FILES} - {*ENTRANCES, *GROUND}
    assert packages <= set(PACKAGES), "name the new package's place in PACKAGES"


def test_no_import_cycle():
    graph = {name: set(modules_imported_first(name)) for name in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these modules import each other: {' <- '.join(error.args[1])}")


def modules_imported_first(name: str) -> Iterator[str]:
    """Yield the modules of the library that Python executes when it imports a module.

    These are the modules that statements outside of functions and of `if TYPE_CHECKING` import. Before Python imports a module,
    it imports the packages that contain it.
    """
    is_package = MODULES[name].name == "__init__.py"
    for node in statements_at_import(ast.parse(MODULES[name].read_text()).body):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [base])])
            parts = [f"{base}.{alias.name}" for alias in node.names]
            found = [part if part in MODULES else base for part in parts]
        for module in found:
            yield from ({module} & MODULES.keys()) - {name}
            packages = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
            # The packages that contain the importing module are already being imported.
            yield from {package for package in packages & MODULES.keys() if not f"{name}.".startswith(f"{package}.")}


def statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that are executed when a module is imported, also those inside `if`, `try`, `with` and classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from statements_at_import(getattr(node, "body", []))
        for part in ("orelse", "finalbody"):
            yield from statements_at_import(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from statements_at_import(handler.body)


def test_no_subject_imports_another_subject():
    for path in FILES:
        subject, _, module = dotted(path).removeprefix("hyperion.experiments.").partition(".")
        if name_of(path) != "experiments" or not module:
            continue
        imported = imported_modules(path.read_text(), f"hyperion.experiments.{subject}")
        others = {name for name in imported if name.startswith("hyperion.experiments.")}
        others = {name for name in others if name.split(".")[2] != subject}
        assert not others, f"{dotted(path)} imports another subject: {sorted(others)}"


def test_results_and_book_know_no_torch():
    for path in (path for path in FILES if name_of(path) in ("results", "figures", "book", "errors", "paths", "cli")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path


_METRICS = [name for name in MODULES if name.startswith("hyperion.experiments.") and name.endswith(".metrics")]


@pytest.mark.parametrize(
    ("module", "refused"),
    [("hyperion.training", "pandas"), ("hyperion.doctor.probes", "hyperion.measure"), *((name, "torch") for name in _METRICS)],
)
def test_what_processes_import_at_their_start_loads_no_slow_package(module, refused):
    """A rank that trains would load pandas for most of a second, and a worker of the doctor the measurements for two seconds.

    Commands that only read runs would load torch for three seconds: they import the metrics of all subjects.
    """
    found, waiting = set(), [module, module.rpartition(".")[0]]  # Python imports the package first
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += modules_imported_first(name)
    assert len(found) > 10
    for name in sorted(found):
        for node in statements_at_import(ast.parse(MODULES[name].read_text()).body):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(f"{imported}.".startswith(f"{refused}.") for imported in names), f"{name} imports {refused}"
