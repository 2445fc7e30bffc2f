"""Compare result files: which work they did, how fast each was, and which differences the intervals support.

The confidence interval of a result is that of the median over the steps of one run. It does not include the variation between
launches. Chapter 2.10 compares several launches.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hyperion.errors import HyperionError
from hyperion.figures.style import add_notes, look, new_figure, png, styled
from hyperion.frameworks.config import GpuPrices
from hyperion.frameworks.result import UNKNOWN, Result, read_result
from hyperion.results import Estimate
from hyperion.results.statistics import independent_ratio_estimate, median_estimate
from hyperion.untrusted import printable

CAVEAT = "The 95 % intervals cover the steps of one run each. Differences between launches are not in them."
# A bootstrap interval of the median of fewer samples is too short.
MIN_STEPS = 5
_SHOWN = 40  # characters of a value that a difference shows
_WORK: dict[str, Callable[[Result], object]] = {
    "global batch": lambda result: result.training_config.global_batch_size,
    "sequence length": lambda result: result.training_config.sequence_length,
    "steps": lambda result: result.training_config.max_steps,
    "learning rate": lambda result: _rates(result.learning_rates),
    "precision": lambda result: result.precision,
    "data set": lambda result: result.dataset,
}
# These values are known only if the run was observed. An unknown value is no difference: the report says that it is not known.
_OBSERVED: dict[str, Callable[[Result], object]] = {
    "initial state": lambda result: result.training_config.initial_state_sha256,
    "order of the rows": lambda result: result.training_config.row_order_sha256,
    "optimizer": lambda result: result.training_config.optimizer,
    "betas": lambda result: result.training_config.betas,
    "eps": lambda result: result.training_config.eps,
    "weight decay": lambda result: result.training_config.weight_decay,
    "clipping": lambda result: result.training_config.clip_norm,
    "master dtype": lambda result: result.training_config.master_dtype,
}
# Null also if no gradient is reduced, so it is compared, but a null is not reported as unknown.
_REDUCTION: dict[str, Callable[[Result], object]] = {"reduction dtype": lambda result: result.training_config.reduction_dtype}


@dataclass(frozen=True)
class Price:
    """The user's price of a GPU hour, and where it comes from."""

    per_gpu_hour: float
    source: str


@dataclass(frozen=True)
class Comparison:
    """A comparison of results.

    Args:
        results: the results, sorted by key.
        rates: tokens per second and GPU of each result.
        differences: differences in work between results of the same model; empty unless the comparison was forced.
        unknown: for each result with values that are not known, one line with their names.
        verdicts: one sentence for each pair that is compared.
        prices: price of a GPU hour by platform. Without prices, no price of tokens is shown.
    """

    results: list[Result]
    rates: list[Estimate]
    differences: list[str]
    unknown: list[str]
    verdicts: list[str]
    prices: Mapping[str, Price]


def load_results(
    folder: Path,
    platforms: Sequence[str] | None = None,
    frameworks: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
) -> list[Result]:
    """Return the selected results of a folder, sorted by key. The platform is read from the file, not from its name.

    Raises:
        HyperionError: no result is selected, a file is damaged, or two files contain results of the same combination.
    """
    found: dict[tuple, tuple[Path, Result]] = {}
    for path in sorted(folder.glob("train_*.json")):
        result = read_result(path)
        if result.key in found:
            raise HyperionError(
                f"{path.name} and {found[result.key][0].name} both state {' '.join(result.key)}",
                where=folder,
                next_step="move one of the files away",
            )
        found[result.key] = path, result
    wanted = [(0, platforms), (1, frameworks), (4, precisions)]
    chosen = [key for key in sorted(found) if all(not names or key[place] in _words(names) for place, names in wanted)]
    if not chosen:
        here = "; ".join(" ".join(key) for key in sorted(found)) or "no file train_*.json"
        select = "select one of these results with --platform, --frameworks and --precision, or leave these options out"
        raise HyperionError(
            f"no result is selected; the folder has: {here}",
            where=folder,
            next_step=select if found else "run `hyperion frameworks run`, or name another folder with --results-dir",
        )
    return [found[key][1] for key in chosen]


def compare_results(results: Sequence[Result], force: bool = False, prices: Mapping[str, Price] | None = None) -> Comparison:
    """Compare each result with the fastest result of the same model, and each framework with itself on the other platform.

    Raises:
        HyperionError: results of the same model did different work, and the comparison is not forced.
    """
    ordered = sorted(results, key=lambda result: result.key)
    differences = [line for group in _by_model(ordered).values() for line in _differences(group)]
    if differences and not force:
        raise HyperionError(
            "the work differs, so their speeds cannot be compared:\n" + "\n".join(f"  {line}" for line in differences),
            where="hyperion frameworks compare",
            next_step="select results of equal work with --platform, --frameworks or --precision, or use --force",
        )
    rates = [_rate(result) for result in ordered]
    verdicts = [line for group in _by_model(ordered).values() for line in _verdicts(group, ordered)]
    unknown = [line for result in ordered if (line := _unknown(result, ordered))]
    return Comparison(ordered, rates, differences, unknown, verdicts, prices or {})


def choose_prices(stated: GpuPrices, source: str, options: Sequence[str]) -> dict[str, Price]:
    """Return the price of a GPU hour by platform. Prices in `options` override those in the configuration.

    Args:
        stated: prices in the configuration.
        source: where the prices in the configuration come from.
        options: values of the option --price, such as "amd=1.5".

    Raises:
        HyperionError: an option is not a platform with a price above 0.
    """
    source = source or "config.yaml, which states no source"
    prices = {platform: Price(value, source) for platform, value in vars(stated).items() if value is not None}
    for word in options:
        platform, _, number = word.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if platform not in vars(stated) or not 0 < value < math.inf:
            next_step = "write --price amd=1.5 or --price nvd=1.5, with the price of a GPU hour"
            raise HyperionError(f"{word!r} is not a platform with a price above 0", where="--price", next_step=next_step)
        prices[platform] = Price(value, "--price")
    return prices


def price_note(prices: Mapping[str, Price]) -> str:
    """Return one line with the prices, their sources, and the formula for the price of tokens."""
    stated = ", ".join(f"{platform} {price.per_gpu_hour:g} ({price.source})" for platform, price in sorted(prices.items()))
    return (
        f"Prices of a GPU hour: {stated}. The price of 1M tokens is price x GPUs / (tokens per hour) x 1,000,000 for the timed "
        "steps. It contains no start-up and no idle time."
    )


def ratio(first: Result, second: Result) -> Estimate:
    """Return tokens per second and GPU of `first`, divided by that of `second`."""
    tokens = first.step_tokens / first.training_config.num_gpus / (second.step_tokens / second.training_config.num_gpus)
    return independent_ratio_estimate(first.timed_s, second.timed_s).map(lambda value: value * tokens)


def verdict(first: Result, second: Result, among: Sequence[Result] = ()) -> str:
    """Return a sentence that says which of two results is faster. They tie if the interval of their ratio contains 1.

    Args:
        first, second: the results.
        among: all results of the comparison. Names contain the data set and the precision if these differ among them.
    """
    a, b = _name(first, among), _name(second, among)
    fewest = min(len(first.timed_s), len(second.timed_s))
    if fewest < MIN_STEPS:
        return f"{a} and {b} are not ranked: {fewest} timed steps are too few, at least {MIN_STEPS} are needed"
    found = ratio(first, second)
    if found.ci_low <= 1 <= found.ci_high:
        return f"{a} and {b} tie: {found.value:.3f} x [{found.ci_low:.3f}, {found.ci_high:.3f}] tokens/s/GPU"
    if found.value < 1:
        a, b, found = b, a, found.map(lambda value: 1 / value)
    return (
        f"{a} is {found.value:.3f} x [{found.ci_low:.3f}, {found.ci_high:.3f}] as fast as {b} in tokens/s/GPU, in these two runs"
    )


def table(comparison: Comparison) -> Table:
    """Return the table of a comparison for a console."""
    shown = Table(*_headings(comparison))
    for cells in _cells(comparison):
        shown.add_row(*cells)
    return shown


def markdown(comparison: Comparison, picture: str) -> str:
    """Return the report of a comparison.

    Args:
        comparison: the comparison.
        picture: file name of the picture.
    """
    lines = ["# Comparison of frameworks", ""]
    if comparison.differences:
        lines += ["**Forced: the work differs, so a ratio of speeds says little.**", ""]
        lines += [*(f"- {line}" for line in comparison.differences), ""]
    headings = _headings(comparison)
    lines += [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in _cells(comparison)]
    lines += ["", f"![Throughput, losses, learning rates and step times]({picture})", "", "## Which is faster", ""]
    lines += [f"- {line}." for line in comparison.verdicts] or ["There is only one result of each model."]
    lines += ["", "## What the numbers are", ""]
    lines += [
        f"- Rates are medians over the timed steps. {CAVEAT}",
        "- A GPU of a result on the platform `cpu` is a rank on a CPU. Such a result only rehearses the scripts.",
        *(f"- {line}" for line in comparison.unknown),
    ]
    lines += [f"- {price_note(comparison.prices)}"] if comparison.prices else []
    return "\n".join(lines) + "\n"


def draw(comparison: Comparison, dpi: int) -> bytes:
    """Return the picture of a comparison as PNG: throughput, losses, learning rates and step times."""
    results, names = comparison.results, [_name(result, comparison.results) for result in comparison.results]
    with styled():
        devices = ", ".join(sorted({(result.gpu_info.device_name or "device not stated")[:_SHOWN] for result in results}))
        figure, panels = new_figure(
            "Comparison of frameworks", _drawable(devices), 2, lines=2, width=12, height=7.2 + 0.18 * len(results)
        )
        figure.set_dpi(dpi)
        bars, losses, rates, times = panels
        for place, estimate in enumerate(comparison.rates):
            style = look("", place)
            error = [[estimate.value - estimate.ci_low], [estimate.ci_high - estimate.value]]
            bars.barh(place, estimate.value, xerr=error, color=style["color"], height=0.65)
        bars.set_yticks(range(len(names)), names)
        bars.invert_yaxis()
        bars.set(title="Throughput", xlabel="tokens/s/GPU (median and 95 % interval over steps)")
        for place, result in enumerate(results):
            steps = range(1, len(result.step_times) + 1)
            # Equal work gives curves on top of each other, so later ones are thinner.
            style = look("", place) | {"linewidth": 1 + 2 * (1 - place / len(results)), "markersize": 3, "label": names[place]}
            losses.plot(steps, result.loss_values, **style)
            rates.plot(steps, result.learning_rates, **style)
            times.plot(steps, result.step_times, **style)
        losses.set(title="Loss", xlabel="step", ylabel="nats")
        rates.set(title="Learning rate", xlabel="step", ylim=(0, None))
        times.set(title="Step time", xlabel="step", ylabel="s", yscale="log")
        figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
        add_notes(figure, [_drawable(f"Forced although the work differs: {line}") for line in comparison.differences])
        return png(figure)


def _drawable(text: str) -> str:
    """Return a text from a file for a picture. Matplotlib would read text between dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def _headings(comparison: Comparison) -> list[str]:
    price = ["price of 1M tokens [95 %]"] if comparison.prices else []
    return [
        "combination",
        "GPUs",
        "tokens/s/GPU [95 %]",
        *price,
        "step (s)",
        "first loss",
        "last loss",
        "peak memory (GB)",
        "from",
    ]


def _cells(comparison: Comparison) -> list[list[str]]:
    rows = []
    for result, rate in zip(comparison.results, comparison.rates, strict=True):
        memory = result.memory_metrics
        peak = memory.peak_memory_allocated_gb or memory.peak_memory_reserved_gb or memory.peak_memory_in_use_gb
        rows.append(
            [
                f"{_name(result)} {result.dataset} {result.precision}",
                str(result.training_config.num_gpus),
                f"{rate.value:,.1f} [{rate.ci_low:,.1f}, {rate.ci_high:,.1f}]",
                *([_token_price(rate, comparison.prices.get(result.platform))] if comparison.prices else []),
                f"{result.performance_metrics.avg_step_time_seconds:.4g}",
                f"{result.loss_values[0]:.4f}",
                f"{result.loss_values[-1]:.4f}",
                f"{peak:.2f}" if peak else "not measured",
                result.source,
            ]
        )
    return rows


def _token_price(rate: Estimate, price: Price | None) -> str:
    if price is None:
        return "no price"
    # tokens/s/GPU is the rate of one GPU, so the number of GPUs cancels.
    found = rate.map(lambda tokens_per_s: price.per_gpu_hour / (3600 * tokens_per_s) * 1e6)
    return f"{found.value:.4g} [{found.ci_low:.4g}, {found.ci_high:.4g}]"


def _by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[result.model].append(result)
    return groups


def _differences(group: Sequence[Result]) -> list[str]:
    lines = []
    for name, read in (_WORK | _OBSERVED | _REDUCTION).items():
        values: dict[object, list[str]] = defaultdict(list)
        for result in group:
            values[read(result)].append(f"{result.platform} {result.framework} {result.precision}")
        values.pop(None, None)
        if len(values) > 1:
            parts = [f"{str(value)[:_SHOWN]} ({', '.join(names)})" for value, names in values.items()]
            lines.append(f"{group[0].model}, {name}: {' / '.join(parts)}")
    return lines + _first_losses(group)


def _first_losses(group: Sequence[Result]) -> list[str]:
    """Return a line if results with the same weights, rows and precision have different losses in the first step."""
    from hyperion.engines.judge import first_loss_tolerance  # here, because it imports torch

    alike: dict[tuple, list[Result]] = defaultdict(list)
    for result in group:
        training = result.training_config
        if training.initial_state_sha256 and training.row_order_sha256 and result.precision in ("fp32", "bf16"):
            key = training.initial_state_sha256, training.row_order_sha256, training.sequence_length, result.precision
            alike[key].append(result)
    lines = []
    for (*_, precision), results in alike.items():
        losses = [result.loss_values[0] for result in results]
        if not max(losses) - min(losses) <= first_loss_tolerance(precision) * min(losses):
            parts = [f"{loss:.6g} ({one.platform} {one.framework})" for loss, one in zip(losses, results, strict=True)]
            lines.append(f"{group[0].model}, loss of the first step, in {precision} from the same weights: {' / '.join(parts)}")
    return lines


def _unknown(result: Result, among: Sequence[Result]) -> str:
    names = [name for name, read in (_WORK | _OBSERVED).items() if read(result) in (None, UNKNOWN)]
    return f"{_name(result, among)} does not state these, so they may differ: {', '.join(names)}." if names else ""


def _rates(rates: Sequence[float]) -> str:
    """Return the learning rates of all steps as a text. A log rounds them to seven digits."""
    rounded = [f"{rate:.6g}" for rate in rates]
    if len(set(rounded)) == 1:
        return rounded[0]
    return f"{len(rates)} rates, sha256 {hashlib.sha256(' '.join(rounded).encode()).hexdigest()[:6]}"


def _verdicts(group: Sequence[Result], among: Sequence[Result]) -> list[str]:
    fastest = max(group, key=lambda result: _rate(result).value)
    pairs = [(fastest, other) for other in group if other is not fastest]
    for first in group:
        for second in group:
            same = (first.framework, first.dataset, first.precision) == (second.framework, second.dataset, second.precision)
            if same and first.platform < second.platform and fastest not in (first, second):
                pairs.append((first, second))
    return [verdict(first, second, among) for first, second in pairs]


def _rate(result: Result) -> Estimate:
    each = result.step_tokens / result.training_config.num_gpus
    return median_estimate(result.timed_s).map(lambda seconds: each / seconds)


def _name(result: Result, among: Sequence[Result] = ()) -> str:
    dataset = f" {result.dataset}" if len({one.dataset for one in among}) > 1 else ""
    precision = f" {result.precision}" if len({one.precision for one in among}) > 1 else ""
    return f"{result.platform} {result.framework} {result.model}{dataset}{precision}"


def _words(names: Sequence[str]) -> list[str]:
    return [word.strip() for name in names for word in name.split(",")]
