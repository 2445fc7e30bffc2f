"""The worker's side of a Job: `python -m hyperion.processes.worker REQUEST ANSWER`."""

import json
import sys
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.processes.job import load_entry
from hyperion.processes.lifeline import die_with
from hyperion.processes.share import keep_to_share
from hyperion.results.files import write_atomically


def main(request_file: str, answer_file: str) -> None:
    """Do the request, write the answer whole or not at all."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    die_with(request["launcher"])
    keep_to_share()
    try:
        answer = load_entry(request["entry"])(**request["params"])
    except HyperionError as error:
        write_atomically(Path(answer_file), json.dumps({"error": error.as_dict()}).encode())
        sys.exit(error.exit_code)
    write_atomically(Path(answer_file), json.dumps({"answer": answer}).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
