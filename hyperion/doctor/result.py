"""What a check found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckResult:
    """One finding.

    Args:
        id: the check's name, stable for scripts.
        status: 'ok'; 'warn' (works, with a consequence to know); 'fail' (must be put right); 'skip' (does not apply).
        evidence: what was seen.
        remedy: the next step where status is 'warn' or 'fail', else empty.
    """

    id: str
    status: Literal["ok", "warn", "fail", "skip"]
    evidence: str
    remedy: str = ""
