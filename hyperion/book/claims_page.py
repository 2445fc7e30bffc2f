"""The tables of docs/claims.md: claims in the project's documents, the rows that test them, and repeated measurements.

`claims.toml` names for each claim the rows, the sentence that quotes them, and the condition under which the claim holds.
"""

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.book.display import fill
from hyperion.errors import HyperionError, not_none
from hyperion.experiments.hardware.figures_products import repeated_products
from hyperion.figures.material import Material, is_timed, worst_steadiness
from hyperion.figures.tables import markdown
from hyperion.results import Row, Run

_FILE = Path(__file__).with_name("claims.toml")
_COLUMNS = ("experiment", "variant", "dtype", "metric")
# The name of a run that measured the same chapters again is the name of the first run and this, such as "h100-second-host".
_SECOND = "-second-"
_FEWEST_ROWS = 10


def claims_markdown(runs: dict[Run, str]) -> str:
    """Return the table of all claims as Markdown.

    Args:
        runs: maps each reference run to its name.

    Raises:
        HyperionError: a claim names a run or a row that does not exist, or several rows at once.
    """
    lines = []
    materials = {run: Material(run) for run in runs}
    for claim in tomllib.loads(_FILE.read_text(encoding="utf-8"))["claim"]:
        found = {name: _row(runs, wanted, claim["claim"]) for name, wanted in claim.get("rows", {}).items()}
        rows = {name: row for name, (_, row) in found.items()}
        lines.append(
            {
                "claim": claim["claim"],
                "published": claim["published"],
                "our rows": fill(claim["answer"], **rows),
                "times steady": _steadiness(materials, found.values()),
                "answer": _answer(claim.get("holds", []), rows),
                "run": ", ".join(dict.fromkeys(wanted["run"] for wanted in claim.get("rows", {}).values())) or "none",
            }
        )
    return markdown(pd.DataFrame(lines)).strip()


def _steadiness(materials: dict[Run, Material], rows: Iterable[tuple[Run, Row]]) -> str:
    """Return the worst steadiness of the times and rates among the rows of a claim."""
    return worst_steadiness(["", *(materials[run].steadiness(row) for run, row in rows if is_timed(row))])


def _row(runs: dict[Run, str], wanted: dict, claim: str) -> tuple[Run, Row]:
    params = {name: value for name, value in wanted.items() if name not in ("run", *_COLUMNS)}
    named = [run for run, name in runs.items() if name == wanted["run"]]
    found = [
        (run, row)
        for run in named
        for row in run.rows()
        if all(getattr(row, name) == wanted[name] for name in _COLUMNS if name in wanted)
        and params.items() <= row.params.items()
        and row.rank is None
    ]
    if len(found) != 1 or found[0][1].value is None:
        raise HyperionError(
            f"{len(found)} rows with these properties: {wanted}",
            where=f"{_FILE.name}: {claim}",
            next_step="name one measured row",
        )
    return found[0]


def _answer(conditions: list[dict], rows: dict[str, Row]) -> str:
    """Decide whether a claim holds: return "holds", "does not hold", "undecided" or "not measured".

    Each condition names a `row` and a bound, `at_least` or `at_most`. Both ends of the row's confidence interval are compared
    with the bound. If the condition also names a row in `of`, the ends are first divided by the value of that row. A claim holds
    if all conditions hold at both ends. It does not hold if a bound excludes the whole interval of a row.
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
    """Return a Markdown table of the matrix products that several launches measured; see `repeated_products`."""
    return markdown(repeated_products(run for run, name in runs.items() if name.endswith("-launches"))).strip()


def reruns_markdown(runs: dict[Run, str]) -> str:
    """Return a Markdown table of how far two runs of the same chapters differ, by metric.

    A cell contains the relative difference that half of the values stay below, and the one that 90 % of them stay below. Only
    metrics for which a higher or a lower value is better are compared, and only those with at least ten values in both runs. An
    error that a check bounds is not compared.

    Args:
        runs: maps each reference run to its name.
    """
    by_name = {name: run for run, name in runs.items()}
    pairs = [(first, name) for name in by_name if (first := name.partition(_SECOND)[0]) != name and first in by_name]
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for first, second in pairs:
        earlier = {row.key: row.value for row in by_name[first].rows()}
        differences = defaultdict(list)
        for row in by_name[second].rows():
            before = earlier.get(row.key)
            if row.value and before and row.definition.direction != "none" and row.check_error != row.value:
                differences[row.metric].append(abs(row.value / before - 1))
        for metric, found in differences.items():
            if len(found) >= _FEWEST_ROWS:
                half, most = (f"{100 * np.quantile(found, share):.1f} %" for share in (0.5, 0.9))
                cells[metric][f"{first} and {second}"] = f"{half}, {most} ({len(found)} values)"
    columns = [f"{first} and {second}" for first, second in pairs]
    lines = [{"metric": metric} | {column: cells[metric].get(column, "") for column in columns} for metric in sorted(cells)]
    return markdown(pd.DataFrame(lines)).strip()
