"""Start a module in a new interpreter."""

import subprocess
from typing import IO


def start(
    python: str,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    stdout: int | IO = subprocess.PIPE,
    new_session: bool = False,
    folder: str | None = None,
) -> subprocess.Popen[str]:
    """Start `python -m module arguments` with stdout and stderr in one stream and an empty stdin.

    Args:
        stdout: a file, or subprocess.PIPE for text that `.stdout` of the result reads.
        new_session: make it the leader of a new session and process group.
        folder: its working directory, by default the one of this process.
    """
    return subprocess.Popen(
        [python, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=new_session,
        cwd=folder,
    )
