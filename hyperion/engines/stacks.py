"""The frameworks of the comparison: for each, its adapter, options, number of ranks and required packages."""

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from hyperion.engines.environments import ENVIRONMENTS, installed_python, why_not_installed
from hyperion.engines.external import ENTRIES, why_unavailable
from hyperion.errors import HyperionError

UNAVAILABLE = 3  # exit code of a command whose framework is unavailable


@dataclass(frozen=True)
class Stack:
    """A framework and its variant.

    Args:
        name: name in rows and commands, such as "deepspeed zero-1".
        adapter: name of a module with a function `train(work, observer, **options)`, or "" for a framework in
            `hyperion.engines.external`. The module is not imported here, because the packages that it imports may be installed
            only in the framework's own environment.
        packages: import names of the packages that the run must have imported by its end, as proof of what ran.
        ranks: number of ranks on a CPU, or on a machine with at least as many accelerators.
        options: further arguments of `train`.
        environment: name of the framework's own environment, or "" for the environment of this process.
    """

    name: str
    adapter: str
    packages: tuple[str, ...]
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    environment: str = ""

    def why_absent(self) -> str:
        """Return why this framework cannot run and the next step, or "" if it can run."""
        if not self.adapter:
            return why_unavailable(self.name)
        if self.environment:
            return why_not_installed(self.environment)
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not missing:
            return ""
        return f"unavailable: {', '.join(missing)} not installed; next step: install {' '.join(missing)}"

    def python(self) -> str:
        """Return the Python interpreter that runs this framework."""
        return installed_python(self.environment)


_MEGATRON, _MEGATRON_PACKAGES = "hyperion.engines.megatron_core", ("megatron.core",)
STACKS = {
    stack.name: stack
    for stack in (
        Stack("plain loop", "hyperion.engines.plain", ("transformers",)),
        Stack("hyperion", "hyperion.engines.hyperion_engine", ("hyperion.training",)),
        Stack("hyperion ddp", "hyperion.engines.hyperion_engine", ("hyperion.training",), 2, {"strategy": "ddp"}),
        Stack("hyperion fsdp2", "hyperion.engines.hyperion_engine", ("hyperion.training",), 2, {"strategy": "fsdp"}),
        Stack("HF Trainer", "hyperion.engines.hf_trainer", ("transformers", "accelerate")),
        Stack("accelerate", "hyperion.engines.accelerate_loop", ("accelerate",)),
        Stack("accelerate ddp", "hyperion.engines.accelerate_loop", ("accelerate",), 2),
        Stack("lightning fabric", "hyperion.engines.lightning_fabric_loop", ("lightning_fabric",), environment="fabric"),
        Stack("lightning fabric ddp", "hyperion.engines.lightning_fabric_loop", ("lightning_fabric",), 2, environment="fabric"),
        Stack("deepspeed zero-1", "hyperion.engines.deepspeed_zero", ("deepspeed",), 2, {"stage": 1}, "deepspeed"),
        Stack("deepspeed zero-2", "hyperion.engines.deepspeed_zero", ("deepspeed",), 2, {"stage": 2}, "deepspeed"),
        Stack("deepspeed zero-3", "hyperion.engines.deepspeed_zero", ("deepspeed",), 2, {"stage": 3}, "deepspeed"),
        Stack("torchtitan components", "hyperion.engines.torchtitan_components", ("torchtitan",), environment="torchtitan"),
        Stack("megatron-core", _MEGATRON, _MEGATRON_PACKAGES, environment="megatron-core"),
        Stack("megatron-core tp 2", _MEGATRON, _MEGATRON_PACKAGES, 2, {"tensor": 2}, "megatron-core"),
        Stack("megatron-core pp 2", _MEGATRON, _MEGATRON_PACKAGES, 2, {"pipeline": 2}, "megatron-core"),
        Stack("megatron-core dp 2", _MEGATRON, _MEGATRON_PACKAGES, 2, {"distributed_optimizer": True}, "megatron-core"),
        *(Stack(name, "", ()) for name in ENTRIES),
    )
}


def stack_named(name: str) -> Stack:
    """Return the stack with this name.

    Raises:
        HyperionError: no stack has this name. The message lists all stacks.
    """
    if name not in STACKS:
        raise HyperionError(
            f"no framework is named {name!r}", where="hyperion/engines/stacks.py", next_step=f"choose from {', '.join(STACKS)}"
        )
    return STACKS[name]


def environment_named(name: str) -> str:
    """Return the name unchanged if an environment has this name.

    Raises:
        HyperionError: no environment has this name. The message lists all environments.
    """
    if name not in ENVIRONMENTS:
        raise HyperionError(
            f"no framework environment is named {name!r}",
            where="hyperion/engines/environments.py",
            next_step=f"choose from {', '.join(ENVIRONMENTS)}",
        )
    return name
