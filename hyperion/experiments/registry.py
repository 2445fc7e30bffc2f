"""Every experiment by name. The name is that of the module it lives in."""

import importlib
import pkgutil

import hyperion.experiments
from hyperion.errors import HyperionError
from hyperion.experiments.context import Experiment


def experiment_names() -> list[str]:
    """The modules of this room that define an EXPERIMENT."""
    modules = (module.name for module in pkgutil.iter_modules(hyperion.experiments.__path__))
    return [name for name in modules if hasattr(importlib.import_module(f"hyperion.experiments.{name}"), "EXPERIMENT")]


def experiment_named(name: str) -> Experiment:
    """The experiment of a name.

    Raises:
        HyperionError: there is none; the message lists them.
    """
    if name not in experiment_names():
        raise HyperionError(f"no experiment {name!r}", next_step=f"use one of {', '.join(experiment_names())}")
    return importlib.import_module(f"hyperion.experiments.{name}").EXPERIMENT
