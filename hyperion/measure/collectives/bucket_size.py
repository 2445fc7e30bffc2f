"""How large a message must be to use the links well, and what that means for DDP's buckets and FSDP's units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperion.errors import HyperionError
from hyperion.measure.collectives.latency_bandwidth import LatencyBandwidth
from hyperion.results import Estimate

SHARE = 0.9
# torch.nn.parallel.DistributedDataParallel's own, in MiB.
DDP_DEFAULT_MIB = 25
_MIB = 2**20


@dataclass(frozen=True)
class BucketSize:
    """The message size that reaches a share of a collective's asymptotic bandwidth.

    Args:
        collective: whose.
        share: of the bandwidth that endless messages have.
        bytes: S, as the collective counts it; None where no size can be told.
        reason: why not, or what to know beside the number, else "".
    """

    collective: str
    share: float
    bytes: Estimate | None
    reason: str = ""

    def words(self, element_bytes: int = 2) -> str:
        """What it means for who trains with it.

        Args:
            element_bytes: of a gradient or parameter as it travels; 2 for bf16.
        """
        if self.bytes is None:
            return f"{self.collective}: no size recommended: {self.reason}"
        size, low, high = (_size(value) for value in (self.bytes.value, self.bytes.ci_low, self.bytes.ci_high))
        told = f"{self.collective}: {self.share:.0%} of its bandwidth from {size} on (95 % CI {low} to {high})"
        told += _MEANINGS.get(self.collective, lambda *_: "")(self.bytes.value, element_bytes)
        return f"{told}; {self.reason}" if self.reason else told


def recommended_bucket(
    fit: LatencyBandwidth, collective: str, bus_factor: float, measured_bytes: Sequence[int], share: float = SHARE
) -> BucketSize:
    """The size at which latency takes no more than 1 - `share` of the time: share / (1 - share) x latency x bandwidth.

    Args:
        fit: over the gigabytes that cross a link, bus factor x S.
        collective: its name.
        bus_factor: for the ranks of the fit.
        measured_bytes: the sizes S that were fitted; beyond them the answer is an extrapolation, and says so.
        share: above 0, below 1.

    Raises:
        HyperionError: the share is no share.
    """
    if not 0 < share < 1:
        raise HyperionError(
            f"a share of {share:g} of the bandwidth", where="recommended_bucket", next_step="choose one between 0 and 1"
        )
    crossing = fit.half_rate_gb
    # At the lower end of its interval a byte costs nothing: then no size is the one.
    if fit.s_per_gb.ci_low <= 0:
        return BucketSize(collective, share, None, "the times do not grow with the size by more than they scatter")
    size = crossing.map(lambda gigabytes: share / (1 - share) * gigabytes * 1e9 / bus_factor)
    said = []
    if size.value > max(measured_bytes):
        said.append(f"beyond the largest size measured, {_size(max(measured_bytes))}")
    if fit.deviation > 0.5:
        said.append(f"the measured times lie up to {fit.deviation:.0%} off the fitted line")
    return BucketSize(collective, share, size, "; ".join(said))


def _ddp(size: float, element_bytes: int) -> str:
    buckets = f"; DDP: bucket_cap_mb={max(1, math.ceil(size / _MIB))} or more"
    if size <= DDP_DEFAULT_MIB * _MIB:
        return f"{buckets} (its default of {DDP_DEFAULT_MIB} MiB is large enough; larger ones start later and overlap less)"
    return f"{buckets} (its default of {DDP_DEFAULT_MIB} MiB leaves bandwidth unused)"


def _fsdp(size: float, element_bytes: int) -> str:
    return f"; FSDP: units of {size / element_bytes / 1e6:.3g} M parameters or more ({element_bytes} bytes each)"


_MEANINGS = {"all_reduce": _ddp, "all_gather": _fsdp, "reduce_scatter": _fsdp}


def _size(size: float) -> str:
    """Bytes in words, powers of two."""
    for unit, factor in (("GiB", 2**30), ("MiB", _MIB), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
