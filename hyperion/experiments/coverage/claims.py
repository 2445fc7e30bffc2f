"""Claims about operators and architectures: pairs (True if the claim holds, sentence to print if it does not hold)."""

from collections.abc import Sequence

from hyperion.experiments.coverage.figures import gaps, steps_of
from hyperion.results import Row

Claim = tuple[bool, str]
FEWEST_OPERATORS, FEWEST_ARCHITECTURES = 80, 20


def operator_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that no operator fails for an unknown reason, and that in each format at least 80 pass, both forward and backward.

    PyTorch's operator database needs additional packages. If one is not installed, the rows have no values, and there are no
    claims.
    """
    failed = [line for line in gaps(rows) if line["status"] == "failed"]
    claims = [(False, f"{line['operator']}, {line['dtype']}, {line['pass']}: {line['reason']}") for line in failed]
    counts = [row for row in rows if row.metric == "count" and row.params.get("what") == "passed"]
    claims += [
        (
            row.value is not None and row.value >= FEWEST_OPERATORS,
            f"only {row.value} operators pass: {row.dtype}, {row.params['pass']} {row.value_reason or ''}".rstrip(),
        )
        for row in counts
        if row.value is not None or "not installed" not in (row.value_reason or "")
    ]
    return claims if counts else [*claims, (False, "no operator was checked")]


def architecture_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that no architecture fails, and that at least 20 architectures pass every step."""
    failed = [line for line in steps_of(rows) if line["result"].startswith("failed")]
    claims = [(False, f"{line['architecture']}, {line['step']}: {line['result']}") for line in failed]
    claims += [(False, f"{row.variant}: {row.value_reason}") for row in rows if row.is_unexpected]
    passed = [row.value or 0 for row in rows if row.metric == "count" and row.params.get("what", "").startswith("pass")]
    return [*claims, (max(passed, default=0) >= FEWEST_ARCHITECTURES, f"{max(passed, default=0):g} architectures pass")]
