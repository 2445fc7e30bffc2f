"""Claims of the chapter about quantised weights and decoding: pairs of whether a claim holds, and the sentence that says why not.

A claim about a row that is missing, or whose value was refused, does not hold. A scheme that cannot run here makes no claim.
"""

from collections.abc import Iterable, Sequence

from hyperion.errors import not_none
from hyperion.results import Row

Claim = tuple[bool, str]
# The bar of decoding is about models whose weights are far larger than the last-level cache.
LARGE_BYTES, SHARE_OF_BANDWIDTH = 5e9, 0.7
# An 8-bit format may change perplexity by at most this share, a 4-bit format by at most that.
EIGHT_BITS, FOUR_BITS = 0.01, 0.15
_BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4}


def byte_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that every byte count equals the one computed from the format, and that a format has its bits."""
    claims = []
    for row in _known(rows, "weight_bytes"):
        claims.append((row.check_error == 0, f"{row.variant}: {row.value:g} bytes, computed {row.predicted}"))
    return claims or [(False, "no row of weight_bytes has a value")]


def error_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that no element of a quantised layer is beyond its bound."""
    found = _known(rows, "relative_difference")
    claims = [
        (
            not_none(row.check_error) <= not_none(row.check_tolerance),
            f"{row.variant}, {row.params['what']}: {row.check_error:.3g} of its bound",
        )
        for row in found
    ]
    return claims or [(False, "no row of relative_difference has a value")]


def quality_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that 8-bit weights change perplexity by at most 1 %, and that 4-bit weights change it by at most 15 %."""
    claims = []
    for row in _known(rows, "perplexity_ratio"):
        allowed = EIGHT_BITS if _BITS[row.dtype] == 8 else FOUR_BITS
        value = f"{row.value:.4f} ({row.ci_low:.4f} to {row.ci_high:.4f})"
        claims.append((not_none(row.ci_low) <= 1 + allowed, f"{row.variant}: perplexity ratio {value}, allowed {1 + allowed}"))
    return claims or [(False, "no row of perplexity_ratio has a value")]


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claim that the best decode of a large original model reaches `SHARE_OF_BANDWIDTH` of a copy's bandwidth.

    Without a large model, as on a CPU, there is no such claim.
    """
    claims = []
    large = {row.params["model"] for row in _known(rows, "weight_bytes") if not_none(row.value) >= LARGE_BYTES}
    for model in sorted(large):
        found = [row for row in rows if row.metric == "decode_bandwidth_share" and row.variant == "original"]
        shares = [not_none(row.value) for row in found if row.params["model"] == model and row.value is not None]
        best = max(shares, default=0.0)
        claims.append((best >= SHARE_OF_BANDWIDTH, f"{model}: {best:.3f} of the bandwidth, expected {SHARE_OF_BANDWIDTH}"))
    return claims


def training_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that every variant lowers the held-out loss, and that the base weights did not change."""
    claims = []
    losses: dict[str, dict[int, float]] = {}
    for row in _known(rows, "validation_loss"):
        losses.setdefault(row.variant, {})[row.params["step"]] = not_none(row.value)
    for variant, by_step in losses.items():
        before, after = by_step[min(by_step)], by_step[max(by_step)]
        claims.append((after < before, f"{variant}: held-out loss {before:.4f} before and {after:.4f} after the training"))
    unchanged = [row for row in _known(rows, "relative_difference") if row.params["what"] == "base weights after training"]
    claims += [(row.value == 0, f"{row.variant}: the base weights changed") for row in unchanged]
    return claims or [(False, "no variant was trained")]


def _known(rows: Iterable[Row], metric: str) -> list[Row]:
    return [row for row in rows if row.metric == metric and (row.value is not None or row.is_unexpected)]
