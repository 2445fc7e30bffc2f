"""One rank's side of a Job: `python -m hyperion.processes.rank_worker FOLDER`, started by torchrun."""

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.processes.group import process_group
from hyperion.processes.worker import die_with
from hyperion.results.files import write_atomically

_GRACE_S = 20.0


def main(folder: str) -> None:
    """Join the group, do the request, write this rank's answer, or its error with the time at which it came."""
    request = json.loads((Path(folder) / "request.json").read_text())
    rank = int(os.environ["RANK"])
    _write_to_own_log(Path(folder), rank)
    die_with(os.getppid())
    threading.Thread(target=_leave_with, args=(request["launcher"],), daemon=True).start()
    # The launcher asks with this signal where the rank stands, before it ends a job that ran out of time.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    with process_group(request["timeout_s"]):
        told = _answer(request)
        # Before the group is left: a peer that fails because of this rank must not seem to have failed first.
        write_atomically(Path(folder) / f"answer-{rank}.json", json.dumps(told).encode())
    sys.exit(told.get("code", 0))


def _answer(request: dict) -> dict:
    module, function = request["entry"].split(":")
    try:
        return {"answer": getattr(importlib.import_module(module), function)(**request["params"])}
    except HyperionError as error:
        return {"error": error.as_dict(), "time": time.time(), "code": error.exit_code}
    except Exception:
        return {"traceback": traceback.format_exc(), "time": time.time(), "code": 1}


def _write_to_own_log(folder: Path, rank: int) -> None:
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _leave_with(launcher: int) -> None:
    """torchrun stands between this rank and the launcher, and does not notice when the launcher is killed."""
    while True:
        time.sleep(1.0)
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_GRACE_S)
            os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
