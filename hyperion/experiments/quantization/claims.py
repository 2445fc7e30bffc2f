"""Claims about quantised weights, decoding, and training with few bits.

A claim is a pair (True if the claim holds, sentence to print if it does not hold). A claim does not hold if its row is missing or
has no value.
"""

from collections.abc import Iterable, Sequence

from hyperion.errors import not_none
from hyperion.results import Row

Claim = tuple[bool, str]
# The claim about decoding applies only to models whose weights are far larger than the last-level cache.
LARGE_BYTES, SHARE_OF_BANDWIDTH = 5e9, 0.7
# Largest rise of perplexity by an 8-bit format, and by a 4-bit format, for the upper end of its interval. The largest upper ends
# are 0.003 and 0.004, on an H100 and on two CPU cores.
EIGHT_BITS, FOUR_BITS = 0.01, 0.02
_BITS = {"int8": 8, "fp8": 8, "int4": 4, "nf4": 4}


def byte_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that every byte count equals the one computed from the number format."""
    found = _known(rows, "weight_bytes")
    claims = []
    for row in found:
        fault = row.value_reason if row.check_error is None else f"{row.check_error} bytes more or fewer than computed"
        claims.append((row.check_error == 0, f"{row.variant}: {fault}"))
    return claims or [(False, "no row of weight_bytes has a value")]


def error_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that no element of a quantised layer has an error above its bound."""
    claims = []
    for row in _known(rows, "relative_difference"):
        if row.is_unexpected:
            claims.append((False, f"{row.variant}: {row.value_reason}"))
            continue
        error, bound = not_none(row.check_error), not_none(row.check_tolerance)
        claims.append((error <= bound, f"{row.variant}, {row.params['what']}: {error:.3g} of its bound"))
    return claims or [(False, "no row of relative_difference has a value")]


def quality_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that perplexity rises by at most 1 % with 8-bit weights and 2 % with 4-bit weights.

    The whole 95 % interval must be below the limit, so a noisy measurement does not pass.
    """
    claims = []
    for row in _known(rows, "perplexity_ratio"):
        if row.is_unexpected:
            claims.append((False, f"{row.variant}: {row.value_reason}"))
            continue
        allowed = EIGHT_BITS if _BITS[row.dtype] == 8 else FOUR_BITS
        value = f"{row.value:.4f} ({row.ci_low:.4f} to {row.ci_high:.4f})"
        claims.append((not_none(row.ci_high) <= 1 + allowed, f"{row.variant}: perplexity ratio {value}, allowed {1 + allowed}"))
    return claims or [(False, "no row of perplexity_ratio has a value")]


def decode_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that the fastest mode of decoding with a large unquantised model reaches `SHARE_OF_BANDWIDTH` of the bandwidth.

    The bandwidth is that of the copy in chapter 1.1. If this run did not measure the copy, the bandwidth in the data sheet is
    used. If no large model was decoded, as on a CPU, the result contains no such claim.
    """
    claims = []
    large = {row.params["model"] for row in rows if row.metric == "weight_bytes" and (row.value or 0) >= LARGE_BYTES}
    for model in sorted(large):
        found = [row for row in rows if row.variant == "original" and row.params["model"] == model]
        of_copy = [row.value for row in found if row.metric == "decode_bandwidth_share" and row.value is not None]
        of_sheet = [row.fraction_of_limit for row in found if row.metric == "decode_time_s" and row.fraction_of_limit]
        best = max(of_copy or of_sheet, default=0.0)
        claims.append((best >= SHARE_OF_BANDWIDTH, f"{model}: {best:.3f} of the bandwidth, expected {SHARE_OF_BANDWIDTH}"))
    return claims


def training_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that every variant lowers the held-out loss, and that the base weights did not change.

    A claim also does not hold if a row has no value because its check failed: the training loss of a variant is too far above
    that of its twin, or a weight of a quantised base is beyond its bound.
    """
    claims = []
    losses: dict[str, dict[int, float]] = {}
    for row in _known(rows, "validation_loss"):
        losses.setdefault(row.variant, {})[row.params["step"]] = not_none(row.value)
    for variant, by_step in losses.items():
        before, after = by_step[min(by_step)], by_step[max(by_step)]
        claims.append((after < before, f"{variant}: held-out loss {before:.4f} before and {after:.4f} after the training"))
    checked = [*_known(rows, "loss_difference_nats"), *_known(rows, "relative_difference")]
    claims += [(row.value is not None, f"{row.variant}, {row.metric}: {row.value_reason}") for row in checked]
    unchanged = [row for row in _known(rows, "relative_difference") if row.params["what"] == "base weights after training"]
    claims += [(row.value == 0, f"{row.variant}: the base weights changed") for row in unchanged]
    return claims or [(False, "no variant was trained")]


def _known(rows: Iterable[Row], metric: str) -> list[Row]:
    return [row for row in rows if row.metric == metric and (row.value is not None or row.is_unexpected)]
