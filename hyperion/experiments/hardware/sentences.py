"""Sentences about results that differ between machines or between two chapters of one run.

Each function compares rows of the hardware chapters and returns Markdown sentences. All numbers come from the rows.
"""

from collections.abc import Iterable

from hyperion.errors import not_none
from hyperion.experiments.hardware.reasons import LAUNCHING
from hyperion.figures.material import byte_size, held_by_power, measured, number, select
from hyperion.results import Row
from hyperion.results.rows import idle_rows

# Two rates agree if they differ by at most this fraction, which allows for different clocks and temperatures.
_ALIKE = 0.03
_SAME_BANDWIDTH = 0.1
# Pairs of number formats that have the same peak on many devices.
_ONE_PEAK = (("bf16", "fp16"), ("fp8_e4m3fn", "int8"))


def formats_of_one_peak(products: Iterable[Row]) -> list[str]:
    """Return sentences that compare number formats with the same peak, by the clock and the power of their fastest products.

    Args:
        products: rows of one experiment.
    """
    products = list(products)
    sentences = [text for pair in _ONE_PEAK if (text := _one_peak(*(_fastest(products, dtype) for dtype in pair)))]
    if any(row.dtype.startswith("fp8") for row in measured(products)):
        sentences.append("Products in fp8 add in float32, without the faster but less precise accumulation that vendors quote.")
    return sentences


def _one_peak(first: Row | None, second: Row | None) -> str:
    if first is None or second is None or first.limit is None or first.limit != second.limit:
        return ""
    text = f"{first.dtype} and {second.dtype} have the same peak: " + ", and ".join(map(_rate_clock_power, (first, second))) + "."
    if abs(not_none(first.value) / not_none(second.value) - 1) <= _ALIKE:
        return text + " Two measurements can differ by this much."
    if not first.clock_mhz or not second.clock_mhz:
        return text + " The clock was not read."
    rates = [not_none(row.value) / row.clock_mhz * 1e3 for row in (first, second) if row.clock_mhz]
    text += f" For each GHz of clock, the rates are {number(rates[0], 3)} and {number(rates[1], 3)} TFLOPS."
    return text + _explained(*rates)


def _explained(one: float, other: float) -> str:
    """Return a sentence on whether the clock explains the difference of two rates, which are given for each GHz of clock."""
    if abs(one / other - 1) <= _ALIKE:
        return " So the clock explains the difference."
    return (
        " They differ, so the recorded clock does not explain the difference, or not all of it. The clock is read every tenth of "
        "a second. If the samples took less time, the reading may be from another moment."
    )


def _rate_clock_power(row: Row) -> str:
    clock = f" at {row.clock_mhz:,.0f} MHz" if row.clock_mhz else ""
    power = f" and {row.power_w:,.0f} W" if row.power_w else ""
    capped = ", at the power limit" if held_by_power(row) else ""
    return f"the fastest {row.dtype} product reaches {number(row.value)} TFLOPS{clock}{power}{capped}"


def square_beside_search(rows: Iterable[Row], dtype: str) -> str:
    """Return sentences that compare the fastest square matrix product of chapter 1.1 with the fastest from the search.

    Return "" if the run does not have both.

    Args:
        rows: rows of a run.
        dtype: number format of the matrix products.
    """
    rows = list(rows)
    square = _fastest(select(rows, experiment="gemm", variant="torch.mm"), dtype)
    found = _fastest(select(rows, experiment="best_products", variant="fastest found"), dtype)
    if square is None or found is None:
        return ""
    there, here = not_none(square.value), not_none(found.value)
    side = square.params["m"]
    text = f"{dtype}: chapter 1.1 measured {number(there)} TFLOPS with M = N = K = {side:,}, alone."
    finalists = [row for row in rows if row.experiment == "best_products" and row.variant == "finalist" and row.dtype == dtype]
    again = next((row for row in measured(finalists) if {row.params[name] for name in "mnk"} == {side}), None)
    if again is not None:
        text += f" In turn with the finalists, the same product reaches {number(again.value)} TFLOPS."
    text += f" The search found {number(here)} TFLOPS"
    if here >= there:
        return f"{text}."
    if here >= there * (1 - _ALIKE):
        return f"{text}, {100 * (1 - here / there):.1f} % less. Two measurements can differ by this much."
    return f"{text}, {100 * (1 - here / there):.1f} % less. {_clocks(square, found)}"


def _fastest(rows: Iterable[Row], dtype: str) -> Row | None:
    products = [row for row in measured(select(list(rows), metric="gemm_tflops")) if row.dtype == dtype and not row.hot]
    return max(idle_rows(products), key=lambda row: not_none(row.value), default=None)


def _clocks(square: Row, found: Row) -> str:
    """Return sentences on whether the clock explains that the search found a slower product than chapter 1.1.

    Args:
        square: row of the fastest square matrix product in chapter 1.1.
        found: row of the fastest product found by the search.
    """
    if not square.clock_mhz or not found.clock_mhz:
        return "The clock was not read, so it is not known whether it explains this."
    there, here = (not_none(row.value) / row.clock_mhz * 1e3 for row in (square, found) if row.clock_mhz)
    capped = ", at its power limit" if held_by_power(found) else ""
    text = (
        f"The clock was {square.clock_mhz:,.0f} MHz there, and {found.clock_mhz:,.0f} MHz during the search, which keeps the "
        f"device busy{capped}. For each GHz of clock, the rates are {number(there, 3)} and {number(here, 3)} TFLOPS."
    )
    return text + _explained(there, here)


def faster_at_equal_clock(given: Iterable[Row], best: Row) -> list[Row]:
    """Return the given shapes that are faster than the fastest shape of the search at the same clock frequency.

    A search keeps a GPU at its power limit, and the given shapes are timed afterwards, so their clock can be higher. The rate of
    a matrix product is about proportional to the clock, so rates divided by the clock are compared. If a clock is unknown, the
    rates themselves are compared. The 95 % intervals must be more than 3 % apart.

    Args:
        given: rows of given shapes.
        best: row of the fastest shape of the search, in the same number format.
    """

    def faster(row: Row) -> bool:
        same_clock = best.clock_mhz / row.clock_mhz if best.clock_mhz and row.clock_mhz else 1.0
        return not_none(row.ci_low) * same_clock > (1 + _ALIKE) * not_none(best.ci_high)

    return [row for row in measured(given) if faster(row)]


def memory_levels(rows: Iterable[Row]) -> list[str]:
    """Return one sentence per operation (read, copy): the fastest working set, and whether the curve shows a cache.

    Args:
        rows: rows of the experiment `memory_levels`.
    """
    rows = list(rows)
    capacity = max((not_none(row.value) for row in measured(select(rows, metric="cache_bytes"))), default=None)
    points = measured(select(rows, metric="bandwidth_gb_s"))
    return [_levels(points, name, capacity) for name in dict.fromkeys(row.variant for row in points)]


def _levels(points: list[Row], name: str, capacity: float | None) -> str:
    ordered = sorted(select(points, variant=name), key=_working_set)
    fastest, largest = max(ordered, key=lambda row: not_none(row.value)), ordered[-1]
    text = f"**{name}**: the highest bandwidth is {_rate(fastest)}, with a working set of {byte_size(_working_set(fastest))}"
    if fastest is not largest:
        text += f". With the largest, {byte_size(_working_set(largest))}, it is {_rate(largest)}"
    if capacity is None:
        return f"{text}. The sizes of the caches are not known."
    if _working_set(fastest) <= capacity:
        return f"{text}. The fastest working set fits into the caches, so the curve shows their end."
    inside = [row for row in ordered if _working_set(row) <= capacity]
    text += ", which fits into no cache" if fastest is largest else ". The fastest working set fits into no cache"
    if not inside:
        return f"{text}. No smaller working set was measured."
    best = max(inside, key=lambda row: not_none(row.value))
    why = "launches" if best.limit_source.startswith(LAUNCHING) else "the kernel, which has too little work at this size,"
    return (
        f"{text}. Within the caches it is {_rate(best)} at most, with {byte_size(_working_set(best))}. A cache is not slower "
        f"than the memory behind it, so {why} must be the limit there. This curve does not show the bandwidth of the caches."
    )


def copies_of_one_size(rows: Iterable[Row]) -> str:
    """Return sentences that compare the largest repeated copy in `memory_levels` with the copy in `stream_formats`.

    Only copies limited by the bandwidth of device memory are compared, because a cache may serve the others. Return "" if the run
    does not have both copies.

    Args:
        rows: rows of a run.
    """
    rows = [row for row in measured(rows) if row.metric == "bandwidth_gb_s"]
    repeated = [row for row in rows if (row.experiment, row.variant) == ("memory_levels", "copy")]
    streams = [row for row in rows if (row.experiment, row.variant) == ("stream_formats", "copy")]
    streams = [row for row in streams if row.limit is not None and "plain_loop_calls" not in row.params]
    again = max((row for row in repeated if row.limit is not None), key=_working_set, default=None)
    if again is None or not streams:
        return ""
    single = next((row for row in streams if row.dtype == again.dtype), streams[0])
    there, here = not_none(again.value), not_none(single.value)
    text = (
        f"A copy of {single.dtype} arrays reaches {_rate(single)} here, and {_rate(again)} with the largest working set of the "
        f"experiment before ({byte_size(_working_set(again))}, {again.params['timed']})."
    )
    if abs(there / here - 1) <= _SAME_BANDWIDTH:
        return text + " The two agree."
    steps = sorted((row for row in repeated if _working_set(row) <= _working_set(again)), key=_working_set)
    near = max((row for row in steps if abs(not_none(row.value) / here - 1) <= _SAME_BANDWIDTH), key=_working_set, default=None)
    text += " The two differ, although both count each byte once as read and once as written"
    if near is not None:
        text += f". With {byte_size(_working_set(near))}, the repeated copy still reaches {_rate(near)}"
    if "graph" in again.params["timed"]:
        text += ". So the memory is not the reason, but the graph: CUDA carries out some captured copies in a slower way"
    return text + ". The bandwidth of the memory is the higher one."


def _working_set(row: Row) -> int:
    return row.params["working_set_bytes"]


def _rate(row: Row) -> str:
    return f"{number(row.value)} GB/s"
