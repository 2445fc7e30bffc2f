"""A check of operators that ends its process. This module imports no torch, so that the processes start fast."""

import json
import os


def check(names, formats, samples, probes, compiled, seed, file, threads):
    """Like `check_operators`, but with operators that fail.

    "boom" ends the process, "bad" is wrong, and "crash at exit" ends the process after its outcome.
    """
    for name in names:
        if name == "boom":
            os._exit(7)
        ratio = 3.0 if name == "bad" else 0.1
        one = {"entry": name, "mode": "eager", "status": "failed" if ratio > 1 else "passed", "ratio": ratio, "samples": 1}
        outcomes = [one | {"dtype": dtype, "pass": which} for dtype in formats for which in ("forward", "backward")]
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps([name, outcomes]) + "\n")
    if names[-1] == "crash at exit":
        os._exit(7)
    return {"unavailable": ""}
