"""Sentences made from rows: pick the one row that a claim rests on, and let its numbers fill the text."""

from collections.abc import Iterable

from hyperion.errors import HyperionError
from hyperion.figures.formats import number, percent
from hyperion.figures.tables import prediction_error
from hyperion.results import Row


def pick(rows: Iterable[Row], metric: str, best: bool = False, **wanted) -> Row:
    """The one measured row of a metric whose columns or parameters have the wanted values.

    Args:
        best: of several, take the best by the metric's direction.
        wanted: `variant="copy"`, `dtype="bf16"`, or a parameter such as `m=8192` or `split="valid"`.

    Raises:
        HyperionError: there is none, or there are several and `best` was not asked for.
    """
    fitting = [row for row in rows if row.metric == metric and _fits(row, wanted)]
    chosen = [row for row in fitting if row.value is not None]
    asked = ", ".join([metric, *(f"{name}={value!r}" for name, value in wanted.items())])
    if not chosen:
        reasons = "; ".join(dict.fromkeys(row.value_reason for row in fitting))
        raise HyperionError(
            f"no measured row of {asked}" + (f" ({reasons})" if reasons else ""),
            next_step="run the experiment it comes from, or ask for another",
        )
    if len(chosen) > 1 and not best:
        raise HyperionError(f"{len(chosen)} rows of {asked}", next_step="say which by a column or parameter, or best=True")
    lowest = chosen[0].definition.direction == "lower"
    return (min if lowest else max)(chosen, key=lambda row: row.value)


_SMALLEST_PERCENT = 5e-4  # what rounds to 0.0 % is written as a power of ten


def fill(template: str, **named: Row | float) -> str:
    """The template with its fields filled from rows, so that no number in it is typed.

    Fields of a row `best`: `{best.value}` and `{best.limit}` with unit, `{best.share}` of the limit in percent,
    `{best.predicted}`, `{best.error}` of the prediction with its sign, `{best.interval}`, `{best.variant}`,
    `{best.dtype}`, and any of its parameters. A plain number, computed from rows, is written to four digits.

    Raises:
        HyperionError: the text speaks of something that is not given, or that the row does not have.
    """
    values = {name: _Quoted(name, row) if isinstance(row, Row) else number(row) for name, row in named.items()}
    try:
        return template.format(**values)
    except KeyError as error:
        remedy = f"give it: teach(template, {error.args[0]}=pick(result.rows, …))"
        raise HyperionError(f"the text speaks of {error.args[0]!r}, which it was not given", next_step=remedy) from error


def verdict(speedup: Row) -> str:
    """What a ratio of speeds allows to say: "faster than", "slower than", or "not told apart from"."""
    if speedup.ci_low > 1:
        return "faster than"
    return "slower than" if speedup.ci_high < 1 else "not told apart from"


def compared_steps(row: Row) -> str:
    """Which steps a comparison of losses is about: "steps 1 to 25"; "200 steps" where it is about all of them."""
    if "first" not in row.params:
        return f"{row.params['steps']} steps"
    return f"steps {row.params['first']} to {row.params['last']}"


def quoted_value(value: float, unit: str) -> str:
    """A value with its unit as a sentence has it: fractions in percent."""
    if unit == "fraction":
        return f"{percent(value)} %" if value == 0 or abs(value) >= _SMALLEST_PERCENT else f"{value:.1e}"
    shown = f"{number(value / 1e6)} M" if abs(value) >= 1e6 else number(value)
    return shown + {"1": "", "perplexity": "", "ratio": " ×"}.get(unit, f" {unit}")


class _Quoted:
    """A row as a template sees it; what the row lacks cannot be quoted."""

    def __init__(self, name: str, row: Row):
        self._name, self._row = name, row

    def __getattr__(self, field: str) -> str:
        row = self._row
        quotable = {
            "value": row.value,
            "limit": row.limit,
            "predicted": row.predicted,
            "share": row.fraction_of_limit,
            "error": prediction_error(row),
            "low": row.ci_low,
            "high": row.ci_high,
        }
        if field in ("variant", "dtype", "experiment", "data_source"):
            return getattr(row, field)
        if field == "interval":
            return f"{self.low.removesuffix(f' {row.unit}')} to {self.high}"
        found = quotable[field] if field in quotable else row.params.get(field)
        if found is None:
            reason = {"value": row.value_reason, "limit": row.limit_source, "share": row.limit_source}.get(field, "")
            raise HyperionError(
                f"the text speaks of {self._name}.{field}, which the row of {row.metric} does not have"
                + (f" ({reason})" if reason else ""),
                next_step="say it only where the row has it",
            )
        if field in ("share", "error"):
            return f"{percent(found, signed=field == 'error')} %"
        if field in quotable:
            return quoted_value(found, row.unit)
        # Sizes such as 8192 are known by their digits; millions have to be counted.
        return f"{found:,}" if isinstance(found, int) and found >= 100_000 else f"{found}"


def _fits(row: Row, wanted: dict) -> bool:
    columns = ("notebook", "experiment", "variant", "dtype", "rank", "data_source")
    return all((getattr(row, name) if name in columns else row.params.get(name)) == value for name, value in wanted.items())
