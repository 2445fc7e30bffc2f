"""The tables of docs/headlines.md, made from the rows of reference runs.

The page has markers around its tables. `update_page` replaces the text between two markers:

    <!-- launches: FOLDER -->      headlines over several launches: all runs in FOLDER that measured the same kind of device
    <!-- end of launches -->

    <!-- headlines: FOLDER -->     the headlines of the run in FOLDER
    <!-- end of headlines -->

A launch is one run of an experiment in new processes. Two launches of the same code differ by more than the samples within a
launch, because memory is placed differently, the clock frequency differs, or the host differs. So a value of one launch says
little about the next launch, and it is not a headline.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.book.export import headline_markdown
from hyperion.book.outline import Headline, headlines
from hyperion.errors import HyperionError, not_none
from hyperion.figures.material import Material, device_name, quoted_value
from hyperion.figures.tables import markdown
from hyperion.results import Row, Run
from hyperion.results.statistics import Estimate, launches_estimate

# A value this close to its limit is bounded by it. Below this, the rows alone do not show the cause.
_NEAR_ITS_LIMIT = 0.85
# Fewer launches do not show how much launches differ: with four, the true median is outside their range in one of eight cases.
LEAST_LAUNCHES = 5
_MARKED = re.compile(r"<!-- (headlines|launches): (\S+) -->\n.*?<!-- end of \1 -->", re.DOTALL)


@dataclass(frozen=True)
class Launches:
    """One quantity, measured by several runs on the same kind of device.

    Args:
        device: name of the device.
        headlines: the headline of each run.
        machines: fingerprints of the machines, one for each run.
        runs: names of the runs.
    """

    device: str
    headlines: tuple[Headline, ...]
    machines: tuple[str, ...]
    runs: tuple[str, ...]

    @property
    def estimate(self) -> Estimate:
        """Median over the launches, with its 95 % interval from a nested bootstrap."""
        rows = [headline.row for headline in self.headlines]
        return launches_estimate([not_none(r.value) for r in rows], [(r.ci_low, r.ci_high) for r in rows])

    @property
    def within(self) -> float | None:
        """Half the width of the interval that one launch states, divided by its value. It is the median over all launches.

        None if the launches state no intervals.
        """
        rows = [h.row for h in self.headlines if h.row.value and h.row.ci_low is not None and h.row.ci_high is not None]
        halves = [(not_none(r.ci_high) - not_none(r.ci_low)) / 2 / abs(not_none(r.value)) for r in rows]
        return float(np.median(halves)) if halves else None

    @property
    def bound(self) -> str:
        """What limits the value: the power limit of the device, or the limit of the rows. "" if it is not known."""
        rows = [headline.row for headline in self.headlines]
        if all("power" in (row.throttle or "") for row in rows):
            return "power limit of the device"
        is_rate = rows[0].unit.endswith("/s") or rows[0].unit.endswith("FLOPS")
        near = is_rate and all((headline.fraction or 0) >= _NEAR_ITS_LIMIT for headline in self.headlines)
        return rows[0].limit_source.partition(";")[0] if near else ""


def update_page(page: Path) -> list[str]:
    """Replace the tables of a page between their markers.

    Args:
        page: a Markdown file. The folders in its markers are relative to the current folder.

    Returns:
        The markers that were found.

    Raises:
        HyperionError: the page has no markers, or a marker names a folder without runs.
    """
    text = page.read_text(encoding="utf-8")
    found: list[str] = []

    def replaced(match: re.Match) -> str:
        kind, folder = match[1], Path(match[2])
        found.append(f"{kind}: {folder}")
        table = headline_markdown(Run.open(folder)) if kind == "headlines" else launches_markdown(_runs_in(folder))
        return f"<!-- {kind}: {match[2]} -->\n{table.strip()}\n<!-- end of {kind} -->"

    changed = _MARKED.sub(replaced, text)
    if not found:
        raise HyperionError(
            "the page has no markers of tables",
            where=page,
            next_step="add `<!-- headlines: FOLDER OF A RUN -->` and `<!-- end of headlines -->`",
        )
    page.write_text(changed, encoding="utf-8")
    return found


def launches_markdown(runs: Iterable[Run]) -> str:
    """Return two tables as Markdown: the headlines, and the quantities of several launches that are too few for a headline.

    A value of an unsteady or host-bound series is in neither table, and a quantity of one launch is in neither table.
    """
    quantities = launches_of(runs)
    enough = [q for q in quantities if len(q.headlines) >= LEAST_LAUNCHES]
    few = [q for q in quantities if 1 < len(q.headlines) < LEAST_LAUNCHES]
    parts = [f"**Headlines: at least {LEAST_LAUNCHES} launches**", markdown(_table(enough)) if enough else "None yet."]
    parts += [f"**Two to {LEAST_LAUNCHES - 1} launches, so not headlines**", markdown(_table(few)) if few else "None."]
    return "\n\n".join(parts)


def launches_of(runs: Iterable[Run]) -> list[Launches]:
    """Return the quantities that the runs have as headlines, grouped by device and label, in the order of the first run."""
    groups: dict[tuple[str, str], list[tuple[Headline, str, str]]] = {}
    for run in runs:
        material = Material(run)
        for headline in headlines(material):
            stored = _environment(material, headline.row)
            key = (device_name({"environment": stored}), headline.label)
            groups.setdefault(key, []).append((headline, _fingerprint(stored), run.folder.name))
    return [Launches(device, *(tuple(part) for part in zip(*members, strict=True))) for (device, _), members in groups.items()]


def _environment(material: Material, row: Row) -> dict:
    """Return the stored environment with which a row was measured.

    If the experiment of the row has stored an environment, it is returned. Otherwise the environment of the whole run is
    returned.
    """
    provenance = material.finished.get(f"{row.notebook}/{row.experiment}", {}).get("provenance") or {}
    stored = provenance.get("environment") or material.information.get("environment") or {}
    return material.environments.get(stored, {}) if isinstance(stored, str) else stored


def _fingerprint(environment: dict) -> str:
    """Return a text that differs between machines: the hash of the host's name and the identifiers of the GPUs."""
    gpus = sorted(str(gpu.get("uuid")) for gpu in environment.get("gpus") or [])
    return " ".join([str(environment.get("host_hash")), *gpus])


def _runs_in(folder: Path) -> Sequence[Run]:
    runs = [Run.open(path) for path in sorted(folder.iterdir()) if (path / "run.json").is_file()]
    if not runs:
        raise HyperionError("no run is in this folder", where=folder, next_step="name a folder whose subfolders are runs")
    return runs


def _table(quantities: Iterable[Launches]) -> pd.DataFrame:
    return pd.DataFrame([_line(quantity) for quantity in quantities])


def _line(quantity: Launches) -> dict[str, str]:
    estimate, unit = quantity.estimate, quantity.headlines[0].row.unit
    steady = {headline.steady for headline in quantity.headlines} - {""}
    launches, within = len(quantity.headlines), quantity.within
    ends = f"{quoted_value(estimate.ci_low, unit)} – {quoted_value(estimate.ci_high, unit)}"
    return {
        "": quantity.headlines[0].label,
        "device": quantity.device,
        "median": quoted_value(estimate.value, unit),
        "launches": str(launches),
        "machines": str(len(set(quantity.machines))),
        "within one launch": "" if within is None else f"± {100 * within:.2g} %",
        "between launches": ends,
        "steady": "yes" if steady == {"yes"} else "",
        "bounded by": quantity.bound,
        "runs": ", ".join(quantity.runs),
    }
