"""The tables of docs/claims.md: claims of the project's documents beside the rows that answer them, and repeated measurements.

`claims.toml` names for each claim the rows, the sentence that quotes them, and the condition under which the claim holds.
"""

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.book.display import fill
from hyperion.errors import HyperionError, not_none
from hyperion.figures.material import number
from hyperion.figures.tables import markdown
from hyperion.results import Row, Run

_FILE = Path(__file__).with_name("claims.toml")
_COLUMNS = ("experiment", "variant", "dtype", "metric")


def claims_markdown(runs: dict[Run, str]) -> str:
    """Return the table of all claims as Markdown.

    Args:
        runs: maps each reference run to its name.

    Raises:
        HyperionError: a claim names a run or a row that does not exist, or several rows at once.
    """
    lines = []
    for claim in tomllib.loads(_FILE.read_text(encoding="utf-8"))["claim"]:
        rows = {name: _row(runs, wanted, claim["claim"]) for name, wanted in claim.get("rows", {}).items()}
        lines.append(
            {
                "claim": claim["claim"],
                "published": claim["published"],
                "our rows": fill(claim["answer"], **rows),
                "answer": _answer(claim.get("holds", []), rows),
                "run": ", ".join(dict.fromkeys(wanted["run"] for wanted in claim.get("rows", {}).values())) or "none",
            }
        )
    return markdown(pd.DataFrame(lines)).strip()


def _row(runs: dict[Run, str], wanted: dict, claim: str) -> Row:
    params = {name: value for name, value in wanted.items() if name not in ("run", *_COLUMNS)}
    named = [run for run, name in runs.items() if name == wanted["run"]]
    found = [
        row
        for run in named
        for row in run.rows()
        if all(getattr(row, name) == wanted[name] for name in _COLUMNS if name in wanted)
        and params.items() <= row.params.items()
        and row.rank is None
    ]
    if len(found) != 1 or found[0].value is None:
        raise HyperionError(
            f"{len(found)} rows with these properties: {wanted}",
            where=f"{_FILE.name}: {claim}",
            next_step="name one measured row",
        )
    return found[0]


def _answer(conditions: list[dict], rows: dict[str, Row]) -> str:
    """Return "holds", "does not hold", "undecided" or "not measured".

    A condition compares the ends of the interval of a row with a bound: `at_least` or `at_most` times the row `of`, or 1. A claim
    holds if all conditions hold at both ends, and does not hold if one fails at both ends.
    """
    if not conditions:
        return "undecided" if rows else "not measured"
    sure, impossible = True, False
    for condition in conditions:
        row, of = rows[condition["row"]], rows.get(condition.get("of", ""))
        scale = 1.0 if of is None else not_none(of.value)
        low, high = ((not_none(row.value) if end is None else end) / scale for end in (row.ci_low, row.ci_high))
        least, most = condition.get("at_least", -math.inf), condition.get("at_most", math.inf)
        sure &= least <= low and high <= most
        impossible |= high < least or low > most
    return "holds" if sure else "does not hold" if impossible else "undecided"


def repeats_markdown(runs: dict[Run, str]) -> str:
    """Return a table of matrix products that several launches of a folder of launches repeat.

    The columns are the median over the launches, the 10th and 90th percentile of the samples of a launch (median over the
    launches), and the coefficient of variation (standard deviation divided by the mean): of all launches, and of the launches on
    the same GPU around their own mean.
    """
    rates: dict[tuple[str, int], list[tuple[str, float, float, float]]] = defaultdict(list)
    for run, name in runs.items():
        if not name.endswith("-launches") or "01_hardware_exploration/gemm" not in run.experiments():
            continue
        gpus = str(sorted(str(gpu.get("uuid")) for gpu in (run.information().get("environment") or {}).get("gpus") or []))
        samples = run.samples("01_hardware_exploration", "gemm").groupby(["dtype", "params"])["time_s"]
        for row in run.rows("01_hardware_exploration", "gemm"):
            if row.metric == "gemm_tflops" and row.value is not None and row.params["cache"] == "cold":
                times = samples.get_group((row.dtype, json.dumps(row.params, sort_keys=True)))
                work = 2 * row.params["m"] * row.params["n"] * row.params["k"] / 1e12
                low, high = (work / float(np.quantile(times, share)) for share in (0.9, 0.1))
                rates[row.dtype, row.params["n"]].append((gpus, row.value, low, high))
    lines = []
    for (dtype, n), launches in rates.items():
        values = np.array([value for _, value, _, _ in launches])
        lines.append(
            {
                "format": dtype,
                "M = N = K": f"{n}",
                "launches": str(len(values)),
                "GPUs": str(len({gpu for gpu, _, _, _ in launches})),
                "median TFLOPS": number(float(np.median(values))),
                "10th to 90th percentile in a launch": " to ".join(
                    number(float(np.median(ends))) for ends in ([low for *_, low, _ in launches], [high for *_, high in launches])
                ),
                "variation of all launches": f"{100 * values.std(ddof=1) / values.mean():.2f} %" if len(values) > 1 else "",
                "variation on the same GPU": _variation_within((gpu, value) for gpu, value, _, _ in launches),
            }
        )
    return markdown(pd.DataFrame(lines)).strip()


def _variation_within(launches: Iterable[tuple[str, float]]) -> str:
    """Return the pooled coefficient of variation of the values on the same GPU, or "" if no GPU has two values."""
    groups: dict[str, list[float]] = defaultdict(list)
    for gpu, value in launches:
        groups[gpu].append(value)
    relative = np.concatenate([np.array(values) / np.mean(values) - 1 for values in groups.values()])
    freedom = len(relative) - len(groups)
    return f"{100 * math.sqrt(float((relative**2).sum()) / freedom):.2f} %" if freedom else ""
