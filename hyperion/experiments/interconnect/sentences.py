"""Sentences about the size of DDP's gradient buckets. All numbers in the sentences come from measured rows."""

from collections.abc import Iterable

from hyperion.errors import not_none
from hyperion.figures.material import measured, number, select
from hyperion.measure.collectives.latency_bandwidth import DDP_DEFAULT_MIB, SHARE, share_of_best
from hyperion.results import Row
from hyperion.units import MIB

# The recommended size counts as no larger than the default if it exceeds the default by at most this fraction.
_CLOSE = 0.05


def default_bucket(rows: Iterable[Row], dtype: str = "fp32") -> list[str]:
    """Return sentences on what the fit and the measured rates say about DDP's default bucket size.

    The fit gives the size that reaches 90 % of the *fitted* rate of large messages. The measured rates give the share of the
    highest *measured* rate that a bucket of the default size reaches. The two disagree if the times do not lie on a straight
    line.

    Args:
        rows: rows of the experiment `collectives`.
        dtype: number format of the sweep.
    """
    rows = select(measured(rows), variant="all_reduce", dtype=dtype)
    advised = next(iter(select(rows, metric="recommended_bytes")), None)
    rates = {row.params["bytes"]: not_none(row.value) for row in select(rows, metric="busbw_gb_s")}
    sentences = []
    if advised is not None:
        size, low, high = (not_none(end) / MIB for end in (advised.value, advised.ci_low, advised.ci_high))
        text = f"By the fit, messages of at least {number(size)} MiB ({number(low)} to {number(high)}) reach {100 * SHARE:.0f} % "
        text += f"of the fitted plateau. {advised.params.get('note', '')}"
        sentences.append(text.strip())
    if not rates:
        return sentences
    best, default = max(rates.values()), DDP_DEFAULT_MIB * MIB
    if max(rates) < default:
        return [*sentences, f"No message of {DDP_DEFAULT_MIB} MiB or more was measured, so nothing follows for DDP's default."]
    share = share_of_best(default, list(rates), list(rates.values()))
    text = (
        f"Measured, DDP's default of {DDP_DEFAULT_MIB} MiB reaches {100 * share:.1f} % of the highest rate, {number(best)} GB/s. "
    )
    if share >= SHARE:
        return [*sentences, text + "So it is large enough."]
    text += f"So it leaves {100 * (1 - share):.1f} % unused."
    if advised is not None and size <= DDP_DEFAULT_MIB * (1 + _CLOSE):
        text += " The fit says less, because no straight line fits all sizes"
        plateau = next(iter(select(rows, metric="asymptotic_busbw_gb_s")), None)
        if plateau is not None and not_none(plateau.value) < best:
            text += f": its plateau, {number(plateau.value)} GB/s, is lower than the highest measured rate"
        text += ". A larger bucket is faster, but starts later, so only a timed step decides."
    return [*sentences, text]
