"""The command `hyperion env`: fingerprint, environment variables, and ways to install PyTorch on this machine."""

import itertools
import json
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hyperion.commands.console import console
from hyperion.errors import HyperionError
from hyperion.terminal import say

if TYPE_CHECKING:
    from hyperion.hardware import MachineFacts
    from hyperion.install.assignments import Assignment


def env(
    lint: Annotated[
        bool, typer.Option("--lint", help="Check environment variables: who reads them, harmful values, contradictions.")
    ] = False,
    files: Annotated[
        list[Path] | None, typer.Argument(help="With --lint: scripts, Dockerfiles or Python files.", show_default="this process")
    ] = None,
    variables: Annotated[bool, typer.Option("--variables", help="List the known variables, their readers and effects.")] = False,
    generate: Annotated[
        str | None, typer.Option(help="Print the few settings that this machine needs, for bash, zsh or fish.")
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Say how PyTorch can be installed for this driver and GPU.")] = False,
) -> None:
    """Print this machine's fingerprint (versions, devices, driver) as it is stored in run.json, and the links between its GPUs.

    The exit code is 2 if this torch is too old or is not built for the GPU of this machine. The message names the cause.

    With --lint: the exit code is 1 if a variable is set that nothing reads, that does harm, or that contradicts another one. It
    is 2 if a file cannot be read; the other files are checked nevertheless.
    Shell scripts, Dockerfiles and Python files are read. Several files are also compared with each other.
    """
    if files and not lint:
        raise HyperionError("files are given without --lint", next_step=f"hyperion env --lint {' '.join(map(str, files))}")
    if lint:
        raise typer.Exit(_print_lint(files or []))
    if variables:
        _print_variables()
    elif generate is not None:
        from hyperion.doctor.state import machine_settings
        from hyperion.install.variables import as_script

        print(as_script(machine_settings(), generate), end="")
    elif install:
        _print_advice()
    else:
        from hyperion.doctor.checks import require_torch_build
        from hyperion.hardware import collect_facts, fingerprint

        facts = collect_facts()
        say(json.dumps(fingerprint(facts) | {"links": _links(facts)}, indent=1, sort_keys=True))
        # Checked after the fingerprint is printed, because the fingerprint helps the user to correct a wrong build.
        require_torch_build()


def _links(facts: "MachineFacts") -> dict:
    """Return the links between the GPUs that torch can use, as JSON values. The key "0 to 1" means from GPU 0 to GPU 1."""
    from hyperion.hardware import detect
    from hyperion.hardware.topology import topology_of

    if not facts.gpus:
        return {"between": {}, "source": "torch sees no GPU"}
    topology = topology_of([detect(facts, index) for index in range(len(facts.gpus))])
    return {
        "between": {f"{one} to {other}": link for (one, other), link in topology.links.items()},
        "meanings": topology.meanings,
        "numa_nodes": topology.numa_nodes,
        "source": topology.source,
    }


def _print_lint(files: list[Path]) -> int:
    """Print the linter's findings about the files or, without files, about the environment of this process.

    Each file is checked alone, and then all files together for contradictions between them. Return 2 if a file cannot be read,
    1 if there is a finding other than 'unknown here', else 0.
    """
    from hyperion.install.assignments import Assignment, read_assignments
    from hyperion.install.variables import lint

    here = [Assignment(name, value) for name, value in sorted(os.environ.items())]
    sources, unread = ({}, []) if files else ({"environment": here}, [])
    for file in files:
        try:
            sources[str(file)] = read_assignments(file)
        except HyperionError as error:
            unread.append(error)
    site_packages = Path(sysconfig.get_paths()["purelib"])
    found = [(place, finding) for place, assignments in sources.items() for finding in lint(assignments, site_packages)]
    known = {finding for _, finding in found}
    # A file with several values of a variable, for example one for each of its commands, does not contradict other files.
    for finding in lint(itertools.chain.from_iterable(map(_single_values, sources.values()))):
        if finding.kind == "contradiction" and finding not in known:
            found.append((", ".join(sources), finding))
    for place, finding in found:
        say(f"{place}: {finding.kind}: {finding.what}")
        say(f"  next:  {finding.instead}")
    count = sum(finding.kind != "unknown here" for _, finding in found)
    settings = sum(one.value is not None for assignments in sources.values() for one in assignments)
    say(f"findings: {count}, in {settings} settings")
    for error in unread:
        say(f"not checked: {error}")
    return 2 if unread else int(count > 0)


def _single_values(assignments: "Iterable[Assignment]") -> list[tuple[str, str]]:
    """Return the variables that have only one value in a file, with this value."""
    values: dict[str, set[str]] = {}
    for one in assignments:
        if one.value is not None:
            values.setdefault(one.name, set()).add(one.value)
    return [(name, found.pop()) for name, found in values.items() if len(found) == 1]


def _print_variables() -> None:
    """Print the registry of environment variables: what reads each variable, its effect, and the source that proves both."""
    from hyperion.install.variables import fictional, registry

    table = Table("variable", "read by", "effect", "source", pad_edge=False)
    for one in registry().values():
        table.add_row(one.name, one.readers, one.effect, one.source)
    for name, instead in fictional().items():
        table.add_row(name, "[red]nothing[/]", f"use {instead}", "")
    console().print(table)


def _print_advice() -> None:
    """Print the ways to install PyTorch on this machine, how well its GPUs are supported, and the vendor's training images."""
    from hyperion.install.advice import advise, support_of, training_images
    from hyperion.install.machine import collect_facts

    facts = collect_facts()
    for arch in sorted(set(facts.amd_archs)):
        support = support_of(arch)
        say(f"{arch}: {support.level}, {'in' if support.wheel else 'not in'} PyTorch's wheels ({support.evidence})")
    for way in advise(facts):
        say(f"{way.kind:<9} {way.verdict:<11} {way.why}")
        if way.command:
            say(f"          {way.command}")
    for image in training_images(facts.amd_archs):
        age = "" if image.runs_hyperion else ", which are too old for Hyperion"
        versions = f"ROCm {image.rocm}, torch {image.torch} and Python {image.python}{age}"
        say(f"image     documented  {image.name} for {image.products}: {versions}; {image.source}, {image.date}")
        say(f"          optimised for pre-training: {', '.join(image.pretraining)}")
        say(f"          optimised for fine-tuning: {', '.join(image.finetuning)}")
