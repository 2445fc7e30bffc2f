"""Find the files that a module imports, directly or indirectly, and hash them.

Imports are read from the syntax tree, and no code is executed. The hash is used to decide whether the results of an experiment
are up to date. A change in a file that the experiment does not import does not change the hash, nor does a change in a comment
or a docstring.

Some `__init__.py` files contain only imports of the public names of a package. If a name is imported from such a file, only the
module that defines the name counts as imported, and not all modules that the `__init__.py` imports.
"""

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import hyperion
from hyperion.errors import not_none

_PACKAGE = Path(hyperion.__file__).resolve().parent
# The dotted name of a module, such as "hyperion.processes.worker", between quotation marks.
_DOTTED_NAME = re.compile(r"""(?<=["'])[A-Za-z_]\w*(?:\.\w+)+(?=["'])""")
# These files are left out, because the sizes of each experiment are part of a separate hash.
_SIZES = ("sizes.toml", "profiles.toml")


class Import(NamedTuple):
    """One imported module, or one name imported from a module.

    For `import module`, the attribute `name` is "". For `from module import name`, it is the imported name. `alias` is the name
    of the imported object in the importing module.
    """

    module: str
    name: str
    alias: str


def reached_files(modules: Iterable[str]) -> list[Path]:
    """Return the files of `modules` and all files that they import, directly or indirectly.

    Only imports from hyperion and from the packages of `modules` are followed. A module also counts as imported if its dotted
    name is a string in a reached module, because other processes run such a module, or import it by this name. A TOML file in the
    folder of a reached module is included if its name is a string literal in a reached module, except TOML files with sizes.

    Args:
        modules: dotted names of modules. Names without a file are skipped.
    """
    waiting, sources = list(modules), dict[Path, str]()
    packages = frozenset({"hyperion", *(name.partition(".")[0] for name in waiting)})
    while waiting:
        name = waiting.pop()
        path = _module_file(name)
        if path is None or path in sources:
            continue
        sources[path] = path.read_text(encoding="utf-8")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting.extend(imported_modules(sources[path], package, packages))
        waiting.extend(text for text in _DOTTED_NAME.findall(sources[path]) if text.partition(".")[0] in packages)
    tables = {toml for folder in {path.parent for path in sources} for toml in folder.glob("*.toml") if toml.name not in _SIZES}
    named = {toml for toml in tables if any(_contains_file_name(source, toml.name) for source in sources.values())}
    return sorted(sources.keys() | named)


@functools.cache
def reached_source_hash(*modules: str) -> str:
    """Return the hash of the files that `modules` reach, see `reached_files`, as 16 hexadecimal digits.

    The hash is cached. If a file changes while the process runs, the process still runs the code that it has loaded.
    """
    return files_hash(reached_files(modules))[:16]


def files_hash(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the files' contents and of their paths relative to the folder of the topmost package.

    Comments and docstrings of Python files are not hashed; see `code_of`.
    """
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".py":
            content = code_of(content)
        digest.update(_place(path).encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


@functools.cache
def code_of(source: bytes) -> bytes:
    """Return a Python source without comments, docstrings, blank lines and spaces at the end of lines.

    The code is returned as it is written, instead of a form that depends on the version of Python, such as `ast.dump`. So two
    machines with different versions have the same hash. A comment between the parts of one string literal is kept. A source that
    is not valid Python in UTF-8, or too deeply nested to be parsed, is returned unchanged.
    """
    try:
        tree, encoding = ast.parse(source), tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    if encoding not in ("utf-8", "utf-8-sig"):
        return source
    text = source.decode("utf-8-sig")
    # `splitlines` is not used, because it also splits at characters that do not end a line of Python. The lines are encoded,
    # because the columns in the syntax tree count bytes.
    lines = [line.encode() for line in re.split("\r\n|\r|\n", text)]
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    spans = {node: ((node.lineno, node.col_offset), (not_none(node.end_lineno), node.end_col_offset)) for node in strings}
    for row in [row for row, line in enumerate(lines, 1) if b"#" in line]:
        signs = [match.start() for match in re.finditer(b"#", lines[row - 1])]
        comments = (at for at in signs if not any(start <= (row, at) < end for start, end in spans.values()))
        lines[row - 1] = lines[row - 1][: next(comments, None)]
    for body in _documented_bodies(tree):
        (first, column), (last, end) = spans.pop(body[0].value)
        rest = b"pass" if len(body) == 1 else b""
        lines[first - 1 : last] = [lines[first - 1][:column] + rest + lines[last - 1][end:], *[b""] * (last - first)]
    # Blank lines and spaces at the end of a line inside a string are part of its value.
    inside = {row for (first, _), (last, _) in spans.values() for row in range(first, last)}
    # An empty line after a backslash ends the statement.
    ends = {row + 1 for row, line in enumerate(lines, 1) if line.endswith(b"\\")}
    kept = [(row, line) for row, line in enumerate(lines, 1) if row in inside or row in ends or line.strip()]
    return b"\n".join(line if row in inside else line.rstrip() for row, line in kept)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield all statements of a module, the outer ones first.

    Expressions are skipped, because they contain no statements. They make up most of the tree, so `ast.walk`, which visits them
    too, takes several times as long.
    """
    waiting: deque[Any] = deque(tree.body)
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.stmt):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting.extend(getattr(node, part, ()))


def _documented_bodies(tree: ast.Module) -> Iterator[list[Any]]:
    """Yield the body (list of statements) of each module, class and function that has a docstring."""
    for node in (tree, *_statements(tree)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    yield node.body


def json_hash(content: object) -> str:
    """Return the hash of a JSON-serializable value, as 16 hexadecimal digits. The order of the keys of dicts does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def imported_modules(source: str, package: str = "", packages: frozenset[str] = frozenset({"hyperion"})) -> set[str]:
    """Return the dotted names of the modules that a Python source imports, including imports inside functions.

    Args:
        source: the text of the source.
        package: the package of the source, which is needed for relative imports.
        packages: the topmost packages whose modules are returned.
    """
    wanted = [found for found in _imports(source, package) if found.module.partition(".")[0] in packages]
    return {module for found in wanted for module in _defining_modules(found.module, found.name)}


@functools.cache
def _imports(source: str, package: str) -> tuple[Import, ...]:
    """Return the imports of a source. The result is cached, because chapters share most files and parsing is slow."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # no error is raised here, because the execution of the source reports it
    found = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "", alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            found += [Import(base, alias.name, alias.asname or alias.name) for alias in node.names]
    return tuple(found)


def _contains_file_name(source: str, name: str) -> bool:
    """Return True if a string literal in the source is this file name, or a path that ends with this file name."""
    # Most sources do not contain the name at all, and parsing is slow.
    return name in source and name in _file_names(source)


@functools.cache
def _file_names(source: str) -> frozenset[str]:
    """Return the last parts of all string literals of a source, where `/` separates the parts."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(string.rpartition("/")[2] for string in strings)


def _defining_modules(module: str, name: str) -> list[str]:
    """Return the module that defines the name in `from module import name`, as a list with one entry.

    If `name` is a submodule, return the submodule. If `module` is a package whose `__init__.py` only imports public names,
    return the module from which the name is imported. Otherwise return `module` itself.
    """
    if name and _module_file(f"{module}.{name}"):
        return [f"{module}.{name}"]
    path = _module_file(module)
    if name and path is not None and path.name == "__init__.py":
        source = path.read_text(encoding="utf-8")
        origin = next((found for found in _imports(source, module) if found.name and found.alias == name), None)
        if origin is not None and origin.module != module and _is_face(source):
            return _defining_modules(origin.module, origin.name)
    return [module]


@functools.cache
def _is_face(source: str) -> bool:
    """Return True if a module only re-exports names: its source contains nothing but a docstring, imports and `__all__`.

    Lazy imports are allowed too: the functions `__getattr__` and `__dir__`, and imports under `if TYPE_CHECKING`.
    """

    def passive(node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            return ast.unparse(node.test) == "TYPE_CHECKING" and all(map(passive, node.body))
        if isinstance(node, ast.FunctionDef):
            return node.name in ("__getattr__", "__dir__")
        if isinstance(node, ast.Assign):
            return [getattr(target, "id", "") for target in node.targets] == ["__all__"]
        return (
            isinstance(node, ast.Import | ast.ImportFrom) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        )

    return all(passive(node) for node in ast.parse(source).body)


def _module_file(name: str) -> Path | None:
    """Return the file of a module; None if the module has no file. The package of the module is not imported."""
    first, *rest = name.split(".")
    base = _package_folder(first)
    if base is None:
        return None
    base = base.joinpath(*rest)
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _package_folder(name: str) -> Path | None:
    if name == "hyperion":
        return _PACKAGE
    spec = PathFinder.find_spec(name) if name.isidentifier() else None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve() if places else None


def _place(path: Path) -> str:
    """Return the path of a file relative to the folder that contains its topmost package."""
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE))
    top = path.parent
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return str(path.relative_to(top.parent))
