"""The house rules that a reader relies on: rooms build on earlier rooms only."""

import ast
from pathlib import Path

import pytest

import hyperion
from hyperion.dependencies import imported_modules

PACKAGE = Path(hyperion.__file__).resolve().parent
ROOMS = (
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
    "reproduce",
    "commands",
    "cli",
)
# For everybody: they import no room. `install` works before there is an environment: it needs Python alone.
GROUND = ("errors", "paths", "untrusted", "forms", "locks", "terminal", "compat", "dependencies", "units", "install")
ENTRANCES = ("__init__", "__main__")
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_earlier_rooms(path):
    room = name_of(path)
    if room in ENTRANCES:
        return
    package = ".".join(["hyperion", *path.parent.relative_to(PACKAGE).parts])
    used = {room_of(module) for module in imported_modules(path.read_text(), package)} - {"", room, *GROUND}
    used = {name for name in used if name in ROOMS or (PACKAGE / name).is_dir()}
    allowed = set() if room in GROUND else set(ROOMS[: ROOMS.index(room)])
    assert used <= allowed, f"{room} may not import {sorted(used - allowed)}"


def test_every_room_has_its_place():
    rooms = {name_of(path) for path in FILES} - {*ENTRANCES, *GROUND}
    assert rooms <= set(ROOMS), "name the new room's place in ROOMS"


def test_results_and_book_know_no_torch():
    for path in (path for path in FILES if name_of(path) in ("results", "figures", "book", "errors", "paths", "cli")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path
