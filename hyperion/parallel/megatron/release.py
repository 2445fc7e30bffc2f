"""The release of megatron-core that this library uses, and the changes that let it run without CUDA.

The changes are listed in `adaptation.toml`, with the hash of the published text of each changed file. With this hash, a file is
recognized as published, adapted, or foreign (any other text). A foreign file is refused.
"""

import contextlib
import functools
import hashlib
import shutil
import sys
import tempfile
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.paths import data_folder
from hyperion.results.files import write_atomically

VERSION = "0.16.1"
# Tag core_v0.16.1 of github.com/NVIDIA/Megatron-LM. The Python files of the package are byte-identical to those of the tag.
COMMIT = "55ac7082517c3878ae653c07c09c534b8aed49f6"
INSTALL = "hyperion frameworks install megatron-core"
PUBLISHED, ADAPTED, FOREIGN = "published", "adapted", "foreign"
_CHANGES = Path(__file__).with_name("adaptation.toml")
# Regular expressions of expected warnings, which every rank would print. They announce fallbacks that this library wants, give
# advice for CUDA, or report deprecated PyTorch functions that the release calls.
_EXPECTED_WARNINGS = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "When using async grad allreduce it is recommended to set .*CUDA_DEVICE_MAX_CONNECTIONS",
    "`load_state_dict` is deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
    "Please use DTensor instead",
)


@dataclass(frozen=True)
class Replacement:
    """Replacement of a text at all its occurrences in a file.

    Args:
        old, new: the old text and the new text.
        times: how often `old` occurs in the file.
    """

    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Change:
    """The changes to one file.

    Args:
        file: path of the file inside the folder `megatron/core`.
        sha256: hash of the published file; "" for a file that the adaptation adds.
        reason: why the file must change.
        replace: the replacements, in order. For an added file, one replacement whose `new` is the whole text.
    """

    file: str
    sha256: str
    reason: str
    replace: tuple[Replacement, ...]

    def apply(self, text: str) -> str:
        """Apply the replacements to the published text, and return the adapted text.

        Raises:
            HyperionError: a text to replace does not occur as often as it should.
        """
        if not self.sha256:
            return self.replace[0].new
        for part in self.replace:
            if (found := text.count(part.old)) != part.times:
                raise HyperionError(
                    f"{part.old!r:.80} occurs {found} times instead of {part.times} times",
                    where=f"{self.file} in {_CHANGES.name}",
                    next_step="correct the change: it belongs to another release",
                )
            text = text.replace(part.old, part.new)
        return text

    def state(self, text: str | None) -> str:
        """Return "published", "adapted" or "foreign" for the text of a file. A file that does not exist has the text None."""
        if not self.sha256:
            return PUBLISHED if text is None else ADAPTED if text == self.replace[0].new else FOREIGN
        if text is None:
            return FOREIGN
        if _sha256(text) == self.sha256:
            return PUBLISHED
        return ADAPTED if self.revert(text) is not None else FOREIGN

    def revert(self, text: str) -> str | None:
        """Return the published text for an adapted text, or None if the given text is not the adapted text."""
        published = text
        for part in reversed(self.replace):
            if published.count(part.new) < part.times:
                return None
            published = published.replace(part.new, part.old)
        return published if _sha256(published) == self.sha256 and self.apply(published) == text else None


@functools.cache
def changes() -> tuple[Change, ...]:
    """Return the changes of the adaptation."""
    tables = tomllib.loads(_CHANGES.read_text("utf-8"))["change"]
    return tuple(
        Change(table["file"], table["sha256"], table["reason"], tuple(Replacement(**part) for part in table["replace"]))
        for table in tables
    )


def states(core: Path) -> dict[str, str]:
    """Return the state of each file that the adaptation changes: "published", "adapted" or "foreign".

    Args:
        core: a folder `megatron/core`.
    """
    return {change.file: change.state(_read(core / change.file)) for change in changes()}


def adapt(core: Path, *, revert: bool = False) -> list[str]:
    """Apply the adaptation to a folder `megatron/core`, or revert it. Files that are already in the wanted state are left alone.

    Args:
        core: the folder.
        revert: if True, restore the published bytes.

    Returns:
        The names of the files that were written or deleted.

    Raises:
        HyperionError: the folder is of another release, or a file is neither as published nor adapted. No file is changed then.
    """
    require_release(core)
    found = states(core)
    if foreign := sorted(name for name, state in found.items() if state == FOREIGN):
        environments = data_folder() / "frameworks"
        raise HyperionError(
            f"neither the published nor the adapted text: {', '.join(foreign)}",
            where=str(core),
            next_step=f"restore the published files, or remove the environment in {environments} and run `{INSTALL}`",
        )
    done = []
    for change in changes():
        if found[change.file] == (PUBLISHED if revert else ADAPTED):
            continue
        path = core / change.file
        if revert and not change.sha256:
            path.unlink()
        else:
            text = _read(path) or ""
            write_atomically(path, ((change.revert(text) or "") if revert else change.apply(text)).encode())
        done.append(change.file)
    return done


def find_release() -> Path:
    """Return the folder `megatron/core` of the installed release.

    The package may be installed for this Python, or by `hyperion frameworks install megatron-core` in an environment of its own.

    Raises:
        HyperionError: the package is not installed, or has another version.
    """
    # Skip the adapted copies: this process may have put one of them on sys.path.
    folders = [Path(entry) / "megatron" / "core" for entry in sys.path if entry and not Path(entry).is_relative_to(copies_root())]
    frameworks = data_folder() / "frameworks"
    folders += sorted(frameworks.glob("megatron-core-*/lib/python*/site-packages/megatron/core"))
    found = [folder for folder in folders if (folder / "package_info.py").is_file()]
    if not found:
        raise HyperionError("megatron-core is not installed", where="hyperion/parallel/megatron", next_step=INSTALL)
    for folder in found:
        with contextlib.suppress(HyperionError):
            require_release(folder)
            return folder
    # None has the right version. Report the one that this Python would import.
    require_release(found[0])
    return found[0]


def why_unavailable() -> str:
    """Return why megatron-core cannot be used, with the command that installs it, or "" if it can be used."""
    try:
        find_release()
    except HyperionError as error:
        return f"unavailable: {error.what}; next step: {error.next_step}"
    return ""


def require_release(core: Path) -> None:
    """Check that a folder `megatron/core` has the version that this library uses.

    Raises:
        HyperionError: the folder has another version, or it is not a folder `megatron/core`.
    """
    text = _read(core / "package_info.py")
    if text is None:
        raise HyperionError(f"{core} is no folder of megatron-core", where="package_info.py is missing", next_step=INSTALL)
    parts = dict(line.split(" = ", 1) for line in text.splitlines() if line.startswith(("MAJOR", "MINOR", "PATCH")))
    version = ".".join(parts.get(name, "?").strip() for name in ("MAJOR", "MINOR", "PATCH"))
    if version != VERSION:
        raise HyperionError(
            f"megatron-core {version} is installed, but the adaptation is for {VERSION}", where=str(core), next_step=INSTALL
        )


def copies_root() -> Path:
    """Return the folder with the adapted copies."""
    return data_folder() / "frameworks" / "adapted"


def adapted_copy() -> Path:
    """Return a folder with an adapted copy of the installed release, for `sys.path`. The installed package is not changed.

    Raises:
        HyperionError: see `find_release` and `adapt`.
    """
    release = find_release()
    key = hashlib.sha256(_CHANGES.read_bytes() + str(release).encode()).hexdigest()[:12]
    folder = copies_root() / f"megatron-core-{VERSION}-{key}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".megatron-", dir=folder.parent) as temporary:
            work = Path(temporary) / "copy"
            copy = work / "megatron" / "core"
            shutil.copytree(release, copy, ignore=lambda at, names: [name for name in names if not _copied(Path(at) / name)])
            # The installed package may have been adapted in place. `adapt` accepts that.
            adapt(copy)
            with contextlib.suppress(OSError):  # another process was faster
                work.rename(folder)
    return folder


def use_adapted() -> Path:
    """Make `import megatron.core` import the adapted copy in this process, and return its folder.

    Raises:
        HyperionError: this process has already imported another copy, or `adapted_copy` raised an error.
    """
    folder = adapted_copy()
    loaded = getattr(sys.modules.get("megatron.core"), "__file__", None)
    if loaded is not None and not Path(loaded).is_relative_to(folder):
        raise HyperionError(
            f"this process has imported {loaded}", where="hyperion/parallel/megatron", next_step="start a fresh process"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return folder


def _copied(path: Path) -> bool:
    return path.is_dir() and path.name != "__pycache__" or path.suffix == ".py"


def _read(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8") if path.is_file() else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
