"""The worker's side of a Job: `python -m hyperion.processes.worker REQUEST ANSWER`."""

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.results.files import write_atomically

_PR_SET_PDEATHSIG = 1


def main(request_file: str, answer_file: str) -> None:
    """Do the request, write the answer whole or not at all."""
    request = json.loads(Path(request_file).read_text())
    die_with(request["launcher"])
    module, function = request["entry"].split(":")
    try:
        answer = getattr(importlib.import_module(module), function)(**request["params"])
    except HyperionError as error:
        write_atomically(Path(answer_file), json.dumps({"error": error.as_dict()}).encode())
        sys.exit(error.exit_code)
    write_atomically(Path(answer_file), json.dumps({"answer": answer}).encode())


def die_with(launcher: int) -> None:
    """Ask Linux for a SIGTERM when the launcher ends, however it ends; if it already has, stop here."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("the launcher ended before the worker began")


if __name__ == "__main__":
    main(*sys.argv[1:])
