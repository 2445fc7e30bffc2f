"""The worker process of a plain job: `python -m hyperion.processes.worker REQUEST ANSWER`."""

import json
import sys
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.processes.child_process import die_with, pin_to_cores
from hyperion.processes.job import load_entry
from hyperion.results.files import write_atomically


def main(request_file: str, answer_file: str) -> None:
    """Call the job's function and write its result, or its HyperionError, to the answer file."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    die_with(request["launcher"])
    pin_to_cores()
    try:
        answer = load_entry(request["entry"])(**request["params"])
    except HyperionError as error:
        write_atomically(Path(answer_file), json.dumps({"error": error.as_dict()}).encode())
        sys.exit(error.exit_code)
    write_atomically(Path(answer_file), json.dumps({"answer": answer}).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
