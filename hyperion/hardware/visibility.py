"""How a process is shown a single one of a machine's accelerators."""

from collections.abc import Mapping

from hyperion.hardware.device import Device
from hyperion.hardware.specs import lookup

# By the vendor's own variable: ROCm obeys CUDA's as well, which then counts what its own leaves visible.
_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def one_at_a_time(device: Device, count: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables that show a process one accelerator, for each that may work while the others do; none for a CPU.

    The two dies of an MI250X share the module's power: work on one slows the other, so that of each pair only the first counts.

    Args:
        device: the first.
        count: how many are visible.
        environment: may name those that are visible, by number or UUID.
    """
    variable = _VARIABLES.get(device.kind)
    if variable is None:
        return []
    named = [name for name in environment.get(variable, "").split(",") if name]
    names = named[:count] if len(named) >= count else [str(number) for number in range(count)]
    found, _ = lookup(device)
    paired = found is not None and "(one GCD)" in found.name
    return [{variable: name} for name in names[:: 2 if paired else 1]]
