"""The tables of docs/headlines.md and of the README, made from the rows of the reference runs.

The pages have markers around all text that is made from rows. `update_page` replaces the text between two markers:

    <!-- headlines: FOLDER --> … <!-- end of headlines -->    all headlines of the runs in FOLDER
    <!-- summary: FOLDER --> … <!-- end of summary -->        at most ten of them, for the README
    <!-- counts: FOLDER --> … <!-- end of counts -->          sentences with the numbers of intervals, checks and limits
    <!-- claims: FOLDER --> … <!-- end of claims -->          claims of the project's documents, answered by rows
    <!-- repeats: FOLDER --> … <!-- end of repeats -->        matrix products that several launches repeat
    <!-- reruns: FOLDER --> … <!-- end of reruns -->          differences between two runs of the same chapters

FOLDER contains runs, such as `h200x2`, and folders of launches, such as `h200-launches`, whose subfolders are runs.

A launch is one run of an experiment in new processes. Two launches of the same code differ by more than the samples within a
launch, because the memory placement, the clock frequency or the host differs. So a time or a rate from one launch says little
about the next launch, and is not a headline. Three kinds of values are headlines:

- times, rates and ratios that at least five launches of one version of the code measured;
- measures of quality, such as an accuracy, averaged over several trainings with different seeds;
- differences between values that must be equal. They are not times, and their rows state a tolerance.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from hyperion.book.claims_page import claims_markdown, repeats_markdown, reruns_markdown
from hyperion.book.outline import BUSY, Headline, headlines
from hyperion.errors import HyperionError, not_none
from hyperion.figures.material import NO_DRIFT, Material, device_name, held_by_power, percent, quoted_value
from hyperion.figures.tables import is_floor, markdown
from hyperion.results import Row, Run
from hyperion.results.statistics import LEAST_LAUNCHES, Estimate, launches_estimate

# A value that reaches at least this share of its limit is assumed to be bounded by the limit. For smaller values, the rows do not
# show what bounds them.
_NEAR_ITS_LIMIT = 0.85
# Maximum number of lines of the summary in the README, and the beginnings of their labels in order. Weak and strong scaling are
# shown together, because the efficiency of weak scaling alone promises too much.
MOST_LINES = 10
_SUMMARY = (
    r"matrix product, \S+ × \S+, bf16",
    r"matrix product, \S+ × \S+, fp8",
    r"memory copy",
    r"all-reduce over",
    r"gpt2_124m\S*, training, .* over (a|the same) plain",
    r"resnet18, training, .* over the same plain",
    r"gpt2_124m\S*, training step as a graph: .* over tf32",
    r".*, accuracy, (\S+, )?test split, mean of",
    r".*, perplexity per word, (\S+, )?test split, mean of",
    r"DDP on .* difference of the loss",
    r"FSDP on .* difference of the loss",
    r"gpt2_124m, DDP: (weak|strong) scaling",
)
_KINDS = "headlines|summary|counts|claims|repeats|reruns"
_MARKED = re.compile(rf"<!-- ({_KINDS}): (\S+) -->(\n?).*?<!-- end of \1 -->", re.DOTALL)
_MARKER = re.compile(rf"<!-- (end of )?({_KINDS})(?(1)|: \S+) -->")  # an end marker has no folder


@dataclass(frozen=True)
class Measured:
    """One headline of one run.

    Args:
        headline: label, value and row.
        device: name of the device.
        machine: fingerprint of the machine.
        version: hash of the code that the experiment imports, without comments. "" if it was not stored.
        run: name of the run. For a launch, the name of the folder that contains all launches.
    """

    headline: Headline
    device: str
    machine: str
    version: str
    run: str

    @property
    def row(self) -> Row:
        return self.headline.row


@dataclass(frozen=True)
class Launches:
    """One quantity, measured in several launches on the same kind of device."""

    members: tuple[Measured, ...]

    @property
    def label(self) -> str:
        return self.members[0].headline.label

    @property
    def device(self) -> str:
        return self.members[0].device

    @property
    def unit(self) -> str:
        return self.members[0].row.unit

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(member.run for member in self.members))

    @property
    def machines(self) -> int:
        return len({member.machine for member in self.members})

    @property
    def versions(self) -> int:
        return len({member.version for member in self.members})

    def of_one_version(self) -> "Launches":
        """Return only the launches of the code version with the most launches and, among equals, with the most machines."""
        versions = dict.fromkeys(member.version for member in self.members)
        candidates = [Launches(tuple(m for m in self.members if m.version == version)) for version in versions]
        return max(candidates, key=lambda launches: (len(launches.members), launches.machines))

    def by_version(self) -> list[str]:
        """Return one text for each code version and run: the value, or the median over the launches, and the run."""
        members: dict[tuple[str, str], list[Measured]] = {}
        for member in self.members:
            members.setdefault((member.version, member.run), []).append(member)
        texts = []
        for (_, run), same in members.items():
            median = quoted_value(float(np.median([not_none(one.row.value) for one in same])), self.unit)
            texts.append(f"{median} ({run}{f', median of {len(same)}' if len(same) > 1 else ''})")
        return texts

    @property
    def estimate(self) -> Estimate:
        """Median over the launches, with its 95 % interval from a nested bootstrap."""
        rows = [member.row for member in self.members]
        return launches_estimate([not_none(r.value) for r in rows], [(r.ci_low, r.ci_high) for r in rows])

    @property
    def interval(self) -> str:
        """Text with the 95 % interval of the median over the launches."""
        estimate = self.estimate
        return f"{quoted_value(estimate.ci_low, self.unit)} – {quoted_value(estimate.ci_high, self.unit)}"

    @property
    def range(self) -> str:
        """Text with the lowest and the highest launch."""
        values = [not_none(member.row.value) for member in self.members]
        return f"{quoted_value(min(values), self.unit)} – {quoted_value(max(values), self.unit)}"

    @property
    def within(self) -> float | None:
        """Relative half-width of the interval within a launch, as the median over all launches.

        It is half the width of the interval, divided by the value of the launch. None if the launches have no intervals.
        """
        rows = [m.row for m in self.members if m.row.value and m.row.ci_low is not None and m.row.ci_high is not None]
        halves = [(not_none(r.ci_high) - not_none(r.ci_low)) / 2 / abs(not_none(r.value)) for r in rows]
        return float(np.median(halves)) if halves else None

    @property
    def fraction(self) -> float | None:
        """Median over the launches of the value divided by its limit. None if a launch has no limit or the limit is a minimum."""
        fractions = [None if is_floor(member.row) else member.row.fraction_of_limit for member in self.members]
        return None if None in fractions else float(np.median([not_none(fraction) for fraction in fractions]))

    @property
    def steady(self) -> str:
        """ "yes" if the samples of every launch were steady. "" if the value does not come from the samples of one timing.

        `NO_DRIFT` if this is known of their drift only.
        """
        states = {member.headline.steady for member in self.members}
        if not states <= {"yes", NO_DRIFT}:
            return ""
        return NO_DRIFT if NO_DRIFT in states else "yes"

    @property
    def is_headline(self) -> bool:
        """Whether enough launches measured it, and the samples of all of them are known to be steady."""
        return len(self.members) >= LEAST_LAUNCHES and self.steady != NO_DRIFT

    @property
    def bound(self) -> str:
        """What limits the value: the power limit of the device, the limit of the rows, or "not known"."""
        rows = [member.row for member in self.members]
        if all(map(held_by_power, rows)):
            return "power limit of the device"
        is_rate = rows[0].unit.endswith("/s") or rows[0].unit.endswith("FLOPS")
        near = is_rate and all((member.headline.fraction or 0) >= _NEAR_ITS_LIMIT for member in self.members)
        return rows[0].limit_source.partition(";")[0] if near else "not known"


def update_page(page: Path) -> list[str]:
    """Replace everything between the markers of a page. See `updated`.

    Args:
        page: a Markdown file.

    Returns:
        The markers that were found.

    Raises:
        HyperionError: the page is not UTF-8, or for the reasons in `updated`. The page is not changed.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HyperionError(
            f"the page is not UTF-8: {error.reason} at byte {error.start}", where=page, next_step="save the page as UTF-8"
        ) from error
    text, found = updated(text, page)
    page.write_text(text, encoding="utf-8")
    return found


def updated(text: str, page: Path) -> tuple[str, list[str]]:
    """Return the text of a page with the text between its markers regenerated, and the markers that were found.

    Args:
        text: Markdown. The folders in its markers are relative to the current folder.
        page: path of the page. Links are relative to its folder.

    Raises:
        HyperionError: the text has no markers, a marker has no opening or end marker, or a marker names a folder without runs.
    """
    _require_pairs(text, page)
    found: list[str] = []
    make = {"headlines": headlines_markdown, "summary": summary_markdown, "counts": counts_markdown}
    make |= {"claims": claims_markdown, "repeats": repeats_markdown, "reruns": reruns_markdown}

    def replaced(match: re.Match) -> str:
        kind, folder, newline = match[1], Path(match[2]), match[3]
        found.append(f"{kind}: {folder}")
        runs = runs_in(folder)
        made = _link_runs(make[kind](runs), runs.values(), os.path.relpath(folder, page.parent))
        return f"<!-- {kind}: {match[2]} -->{newline}{made}{newline}<!-- end of {kind} -->"

    changed = _MARKED.sub(replaced, text)
    if not found:
        raise HyperionError(
            "the page has no markers of tables",
            where=page,
            next_step="add `<!-- headlines: FOLDER OF RUNS -->` and `<!-- end of headlines -->`",
        )
    return changed, found


def _require_pairs(text: str, page: Path) -> None:
    """Check that each opening marker is followed by its end marker. A damaged marker would leave old text in the page."""
    markers = [*_MARKER.finditer(text)]
    for first, second in itertools.zip_longest(markers[::2], markers[1::2]):
        is_end, kind = first.groups()
        if not is_end and second is not None and second.groups() == ("end of ", kind):
            continue
        missing = f"<!-- {kind}: FOLDER OF RUNS -->" if is_end else f"<!-- end of {kind} -->"
        raise HyperionError(
            f"the marker {first[0]} has no {'opening' if is_end else 'end'} marker",
            where=f"{page}, line {text.count(chr(10), 0, first.start()) + 1}",
            next_step=f"add `{missing}` {'before' if is_end else 'after'} the text that is made from rows",
        )


def runs_in(folder: Path) -> dict[Run, str]:
    """Return a dict that maps each run in a folder and in its folders of launches to its name.

    The name of a launch is the name of the folder that contains all launches.

    Raises:
        HyperionError: the folder contains no run.
    """
    paths = sorted([*folder.glob("*/run.json"), *folder.glob("*/*/run.json")])
    if not paths:
        raise HyperionError("no run is in this folder", where=folder, next_step="name a folder whose subfolders are runs")
    return {Run.open(path.parent): path.relative_to(folder).parts[0] for path in paths}


def headlines_markdown(runs: dict[Run, str]) -> str:
    """Return the tables of all headlines as Markdown, and a table of the quantities with too few launches for a headline.

    The tables contain no values of unsteady or host-bound series, and no times or rates from a single launch.
    """
    measured = list(_measured(runs))
    enough, few = [], []
    for quantity in _grouped(measured):
        chosen = quantity.of_one_version()
        if chosen.is_headline:
            enough.append(_speed_line(chosen, [member for member in quantity.members if member not in chosen.members]))
        elif len(quantity.members) > 1:
            few.append(_few_line(quantity))
    parts = [
        f"**Times, rates and ratios: at least {LEAST_LAUNCHES} launches of one version of the code**",
        _table(enough),
        "**Quality: means over several trainings with different seeds**",
        _table(map(_mean_line, _largest(measured, "mean"))),
        "**Correctness: differences of values that must be equal**",
        _table(map(_difference_line, _largest(measured, "difference"))),
        f"**Not headlines: fewer than {LEAST_LAUNCHES} launches of one version of the code, or a warm-up that is not tested**",
        _table(few),
    ]
    return "\n\n".join(parts)


def summary_markdown(runs: dict[Run, str]) -> str:
    """Return the table in the README, with at most ten headlines, as Markdown."""
    measured = list(_measured(runs))
    chosen = [quantity.of_one_version() for quantity in _grouped(measured)]
    enough = [quantity for quantity in chosen if quantity.is_headline]
    candidates = list(_short_lines(measured, enough))
    lines = [(label, line) for pattern in _SUMMARY for label, line in candidates if re.match(pattern, label)][:MOST_LINES]
    if lines and "weak scaling" in lines[-1][0]:  # drop it, because its strong-scaling line was cut off
        lines.pop()
    table = _table(line for _, line in lines)
    none = f"No time and no rate is in this table yet, because at least {LEAST_LAUNCHES} launches must have measured it."
    return table if enough else f"{table}\n\n{none}"


def counts_markdown(runs: dict[Run, str]) -> str:
    """Return sentences that say how many rows of the runs have an interval, a check or a limit."""
    rows = [row for run in runs for row in run.rows()]
    limited = [row for row in rows if row.limit is not None]
    others = [row for row in rows if row.limit is None and not row.limit_source]
    unlimited = len(rows) - len(limited) - len(others)
    intervals, checks = sum(row.ci_low is not None for row in rows), sum(bool(row.check) for row in rows)
    return (
        f"Of the {len(rows):,} rows of the reference runs, {intervals:,} have an interval and {checks:,} have a check. "
        f"{len(limited):,} state a limit, and {unlimited:,} state why there is none. The other {len(others):,} have no value, or "
        "their metric has no limit, for example a count or a latency."
    )


def launches_page(name: str, runs: Iterable[Run]) -> str:
    """Return the README.md of a folder of launches."""
    own = dict.fromkeys(runs, name)
    return (
        f"# {name}\n\n"
        f"Each of the {len(own)} numbered folders is the run of one launch: the same experiments, measured in new processes. "
        "They contain rows and samples, and no pictures. The table shows the median over the launches. The value of a launch "
        "does not count if its samples were not steady, or if the host limited the speed. "
        "[docs/headlines.md](../../../docs/headlines.md) explains the columns.\n\n"
        f"{_table(map(_few_line, _grouped(_measured(own))))}\n"
    )


def _measured(runs: dict[Run, str]) -> Iterator[Measured]:
    """Yield the headlines of all runs, in the order of the runs.

    The sizes of the profile smoke are too small for headlines. A value whose samples do not record whether they were steady, or
    that was measured on a busy machine, stands on the page of its run, but is no headline.
    """
    for run, name in runs.items():
        material = Material(run)
        if material.information.get("profile") == "smoke":
            continue
        for headline in headlines(material):
            if headline.steady in ("unknown", BUSY):
                continue
            provenance = material.finished.get(f"{headline.row.notebook}/{headline.row.experiment}", {}).get("provenance") or {}
            stored = _environment(material, provenance)
            library = (provenance.get("source") or stored.get("source") or {}).get("hash") or ""
            version = provenance.get("code") or library  # earlier runs stored the hash of the whole library only
            yield Measured(headline, device_name({"environment": stored}), _fingerprint(stored), version, name)


def _environment(material: Material, provenance: dict) -> dict:
    """Return the environment that an experiment has stored, or that of the whole run if it has stored none."""
    stored = provenance.get("environment") or material.information.get("environment") or {}
    return material.environments.get(stored, {}) if isinstance(stored, str) else stored


def _fingerprint(environment: dict) -> str:
    """Return a string that identifies a machine: the hash of the host name and the identifiers of the GPUs."""
    gpus = sorted(str(gpu.get("uuid")) for gpu in environment.get("gpus") or [])
    return " ".join([str(environment.get("host_hash")), *gpus])


def _grouped(measured: Iterable[Measured]) -> list[Launches]:
    """Return the times, rates and ratios, grouped by device and label, in the order of the first run.

    A row that two runs share counts as one launch. Runs share a row if it was copied from one reference run to the other.
    """
    groups: dict[tuple[str, str], dict[tuple, Measured]] = {}
    for one in measured:
        if one.headline.quote.kind == "speed":
            members = groups.setdefault((one.device, one.headline.label), {})
            members.setdefault((one.machine, one.row.value, one.row.ci_low, one.row.ci_high), one)
    return [Launches(tuple(members.values())) for members in groups.values()]


def _largest(measured: Iterable[Measured], kind: str) -> list[Measured]:
    """Return the headlines of one kind. For each device, variant and metric, keep only the headline with the largest count."""
    chosen: dict[tuple, Measured] = {}
    for one in measured:
        key = (one.device, one.row.variant, one.row.metric)
        if one.headline.quote.kind == kind and (key not in chosen or one.headline.quote.count > chosen[key].headline.quote.count):
            chosen[key] = one
    return list(chosen.values())


def _table(lines: Iterable[dict[str, str]]) -> str:
    table = pd.DataFrame(list(lines))
    return markdown(table).strip() if len(table) else "None yet."


def _link_runs(text: str, names: Iterable[str], place: str) -> str:
    """Return the tables with links to the pages of the runs, whose names are in the last column.

    Args:
        text: tables as Markdown.
        names: names of the runs.
        place: path of the folder of all runs, relative to the page.
    """
    links = {name: f"[{name}]({place}/{name}/README.md)" for name in names}

    def linked(found: re.Match[str]) -> str:
        written = found.group(1).split(", ")
        return f"| {', '.join(links.get(name, name) for name in written)} |"

    return re.sub(r"\| ([^|]+) \|$", linked, text, flags=re.MULTILINE)


def _speed_line(quantity: Launches, others: Sequence[Measured] = ()) -> dict[str, str]:
    """Return a line in the table of times, rates and ratios.

    Args:
        quantity: the launches whose value the line shows.
        others: launches of other code versions, whose values the line lists.
    """
    within = quantity.within
    return {
        "": quantity.label,
        "device": quantity.device,
        "median": quoted_value(quantity.estimate.value, quantity.unit),
        "launches": str(len(quantity.members)),
        "machines": str(quantity.machines),
        "within one launch": "" if within is None else f"± {100 * within:.2g} %",
        "between launches": quantity.interval,
        "steady": quantity.steady,
        "% of limit": percent(quantity.fraction),
        "bounded by": quantity.bound,
        "other versions of the code": ", ".join(Launches(tuple(others)).by_version()),
        "runs": ", ".join(quantity.runs),
    }


def _few_line(quantity: Launches) -> dict[str, str]:
    """Return a line with the range of the launches. A bootstrap of two or three launches would give too narrow an interval."""
    line = _speed_line(quantity) | {"other versions of the code": str(quantity.versions), "between launches": quantity.range}
    names = {"other versions of the code": "versions of the code", "between launches": "lowest – highest launch"}
    return {names.get(name, name): text for name, text in line.items()}


def _mean_line(one: Measured) -> dict[str, str]:
    return {
        "": one.headline.label,
        "device": one.device,
        "mean": one.headline.value,
        "seeds": str(one.headline.quote.count),
        "95 % interval of the mean": one.headline.interval,
        "run": one.run,
    }


def _difference_line(one: Measured) -> dict[str, str]:
    return {
        "": one.headline.label,
        "device": one.device,
        "difference": one.headline.value,
        "tolerance": "" if one.row.check_tolerance is None else f"{one.row.check_tolerance:.2g}",
        "run": one.run,
    }


def _short_lines(measured: Sequence[Measured], enough: Iterable[Launches]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (label, line of the summary) for each headline."""

    names = ("quantity", "device", "value", "from", "95 % interval", "% of limit", "run")

    def line(
        label: str, device: str, value: str, launches: str, interval: str, share: float | None, run: str
    ) -> tuple[str, dict]:
        return label, dict(zip(names, (label, device, value, launches, interval, percent(share), run), strict=True))

    for quantity in enough:
        machines = "1 machine" if quantity.machines == 1 else f"{quantity.machines} machines"
        came_from = f"{len(quantity.members)} launches on {machines}"
        value = quoted_value(quantity.estimate.value, quantity.unit)
        yield line(
            quantity.label, quantity.device, value, came_from, quantity.interval, quantity.fraction, ", ".join(quantity.runs)
        )
    for one in _largest(measured, "mean"):
        headline, seeds = one.headline, f"{one.headline.quote.count} trainings"
        yield line(headline.label, one.device, headline.value, seeds, headline.interval, headline.fraction, one.run)
    for one in _largest(measured, "difference"):
        yield line(one.headline.label, one.device, one.headline.value, "1 training", "", None, one.run)
