"""Frameworks that this library does not install: Primus, Megatron-DeepSpeed and NeMo, detected by their entry points.

Each of them has its own Trainer, which reads data in its own format. Their runs cannot be observed yet. So a framework is
reported as unavailable with this reason, even if it is found. Nothing else is trained in its place.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperion.paths import expanded


@dataclass(frozen=True)
class Entry:
    """Location of a framework's entry point.

    Args:
        variable: environment variable that contains the path of the source folder, or "" for an installed package.
        files: files that identify the framework, relative to the source folder. The first one is the entry point.
        module: entry-point module of an installed package.
        source: how to obtain the framework, for the next step of an error.
        warning: note about another program with a similar name.
    """

    variable: str = ""
    files: tuple[str, ...] = ()
    module: str = ""
    source: str = ""
    warning: str = ""


ENTRIES = {
    "NeMo": Entry(module="nemo_automodel.recipes.llm.train_ft", source="install nemo-automodel in an environment of its own"),
    "Primus": Entry(
        "PRIMUS_PATH",
        ("primus/cli/main.py", "examples/run_pretrain.sh"),
        source="clone https://github.com/AMD-AGI/Primus and set PRIMUS_PATH to the folder",
        warning="the package `primus` of the package index is another program",
    ),
    "Megatron-DeepSpeed": Entry(
        "MEGATRON_DEEPSPEED_PATH",
        ("pretrain_gpt.py", "megatron/training.py"),
        source="clone https://github.com/deepspeedai/Megatron-DeepSpeed and set MEGATRON_DEEPSPEED_PATH to the folder",
    ),
}


def why_unavailable(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Return why a framework cannot take part in the comparison of observed runs, with the next step.

    Args:
        name: a key of `ENTRIES`.
        environment: environment variables. Defaults to those of this process.
    """
    entry = ENTRIES[name]
    what = entry.module or Path(entry.files[0]).as_posix()
    next_step = f"run {name} by itself; do not compare its speed before its work is known to be equal"
    found = f"unavailable: {what} of {name} was found, but a run of it is not observed yet; next step: {next_step}"
    return why_not_found(name, environment) or found


def why_not_found(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Return why the entry point of a framework is not found, with the next step, or "" if it is.

    Args:
        name: a key of `ENTRIES`.
        environment: environment variables. Defaults to those of this process.
    """
    entry, variables = ENTRIES[name], os.environ if environment is None else environment
    if entry.module:
        absent = f"unavailable: the module {entry.module} is not installed; next step: {entry.source}"
        return "" if _is_found(entry.module) else absent
    warning = f" ({entry.warning})" if entry.warning else ""
    if not (named := variables.get(entry.variable, "")):
        return f"unavailable: {entry.variable} is not set{warning}; next step: {entry.source}"
    missing = [file for file in entry.files if not (expanded(named) / file).is_file()]
    if missing:
        return f"unavailable: {entry.variable} names {named}, which lacks {', '.join(missing)}; next step: {entry.source}"
    return ""


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing or broken
        return False
