"""A run beside the reference machines and beside what was published, number by number."""

from collections.abc import Iterable

import pandas as pd

from hyperion.book.headlines import Headline, headlines
from hyperion.figures.formats import number, percent
from hyperion.figures.material import Material, made_from_rows
from hyperion.figures.published import published_bandwidth, published_baseline, published_gemm
from hyperion.paths import reference_folder
from hyperion.results import Run

_PUBLISHED_MODELS = {"resnet50": "ResNet-50", "encoder": "Transformer encoder"}


def reference_machines(material: Material) -> list[Material]:
    """The committed reference runs of real data that this run is not itself a replay or a copy of."""
    found = [Material(Run.open(path.parent)) for path in sorted(reference_folder().glob("*/run.json"))]
    own = {material.run.folder.resolve().name, *material.replayed}
    return [m for m in found if "synthetic" not in m.data_sources and m.run.folder.name not in own]


@made_from_rows("the comparison")
def comparison_table(material: Material, references: Iterable[Material]) -> pd.DataFrame:
    """The run's headlines, one line each: its value and share of the limit, the same of every reference machine, how many
    times the reference's value it is, and the published MI250X value of the same quantity where there is one.

    A quantity of another model, format or data source is another quantity: its cell stays empty.
    """
    others = [(m.run.folder.name, {_identity(h): h for h in headlines(m)}) for m in references]
    return pd.DataFrame([_line(headline, others) for headline in headlines(material)])


def _line(headline: Headline, others: list[tuple[str, dict]]) -> dict[str, str]:
    line = {"": headline.label, "this run": headline.value, "% of limit": percent(headline.fraction)}
    for name, quantities in others:
        same = quantities.get(_identity(headline))
        ratio = headline.row.value / same.row.value if same and same.row.value else None
        line |= {
            name: same.value if same else "",
            f"% of limit, {name}": percent(same.fraction) if same else "",
            f"this run / {name}": number(ratio, 3),
        }
    return line | {"MI250X, as published": _published(headline)}


def _identity(headline: Headline) -> tuple:
    return headline.label, headline.row.variant, headline.row.dtype, headline.row.data_source


def _published(headline: Headline) -> str:
    """The published number of the same quantity, "" where nothing comparable was published."""
    row = headline.row
    value = None
    if row.metric == "gemm_tflops":
        table = published_gemm()
        value = table.loc[table["dtype"] == row.dtype, "tflops"].max()
    elif row.metric == "bandwidth_gb_s" and row.variant == "add":
        value = published_bandwidth()["gb_s"].max()
    elif row.metric == "samples_per_s" and row.dtype == "fp32" and row.variant in _PUBLISHED_MODELS:
        table = published_baseline().set_index("model")
        value = table.loc[_PUBLISHED_MODELS[row.variant], "samples_per_s"]
    return "" if value is None or value != value else f"{value:,g} {row.unit}"
