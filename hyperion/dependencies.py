"""Which of the library's files does a module reach through its imports, and what is their hash?

Static: the imports are read from the syntax tree, nothing is executed. A change in a file that a chapter never imports
leaves its results fresh.
"""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import hyperion

_PACKAGE = Path(hyperion.__file__).resolve().parent


def reached_files(modules: Iterable[str]) -> list[Path]:
    """Files of the library that `modules` (dotted names in hyperion) import, directly or through each other.

    The TOML files beside a reached module count as part of it.
    """
    waiting, seen = list(modules), set()
    while waiting:
        path = _module_file(waiting.pop())
        if path is None or path in seen:
            continue
        seen.add(path)
        waiting.extend(imported_modules(path.read_text(encoding="utf-8"), _package_of(path)))
    data = {toml for path in seen for toml in path.parent.glob("*.toml")}
    return sorted(seen | data)


@functools.cache
def reached_source_hash(*modules: str) -> str:
    """Hash over names and contents of the files that `modules` reach; 16 hexadecimal digits.

    Cached: a process runs the code it has loaded, whatever happens to the files meanwhile.
    """
    digest = hashlib.sha256()
    for path in reached_files(modules):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def imported_modules(source: str, package: str = "") -> frozenset[str]:
    """Dotted names in hyperion that a Python source imports, inside functions too.

    Cached by the text: each chapter reaches most of the library's files, and parsing them is slow.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(name for name in found if name.split(".")[0] == "hyperion")


def _module_file(name: str) -> Path | None:
    base = _PACKAGE.joinpath(*name.split(".")[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _package_of(path: Path) -> str:
    return ".".join(["hyperion", *path.parent.relative_to(_PACKAGE).parts])
