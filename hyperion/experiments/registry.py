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
    """The experiment of a name; no other module is imported for it.

    Raises:
        HyperionError: there is none; the message lists them.
    """
    modules = {module.name for module in pkgutil.iter_modules(hyperion.experiments.__path__)}
    chosen = importlib.import_module(f"hyperion.experiments.{name}") if name in modules else None
    if not hasattr(chosen, "EXPERIMENT"):
        raise HyperionError(f"no experiment {name!r}", next_step=f"use one of {', '.join(experiment_names())}")
    return chosen.EXPERIMENT
