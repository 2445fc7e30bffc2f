"""Pack the results of a folder into one zip file: result files, logs, events, and the comparison."""

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.frameworks.comparison import load_results
from hyperion.frameworks.logs import LARGEST_LOG_BYTES
from hyperion.frameworks.progress import EVENTS, read_events
from hyperion.paths import flush
from hyperion.untrusted import read_bounded

SUMS = "SHA256SUMS"


def write_archive(folder: Path, output: Path, comparison: list[str]) -> list[str]:
    """Write a zip file atomically, and return the names of its files. `sha256sum -c SHA256SUMS` checks an unpacked archive.

    Args:
        folder: folder of the result files.
        output: the zip file. An existing file is never replaced.
        comparison: names of the files of the comparison, which are packed if they exist.

    Raises:
        HyperionError: there is no result file, a result file or the event log is invalid, or `output` exists.
    """
    load_results(folder)
    if (folder / EVENTS).exists():
        read_events(folder / EVENTS)
    patterns = ("train_*.json", "logs/*.log", EVENTS, *comparison)
    names = [path.relative_to(folder).as_posix() for pattern in patterns for path in sorted(folder.glob(pattern))]
    sums = ""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.", suffix=".tmp") as temporary:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                content = read_bounded(folder / name, HyperionError, "move the file away", LARGEST_LOG_BYTES)
                archive.writestr(name, content)
                sums += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
            archive.writestr(SUMS, sums)
        temporary.flush()
        os.fchmod(temporary.fileno(), 0o644)  # temporary files are private
        os.fsync(temporary.fileno())
        try:
            os.link(temporary.name, output)  # fails if `output` exists, unlike a rename
        except FileExistsError:
            next_step = "give another name: hyperion frameworks archive OUTPUT"
            raise HyperionError("the file exists and is not replaced", where=output, next_step=next_step) from None
    flush(output.parent)
    return [*names, SUMS]
