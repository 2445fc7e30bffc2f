"""Claims about runtimes. A claim is a pair (True if the claim holds, sentence to print if it does not hold).

A claim does not hold if its row is missing or has no value. There are no claims about a runtime or a number format that cannot be
used on this machine. Each function returns a list of claims, which the notebook checks with `chapter.expect`.
"""

from collections.abc import Sequence

from hyperion.errors import not_none
from hyperion.results import Row

Claim = tuple[bool, str]
# Largest change of perplexity or accuracy by a runtime. On an H100, bf16 changes the perplexity by less than 0.0002 and the
# accuracy by at most 0.0004. 4-bit weights change the perplexity by at least 0.0017.
LARGEST_CHANGE = 1e-3
# Largest ratio of two times of the same model in ONNX Runtime on the CPU. One graph has fixed shapes and folded batch norms, and
# other processes share the CPU: on two busy cores, the ratio was up to 2.3. Threads that spin caused ratios of 4 and 11.
SAME_TIME = 3.0


def parity_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that the logits of each runtime agree with float64 and with eager mode within their tolerances."""
    claims = [
        (row.value is not None, f"{row.variant}, {row.params['model']}, {row.params['against']}: {row.value_reason}")
        for row in rows
        if row.metric == "relative_difference" and "against" in row.params
    ]
    return claims or [(False, "no runtime was compared with float64")]


def runtime_quality_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that no runtime changes perplexity or accuracy by more than `LARGEST_CHANGE`."""
    claims = []
    for row in rows:
        if row.metric not in ("perplexity_ratio", "accuracy_difference") or row.value is None:
            continue
        change = abs(row.value - (row.metric == "perplexity_ratio"))
        claims.append((change <= LARGEST_CHANGE, f"{row.variant}, {row.params['model']}: {row.metric} {row.value:.5f}"))
    return claims or [(False, "no runtime was scored")]


def time_claims(runtimes: Sequence[Row], quantised: Sequence[Row]) -> list[Claim]:
    """Check that ONNX Runtime on the CPU takes about as long for the same fp32 model in both experiments.

    Times of the same model and batch size may differ by the factor `SAME_TIME`. They come from the experiment `quantization`, and
    from the latency, the search and the comparison with eager mode in `runtimes`. Rows that were timed while the threads of other
    runtimes spun are not checked: they lack the params `idle_threads` and `order`.

    Args:
        runtimes: rows of the experiment `runtimes`.
        quantised: rows of the experiment `quantization`.
    """
    times: dict[tuple[str, int], dict[str, float]] = {}

    def add(row: Row, source: str, seconds: float) -> None:
        times.setdefault((row.params["model"], row.params["batch"]), {})[source] = seconds

    for row in quantised:
        if row.metric == "inference_time_s" and row.variant == "original" and row.params.get("idle_threads") and row.value:
            add(row, "quantization", row.value)
    of_session = [row for row in runtimes if row.variant == "ONNX Runtime CPU" and row.value]
    if any(row.params.get("order") for row in of_session):
        for row in of_session:
            if row.metric == "latency_p50_s":
                add(row, "latency", not_none(row.value))
            elif row.metric == "samples_per_s":
                add(row, row.params["role"], row.params["batch"] / not_none(row.value))
    claims = []
    for (model, batch), found in times.items():
        listed = ", ".join(f"{source} {1e3 * seconds:.3g} ms" for source, seconds in found.items())
        claims.append((max(found.values()) <= SAME_TIME * min(found.values()), f"{model}, batch {batch}: {listed}"))
    return claims


def provider_claims(rows: Sequence[Row]) -> list[Claim]:
    """Check that each ONNX Runtime session uses the requested provider, on the device of the row."""
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
    """Check for each model that the compiled model launches fewer kernels than the eager model."""
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
