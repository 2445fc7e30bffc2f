"""Claims of the chapter on serving. A claim is a pair (True if the claim holds, sentence to print if it does not hold)."""

from collections.abc import Sequence

from hyperion.experiments.serving.metrics import GROWTH_CHECK
from hyperion.experiments.serving.server_soak import HANG_UPS
from hyperion.results import Row

Claim = tuple[bool, str]


def growth_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that the memory of a server grows by less than the bound of its row with each request.

    The upper end of the interval is compared with the bound. A row without this check is measured for comparison only.
    """
    claims = []
    for row in rows:
        if row.metric == "growth_bytes" and row.check == GROWTH_CHECK:
            above = f"{row.check_error:,.0f} bytes for each request, allowed {row.check_tolerance:,.0f}"
            held = row.value is not None and row.ci_high is not None and row.ci_high <= (row.check_tolerance or 0)
            claims.append((held, f"{row.params['backend']}, {row.variant}: {above}"))
    return claims


def hang_up_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that no row about clients that hang up lacks its value: the server stops generating, and frees the blocks."""
    return [(row.value is not None, f"{row.variant}: {row.value_reason}") for row in rows if row.variant == HANG_UPS]
