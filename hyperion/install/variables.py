"""Environment variables: a registry with the readers of each, a linter for settings, and a minimal set of settings.

The registry is variables.toml. The linter names variables that nothing reads, values that do harm, and settings that contradict
each other. assignments.py reads the settings from files.
"""

import difflib
import functools
import mmap
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hyperion.errors import HyperionError
from hyperion.install.assignments import Assignment, Scope

# Prefixes of names whose readers the registry knows, and the libraries that read them. An unknown name with such a prefix is
# probably a mistake. Whether it is one can only be decided where one of these libraries is installed.
_FAMILIES = {
    "NCCL_": ("libnccl.so*", "librccl.so*"),
    "RCCL_": ("librccl.so*",),
    "TORCH_NCCL_": ("libtorch_cuda.so", "libtorch_hip.so"),
    "HSA_": ("libhsa-runtime64.so*",),
    "HIP_": ("libamdhip64.so*",),
    "ROCR_": ("libhsa-runtime64.so*",),
    "MIOPEN_": ("libMIOpen.so*",),
    "PYTORCH_": ("libc10.so",),
    "GPU_MAX_": ("libamdhip64.so*",),
}
_OWN = "HYPERION_"  # the registry knows all variables with this prefix, so no library needs to be searched
_FOLDERS = ("torch/lib", "nvidia/*/lib", "_rocm_sdk_*/lib")  # below site-packages
_FILES = ("torch/lib/lib*.so*", "nvidia/**/lib*.so*", "torch/cuda/*.py", "torch/utils/cpp_extension.py")
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Variable:
    """One environment variable with its readers and its effect.

    `source` and `files` are the evidence that the readers use the variable.
    """

    name: str
    readers: str
    effect: str
    source: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class VariableFinding:
    """One finding of the linter.

    Args:
        kind: 'unknown' (nothing reads the variable), 'unlisted' (its prefix is known, but neither the registry nor an installed
            library contains it), 'unknown here' (the same, but the libraries that could read it are not installed, so it may be
            right), 'harmful' or 'contradiction'.
        name: the variable.
        what: what is wrong, with the value.
        instead: what to do.
    """

    kind: Literal["unknown", "unlisted", "unknown here", "harmful", "contradiction"]
    name: str
    what: str
    instead: str


@dataclass(frozen=True)
class Setting:
    """One environment variable that a machine needs, with its value and the reason for it."""

    name: str
    value: str
    why: str


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("variables.toml").read_text(encoding="utf-8"))


@functools.cache
def registry() -> dict[str, Variable]:
    """Return the registry as a dict that maps the name of a variable to its entry."""
    variables = {}
    for reader in _tables()["reader"]:
        files = tuple(reader.get("files", ()))
        for name, entry in reader["variables"].items():
            effect, place = (entry, "") if isinstance(entry, str) else entry
            source = ": ".join(filter(None, (reader["source"], place)))
            variables[name] = Variable(name, reader["name"], effect, source, files)
    return variables


def fictional() -> dict[str, str]:
    """Return the variables that published guides recommend but that no program reads.

    The keys are the names. The values say what to use instead.
    """
    return _tables()["fiction"]


def lint(
    assignments: Iterable[Assignment | tuple[str, str]], site_packages: Path | None = None, system: Path = Path("/opt/rocm/lib")
) -> list[VariableFinding]:
    """Return the linter's findings about settings of environment variables.

    Two values of one variable in the same scope are a contradiction if a known library reads the variable, unless the variable
    is removed between them. A value that contains a `$` is known only at run time, and contradicts nothing.

    Args:
        assignments: settings in their order, as `read_assignments` returns them. A name may occur several times. Pairs of name
            and value have the scope ().
        site_packages: folder of the installed packages. If given, a name that neither the registry nor a library of these
            packages contains is a finding of kind 'unlisted' or 'unknown here'. If None, the libraries are not searched, and
            there are no such findings.
        system: folder of the libraries of ROCm, which are searched like those of the packages.
    """
    given = [one if isinstance(one, Assignment) else Assignment(*one) for one in assignments]
    findings = _repeated(given)
    for name, value in {one.name: one.value for one in given if one.value is not None}.items():
        if name in fictional():
            what = f"nothing reads {name}={value}"
            findings.append(VariableFinding("unknown", name, what, f"use {fictional()[name]}"))
        elif name.startswith(_OWN) and name not in registry():
            # Without the prefix, which would make all names similar.
            own = [one.removeprefix(_OWN) for one in registry() if one.startswith(_OWN)]
            similar = difflib.get_close_matches(name.removeprefix(_OWN), own, n=1)
            step = f"use {_OWN}{similar[0]}, or unset {name}" if similar else f"unset {name}; see `hyperion env --variables`"
            findings.append(VariableFinding("unknown", name, f"nothing reads {name}={value}", step))
        elif site_packages is not None:
            findings += _unlisted(name, site_packages, system)
        findings += [
            VariableFinding("harmful", name, f"{name}={value}: {entry['why']}", f"unset {name}")
            for entry in _tables()["harmful"]
            if re.fullmatch(entry["name"], name) and re.fullmatch(entry["value"], value)
        ]
    # Without repetitions: settings of the file also apply to each of its commands.
    return findings + list(dict.fromkeys(one for state in _states(given) for one in _opposed(state)))


def _repeated(given: Iterable[Assignment]) -> list[VariableFinding]:
    """Return the findings about variables that have two values in the same scope."""
    values: dict[tuple, dict[str, None]] = {}
    removals: Counter[tuple[Scope, str]] = Counter()
    for name, value, scope in given:
        if value is None:
            removals[scope, name] += 1
        elif "$" not in value and (name in registry() or name.startswith(tuple(_FAMILIES))):
            values.setdefault((name, scope, removals[scope, name]), {})[value] = None
    return [
        VariableFinding(
            "contradiction",
            name,
            f"{name} is set to {' and to '.join(map(repr, different))}",
            "keep one of them; the last one counts",
        )
        for (name, *_), different in values.items()
        if len(different) > 1
    ]


def _states(given: Iterable[Assignment]) -> list[dict[str, str]]:
    """Return the variables that are set together: at the end of the file, and in each of its commands and other scopes."""
    states: dict[Scope, dict[str, str]] = {(): {}}
    for name, value, scope in given:
        for length in range(1, len(scope) + 1):  # a scope begins with the settings of the scope around it
            states.setdefault(scope[:length], dict(states[scope[: length - 1]]))
        if value is None:
            states[scope].pop(name, None)
        else:
            states[scope][name] = value
    return list(states.values())


def _opposed(state: Mapping[str, str]) -> Iterator[VariableFinding]:
    """Yield the findings about pairs of variables that contradict each other."""
    for entry in _tables()["contradiction"]:
        if re.fullmatch(entry["value"], state.get(entry["name"], "\0")):
            for name, value in state.items():
                if re.fullmatch(entry["other"], name) and re.fullmatch(entry["other_value"], value):
                    what = f"{entry['name']}={state[entry['name']]} and {name}={value}: {entry['why']}"
                    yield VariableFinding("contradiction", name, what, f"unset {entry['name']} or {name}")
    hip, cuda = state.get("HIP_VISIBLE_DEVICES"), state.get("CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        what = f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda}: on ROCm the first counts, on CUDA the second"
        yield VariableFinding("contradiction", "HIP_VISIBLE_DEVICES", what, "set the same value")


def _unlisted(name: str, site_packages: Path, system: Path) -> list[VariableFinding]:
    """Return the finding about a name that has a known prefix, but is in neither the registry nor an installed library."""
    family = next((family for family in _FAMILIES if name.startswith(family)), None)
    if family is None or name in registry():
        return []
    files = [file for pattern in _FILES for file in site_packages.glob(pattern)]
    if any(contains_name(file, name) for file in (*files, *system.glob("lib*.so"))):
        return []
    step = "check its spelling in the documentation of its reader"
    folders = [folder for pattern in _FOLDERS for folder in site_packages.glob(pattern)] + [system]
    if any(any(folder.glob(pattern)) for folder in folders for pattern in _FAMILIES[family]):
        what = f"{name} is not in the registry, and no installed library contains this name"
        return [VariableFinding("unlisted", name, what, step)]
    readers = " or ".join(pattern.split(".")[0] for pattern in _FAMILIES[family])
    what = f"{name} is not in the registry, and {readers}, which could read it, is not installed"
    return [VariableFinding("unknown here", name, what, f"{step}, or lint on the machine that runs the program")]


def contains_name(file: Path, name: str) -> bool:
    """Return True if a file contains the name as a whole word, and not only as a part of longer names."""
    if not file.is_file() or file.stat().st_size == 0:
        return False
    part, place = name.encode(), -1
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # The libraries are gigabytes in size, and find() is ten times faster than a regular expression.
        while (place := content.find(part, place + 1)) >= 0:
            around = content[max(0, place - 1) : place] + content[place + len(part) : place + len(part) + 1]
            if not re.search(rb"[A-Z0-9_]", around):
                return True
    return False


def minimal_environment(cores: int, devices: int, node_local: Mapping[str, str] | None = None) -> list[Setting]:
    """Return the settings that this machine needs, each with its reason.

    The settings contain no variables of drivers or libraries, because the defaults of these variables are right.

    Args:
        cores: physical cores that the process may use.
        devices: number of GPUs, which is the number of ranks of a node.
        node_local: for each cache variable whose folder is on a network file system, a folder on this node.
    """
    settings = [Setting("PYTHONNOUSERSITE", "1", "packages of the user's site-packages are not mixed with this environment")]
    threads = max(1, cores // max(1, devices))
    if devices > 1:
        settings.append(Setting("OMP_NUM_THREADS", str(threads), f"{cores} cores / {devices} ranks; torchrun sets 1 otherwise"))
        settings.append(Setting("NCCL_DEBUG", "WARN", "NCCL and RCCL print the reason of an error, and nothing else"))
    for name, folder in (node_local or {}).items():
        settings.append(Setting(name, folder, "the default is on a network file system, which is slow with many ranks"))
    return settings


def as_script(settings: Iterable[Setting], shell: str) -> str:
    """Return the settings as commands of a shell. Values are quoted for this shell.

    Raises:
        HyperionError: the shell is unknown.
    """
    if shell not in SHELLS:
        raise HyperionError(f"unknown shell {shell!r}", next_step=f"use one of {', '.join(SHELLS)}")
    lines = []
    for one in settings:
        if shell == "fish":
            escaped = one.value.replace("\\", "\\\\").replace("'", "\\'")  # the only escapes in fish's single quotes
            command = f"set -gx {one.name} '{escaped}'"
        else:
            command = f"export {one.name}={shlex.quote(one.value)}"
        lines.append(f"# {one.why}\n{command}\n")
    return "".join(lines)
