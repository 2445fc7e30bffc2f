"""How many files does a reader open to follow an experiment from the notebook's cell to its picture?

`python tests/reading_closure.py gemm llama_lora` prints, for each experiment, the files that define a name which its `forecast`,
`run` or figures use. Definitions of the book (experiments, workloads, chapter, figures) are followed in turn; a name of the
library counts as the file that defines it, whose documentation is enough to go on. Static: nothing is executed.
"""

import ast
import functools
import sys
from pathlib import Path

from hyperion.chapter.subjects import subject_of
from hyperion.dependencies import _defining_modules, _imports, _module_file

LIBRARY = "hyperion"
FOLLOWED = ("hyperion.experiments.", "hyperion.workloads.", "hyperion.chapter.", "hyperion.figures.")


@functools.cache
def definitions(module: str) -> dict[str, ast.AST]:
    """{name: its definition} at the top level of a module."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(_module_file(module).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        found[name.id] = node
    return found


@functools.cache
def imported(module: str) -> dict[str, tuple[str, str]]:
    """{local name: (module that defines it, its name there or "")} of what a module imports from the library."""
    path = _module_file(module)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = {}
    for found in _imports(path.read_text(), package):
        if found.module.split(".")[0] == LIBRARY:
            origin = _defining_modules(found.module, found.name)[0]
            names[found.alias] = (origin, "" if origin == f"{found.module}.{found.name}" else found.name)
    return names


def used(module: str, node: ast.AST) -> set[tuple[str, str]]:
    """(module, name) of every library name that a definition uses."""
    places = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            origin, name = imported(module).get(part.value.id, ("", "x"))
            if origin and not name:
                places.add((origin, part.attr))
        if isinstance(part, ast.Name):
            if part.id in definitions(module):
                places.add((module, part.id))
            elif imported(module).get(part.id, ("", ""))[1]:
                places.add(imported(module)[part.id])
    return places


def closure(start: set[tuple[str, str]]) -> set[str]:
    """Modules that define a name reached from `start`."""
    waiting, seen = list(start), set()
    while waiting:
        place = waiting.pop()
        module, name = place
        if place in seen or _module_file(module) is None:
            continue
        seen.add(place)
        node = definitions(module).get(name) if module.startswith(FOLLOWED) else None
        if node is not None:
            waiting += used(module, node)
        elif name not in definitions(module) and name in imported(module):
            waiting.append(imported(module)[name])
    return {module for module, _ in seen}


def reading(experiment: str) -> list[str]:
    """Files of an experiment, from its options and `run` to its figures, as paths in the repository."""
    subject = subject_of(experiment)
    start = {(f"{subject.package}.{experiment}", "EXPERIMENT")}
    figures = f"{subject.package}.figures"
    for plot in ast.walk(definitions(figures)["PLOTS"]):
        if isinstance(plot, ast.Call) and getattr(plot.args[1], "value", "") == experiment:
            start |= used(figures, plot)
    return sorted(str(_module_file(module).relative_to(Path.cwd())) for module in closure(start))


if __name__ == "__main__":
    for experiment in sys.argv[1:] or ["gemm", "activation_checkpointing", "llama_lora"]:
        files = reading(experiment)
        print(f"{experiment}: {len(files)} files", *files, sep="\n  ")
