"""Claims of the chapter on kernels.

A claim is a pair: whether the rows support it, and the sentence that is printed if they do not. Rows that are missing or have no
value do not support a claim.
"""

from collections.abc import Sequence

from hyperion.errors import not_none
from hyperion.experiments.kernels.attention_speed import AttentionSpeedOptions
from hyperion.experiments.kernels.matmul_kernel import MatmulKernelOptions
from hyperion.experiments.kernels.row_kernels import OPERATIONS, RowKernelsOptions
from hyperion.results import Row

Claim = tuple[bool, str]
# The thresholds apply from these sizes on: elements of an array, rows of a square product, positions of attention.
LARGE_ARRAY, LARGE_PRODUCT, LONG = 1 << 26, 4096, 8192
SHARE_OF_COPY, SHARE_OF_MM, SHARE_OF_CUDNN = 0.85, 0.85, {"forward": 0.6, "backward": 0.5}
LDS_BYTES = 64 << 10
# Quadratic share of the memory of attention: largest without a matrix of scores, and smallest with one.
LARGEST_LINEAR, SMALLEST_QUADRATIC = 0.05, 0.5


def has_bars(environment: dict) -> bool:
    """Return True if the thresholds apply, because the rows come from a GPU of compute capability 9.0.

    The settings for other GPUs were chosen without timing.

    Args:
        environment: the environment of the rows, `Chapter.environment`.
    """
    gpus = environment["gpus"]
    return bool(gpus) and not environment["hip"] and (gpus[0]["major"], gpus[0]["minor"]) == (9, 0)


def compiled_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims about compiled kernels: no check failed, no kernel spills, and on gfx90a each kernel's LDS fits."""
    claims = []
    for row in rows:
        where = f"{row.params.get('kernel')} on {row.variant}"
        if row.value is None:
            claims.append((False, f"{where}: {row.metric} {row.value_reason}"))
        elif row.metric == "register_spills":
            claims.append((row.value == 0, f"{where} spills {row.value:g}"))
        elif (row.metric, row.variant) == ("shared_memory_bytes", "gfx90a"):
            claims.append((row.value <= LDS_BYTES, f"{where} needs {row.value:g} bytes of LDS, {LDS_BYTES} are available"))
    return claims


def bandwidth_claims(rows: Sequence[Row], options: RowKernelsOptions) -> list[Claim]:
    """Return the claims about the bandwidth of each operation, relative to a copy."""
    if options.elements < LARGE_ARRAY:
        return []
    return [_reaches(rows, "triton over copy", SHARE_OF_COPY, {"operation": operation}) for operation in OPERATIONS]


def product_claims(rows: Sequence[Row], options: MatmulKernelOptions) -> list[Claim]:
    """Return the claims about the rate of large square products, relative to torch.mm."""
    sizes = [shape.m for shape in options.shapes if shape.m == shape.n == shape.k >= LARGE_PRODUCT]
    return [_reaches(rows, "triton over torch.mm", SHARE_OF_MM, dict.fromkeys("mnk", size)) for size in sizes]


def attention_claims(rows: Sequence[Row], options: AttentionSpeedOptions) -> list[Claim]:
    """Return the claims about long causal attention, relative to the cuDNN and flash backends. Both must have a row."""
    claims = []
    for shape in options.shapes:
        if shape.length < LONG or shape.features != 128 or not shape.causal:
            continue
        for which, share in SHARE_OF_CUDNN.items():
            wanted = shape.params | {"pass": which}
            claims.append(_reaches(rows, "triton over cudnn", share, wanted))
            claims.append(_reaches(rows, "triton over flash", 1.0 if which == "forward" else 0.0, wanted))
    return claims


def memory_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the claims about the quadratic share of the memory of each implementation that ran.

    If no polynomial fits the memory of an implementation, the growth between the two greatest lengths is compared with that of a
    polynomial without a constant term and with the allowed share. A constant term only makes the growth smaller, so a larger
    growth contradicts the share.
    """
    peaks: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.metric == "peak_memory_gib" and row.value is not None:
            peaks.setdefault(row.variant, {})[row.params["length"]] = row.value
    shares = {row.variant: row.value for row in rows if row.metric == "quadratic_share" and row.value is not None}
    claims = []
    for name, by_length in peaks.items():
        quadratic = name == "math"
        allowed = SMALLEST_QUADRATIC if quadratic else LARGEST_LINEAR
        if name in shares:
            found, what = shares[name], "quadratic share"
        else:
            shorter, longest = sorted(by_length)[-2:]
            ratio = shorter / longest
            allowed = 1 / ((1 - allowed) * ratio + allowed * ratio**2)
            found, what = by_length[longest] / by_length[shorter], f"growth from {shorter} to {longest} positions"
        holds = found > allowed if quadratic else found < allowed
        claims.append((holds, f"{name}: {what} {found:.3f}, expected {'more' if quadratic else 'less'} than {allowed:.3f}"))
    return claims or [(False, "the memory of no implementation was measured")]


def _reaches(rows: Sequence[Row], variant: str, least: float, wanted: dict) -> Claim:
    """Return the claim that a ratio reaches a threshold. For a threshold of 1, the whole confidence interval must lie above 1."""
    what = f"{variant}, " + ", ".join(f"{name} {value}" for name, value in wanted.items())
    found = [row for row in rows if row.variant == variant and wanted.items() <= row.params.items()]
    known = [row for row in found if row.value is not None]
    if not known:
        return False, f"{len(found)} rows of {what}, 0 with a value"
    (row,) = known
    value = f"{row.value:.3f} ({row.ci_low:.3f} to {row.ci_high:.3f})"
    holds = not_none(row.ci_low) > 1 if least == 1 else not_none(row.value) >= least
    return holds, f"{what}: {value}, expected {'more than 1' if least == 1 else least}"
