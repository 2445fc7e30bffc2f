"""How a process is shown a single one of a machine's accelerators."""

from collections.abc import Mapping

from hyperion.hardware.device import Device
from hyperion.hardware.specs import lookup

# Where a variable names those that are visible. PyTorch prefers ROCm's own to CUDA's, which ROCm obeys too.
_VARIABLES = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def one_at_a_time(device: Device, count: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables that show a process one accelerator, for each that may work while the others do; none for a CPU.

    The two dies of an MI250X share the module's power: work on one slows the other, so that of each pair one counts.

    Args:
        device: the first.
        count: how many are visible.
        environment: may name those that are visible, by number or UUID.
    """
    variables = _VARIABLES.get(device.kind)
    if variables is None:
        return []
    named = next((environment[variable] for variable in variables if environment.get(variable)), "")
    names = [name.strip() for name in named.split(",")][:count] if named else [str(number) for number in range(count)]
    found, _ = lookup(device)
    if found is not None and "(one GCD)" in found.name:
        names = list({_module(place, name): name for place, name in reversed(list(enumerate(names)))}.values())[::-1]
    # All of them alike: whichever is read, it names the same one.
    return [dict.fromkeys(variables, name) for name in names]


def _module(place: int, name: str) -> int:
    """Which module a die belongs to: its own number tells, and without one its place among neighbours."""
    return (int(name) if name.isdecimal() else place) // 2
