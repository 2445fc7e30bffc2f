"""Settings of the communication library (NCCL, RCCL) in the environment: they decide what a collective can reach."""

import hashlib
import re
import socket
from collections.abc import Mapping

_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_")
# Of other libraries, but they turn off the same in-switch reductions.
_BESIDE = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
_NAMES_A_HOST = ("NCCL_COMM_ID", "NCCL_HOSTID")
# Switches, numbers, sizes, names of algorithms, links and adapters; a path has other characters.
_PLAIN = re.compile(r"[\w.,:;^=+ -]*", re.ASCII)
_ADDRESS = re.compile(r"\d+(\.\d+){3}|[0-9a-fA-F]*::")


def collective_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """The settings among environment variables, by name. A value that may tell a path, a host or an address is hashed, so
    that rows can be published and two runs still be told apart.
    """
    names = sorted(name for name in variables if name.startswith(_PREFIXES) or name in _BESIDE)
    return {name: _hashed(variables[name]) if _private(name, variables[name]) else variables[name] for name in names}


def _private(name: str, value: str) -> bool:
    if name in _NAMES_A_HOST or not _PLAIN.fullmatch(value) or _ADDRESS.search(value):
        return True
    host = re.escape(socket.gethostname().partition(".")[0])
    return bool(host and re.search(rf"(?<![A-Za-z0-9]){host}(?![A-Za-z0-9])", value, re.IGNORECASE))


def _hashed(value: str) -> str:
    return f"hidden (sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:12]})"
