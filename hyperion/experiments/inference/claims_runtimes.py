"""Claims of the chapter about runtimes: pairs of whether a claim holds, and the sentence that says why not.

A runtime that cannot be used here makes no claim.
"""

from collections.abc import Sequence

from hyperion.errors import not_none
from hyperion.results import Row

Claim = tuple[bool, str]
# Largest change of perplexity or accuracy by another runtime with the same number format, and by bf16.
SAME_FORMAT, SIXTEEN_BITS = 1e-3, 2e-2


def parity_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that the logits of each runtime agree with float64 and with eager mode within their tolerances."""
    found = [row for row in rows if row.metric == "relative_difference" and "against" in row.params]
    claims = [
        (row.value is not None, f"{row.variant}, {row.params['model']}, {row.params['against']}: {row.value_reason}")
        for row in found
    ]
    return claims or [(False, "no runtime was compared with float64")]


def quality_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that no runtime changes perplexity or accuracy by more than its number format explains."""
    claims = []
    for row in rows:
        if row.metric not in ("perplexity_ratio", "accuracy_difference") or row.value is None:
            continue
        allowed = SAME_FORMAT if row.dtype == "fp32" else SIXTEEN_BITS
        change = abs(row.value - (row.metric == "perplexity_ratio"))
        claims.append((change <= allowed, f"{row.variant}, {row.params['model']}: {row.metric} {row.value:.5f}"))
    return claims or [(False, "no runtime was scored")]


def provider_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims that each session of ONNX Runtime has the provider that was asked for, on the device of the row."""
    claims = []
    for row in rows:
        if "providers" not in row.params:
            continue
        asked, present = row.params["asked_provider"], row.params["providers"]
        on_cpu = asked == "CPUExecutionProvider"
        claims.append((present.startswith(asked), f"{row.variant}: {asked} was asked for, {present} ran"))
        claims.append((on_cpu == (row.params["device"] == "cpu"), f"{row.variant}: {asked} on {row.params['device']}"))
    return claims


def fusion_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claim for each model that the compiled model launches fewer kernels than the eager one."""
    counts = {
        (row.variant, row.params["model"]): not_none(row.value)
        for row in rows
        if row.metric == "kernels_per_call" and row.value is not None
    }
    return [
        (count < counts["eager", model], f"{model}: {count:g} kernels compiled, {counts['eager', model]:g} eager")
        for (runtime, model), count in counts.items()
        if runtime == "torch.compile"
    ]
