"""Devices: detection, data sheets, telemetry, machine fingerprints, and floors.

A floor is the smallest value that a healthy device must reach.
"""

from hyperion.hardware.device import DTYPES, PATHS, ROW_DTYPES, Device, HardwareError, canonical_dtype, fp8_format, gemm_path
from hyperion.hardware.facts import (
    GpuFacts,
    MachineFacts,
    collect_facts,
    detect,
    detect_cpu,
    facts_of,
    fingerprint,
    git_state,
    source_hash,
    torch_build,
)
from hyperion.hardware.floors import Floor, floors_for
from hyperion.hardware.specs import Peak, Specification, lookup, peak, specification
from hyperion.hardware.telemetry import Sampler, Telemetry, read

__all__ = [
    "DTYPES",
    "PATHS",
    "ROW_DTYPES",
    "Device",
    "Floor",
    "GpuFacts",
    "HardwareError",
    "MachineFacts",
    "Peak",
    "Sampler",
    "Specification",
    "Telemetry",
    "canonical_dtype",
    "collect_facts",
    "detect",
    "detect_cpu",
    "facts_of",
    "fingerprint",
    "floors_for",
    "fp8_format",
    "gemm_path",
    "git_state",
    "lookup",
    "peak",
    "read",
    "source_hash",
    "specification",
    "torch_build",
]
