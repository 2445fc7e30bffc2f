"""Claims of the chapter on inference about operators and architectures: pairs of whether it holds, and what is wrong if not."""

from collections.abc import Sequence

from hyperion.experiments.inference.figures_operators import gaps, steps_of
from hyperion.results import Row

Claim = tuple[bool, str]
FEWEST_OPERATORS, FEWEST_ARCHITECTURES = 80, 20


def operator_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that no operator fails for an unknown reason, and that at least 80 pass in each format and pass."""
    failed = [line for line in gaps(rows) if line["status"] == "failed"]
    claims = [(False, f"{line['operator']}, {line['dtype']}, {line['pass']}: {line['reason']}") for line in failed]
    counts = [row for row in rows if row.metric == "count" and row.params.get("what") == "passed"]
    claims += [
        ((row.value or 0) >= FEWEST_OPERATORS, f"only {row.value} operators pass: {row.dtype}, {row.params['pass']}")
        for row in counts
    ]
    return claims or [(False, "no operator was checked")]


def architecture_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that no architecture fails, and that at least 20 architectures pass every step."""
    failed = [line for line in steps_of(rows) if line["result"].startswith("failed")]
    claims = [(False, f"{line['architecture']}, {line['step']}: {line['result']}") for line in failed]
    claims += [(False, f"{row.variant}: {row.value_reason}") for row in rows if row.is_unexpected]
    passed = [row.value or 0 for row in rows if row.metric == "count" and row.params.get("what", "").startswith("pass")]
    return [*claims, (max(passed, default=0) >= FEWEST_ARCHITECTURES, f"{max(passed, default=0):g} architectures pass")]
