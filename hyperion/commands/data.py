"""`hyperion data`: is what lies in the data folders what was put there?"""

from pathlib import Path

from hyperion.data.prepare import verify
from hyperion.terminal import say


def print_verdicts(folder: Path | None) -> int:
    """Print what is sound and what is not, its source and whether it is official, where the damaged went and what to do.

    Returns:
        1 when something is damaged, else 0.
    """
    verdicts = verify(folder)
    for verdict in verdicts:
        say(f"{'damaged' if verdict.findings else 'ok':<8}{verdict.folder}")
        if verdict.origin:
            say(f"        {verdict.origin}")
        for finding in verdict.findings:
            say(f"        {finding.file}: {finding.fault}")
        if verdict.kept is not None:
            say(f"        moved to {verdict.kept}, nothing was deleted")
        if verdict.next_step:
            say(f"        next:  {verdict.next_step}")
    damaged = sum(bool(verdict.findings) for verdict in verdicts)
    say(f"{len(verdicts)} data sets, {damaged} damaged" if verdicts else "nothing is prepared or staged yet")
    return 1 if damaged else 0
