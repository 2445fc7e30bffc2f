"""What a result was measured with: versions, devices, system and the library's own source, without paths or names."""

import hashlib
import subprocess
from pathlib import Path

import hyperion
from hyperion.hardware.facts import Facts, collect_facts
from hyperion.results.typed import from_json


def fingerprint(facts: Facts | None = None) -> dict:
    """The environment as a JSON-able dict. Host name and GPU UUIDs are hashed; no path and no user name occurs.

    Keys: python, torch, cuda, hip, driver, collectives (nccl or rccl), collective_settings (its environment variables),
    packages, os, kernel, machine, cpu, gpus, visible_devices, host_hash, source (hash, commit, modified).
    """
    content = (facts or collect_facts()).to_json()
    for gpu in content["gpus"]:
        gpu["uuid"] = gpu["uuid"] and hashlib.sha256(gpu["uuid"].encode()).hexdigest()[:12]
    content["source"] = {"hash": source_hash(), **git_state()}
    return content


def facts_of(content: dict, place: str = "fingerprint") -> Facts:
    """The facts behind a fingerprint, on any machine; UUIDs stay hashed.

    Args:
        content: what `fingerprint` returned, read back from JSON.
        place: its name in errors.

    Raises:
        HyperionError: names a field that is unknown, missing or of another type.
    """
    return from_json(Facts, {name: value for name, value in content.items() if name != "source"}, place)


def package_folder() -> Path:
    """The folder of the `hyperion` package that is running."""
    return Path(hyperion.__file__).resolve().parent


def source_hash(folder: Path | None = None) -> str:
    """sha256 over the names and contents of all .py and .toml files of the library, in sorted order."""
    folder = folder or package_folder()
    digest = hashlib.sha256()
    files = (*folder.rglob("*.py"), *folder.rglob("*.toml"))
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in files):
        content = file.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def git_state(root: Path | None = None, within: str = "hyperion") -> dict[str, str | bool | None]:
    """The commit of the checkout and whether what lies `within` it, the library, differs from it. Without git, the commit
    in a file SOURCE_COMMIT at the root; without that, None. Never fails."""
    root = root or package_folder().parent
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            changes = _git(root, "status", "--porcelain", "--", within)
            return {"commit": commit, "modified": None if changes is None else bool(changes)}
    try:
        stated = (root / "SOURCE_COMMIT").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        stated = ""
    return {"commit": stated or None, "modified": None}


def _git(root: Path, *arguments: str) -> str | None:
    """git's output, or None when git is missing, slow or unwilling (no commit yet, a checkout of another owner)."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
