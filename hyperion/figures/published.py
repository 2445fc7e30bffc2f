"""Tables of measurements published by others, with their source and known defects.

No number in these tables is stored as a result of this library.
"""

import functools
import tomllib
from pathlib import Path

import pandas as pd

from hyperion.errors import HyperionError

_FILE = Path(__file__).with_name("published_mi250x.toml")


def published_gemm() -> pd.DataFrame:
    """Return the MI250X table of matrix products.

    Its columns are dtype, n, tflops, percent_of_peak (NaN without a peak), source and defects.
    """
    section = _content()["gemm"]
    peaks = section["peak_tflops"]
    lines = [
        {"dtype": dtype, "n": n, "tflops": tflops, "percent_of_peak": 100 * tflops / peaks.get(dtype, float("nan"))}
        for dtype, column in section["tflops"].items()
        for n, tflops in zip(section["n"], column, strict=True)
    ]
    return _marked(lines, section)


def published_bandwidth() -> pd.DataFrame:
    """Return the MI250X table of bandwidths. Its columns are elements, gb_s, percent_of_peak, source and defects."""
    section = _content()["bandwidth"]
    lines = [
        {"elements": elements, "gb_s": rate, "percent_of_peak": 100 * rate / section["peak_gb_s"]}
        for elements, rate in zip(section["elements"], section["gb_s"], strict=True)
    ]
    return _marked(lines, section)


def published_baseline() -> pd.DataFrame:
    """Return the MI250X table of training steps.

    Its columns are model, input, times that end with _ms, memory_mib, samples_per_s, source and defects.
    """
    section = _content()["baseline"]
    lines = [{column: model[column] for column in section["columns"]} for model in section["models"]]
    table = _marked(lines, section)
    table["defects"] = ["; ".join(model["defects"] + section["defects"]) for model in section["models"]]
    return table


def published_tables(*names: str) -> list[tuple[str, pd.DataFrame, str]]:
    """Return (caption, table, known defects) for each table. The cells are strings with all published digits.

    Args:
        names: any of gemm, bandwidth, baseline, batch_scaling, scaling, llama_lora and compilation. Without names, all tables are
            returned.

    Raises:
        HyperionError: there is no table with this name.
    """
    tables: dict[str, tuple[str, pd.DataFrame, str]] = dict(zip(("gemm", "bandwidth", "baseline"), _first_tables(), strict=True))
    for further in _content()["further"]:
        table = pd.DataFrame(further["rows"], columns=further["columns"], dtype=object).map(_as_published)
        tables[further["name"]] = (further["title"], table, "; ".join(further["defects"]))
    if unknown := set(names) - set(tables):
        raise HyperionError(
            f"no published table is named {', '.join(sorted(unknown))}", next_step=f"use one of {', '.join(tables)}"
        )
    return [tables[name] for name in names or tables]


def _first_tables() -> list[tuple[str, pd.DataFrame, str]]:
    gemm, streams, models = published_gemm(), published_bandwidth(), published_baseline()
    rates = gemm.pivot(index="n", columns="dtype", values="tflops")[list(dict.fromkeys(gemm["dtype"]))].reset_index()
    rates.columns = ["M = N = K", *(f"{dtype} [TFLOPS]" for dtype in rates.columns[1:])]
    moved = pd.DataFrame(
        {"elements": streams["elements"], "add [GB/s]": streams["gb_s"], "% of 1638 GB/s": streams["percent_of_peak"].round(1)}
    )
    own = "; ".join(
        f"{model['model']}: {'; '.join(model['defects'])}" for model in _content()["baseline"]["models"] if model["defects"]
    )
    steps = models.drop(columns=["source", "defects"])
    steps.columns = [_with_unit(column) for column in steps]
    tables = ((gemm.attrs, rates, ""), (streams.attrs, moved, ""), (models.attrs, steps, own))
    return [
        (attrs["title"], table.map(_as_published), "; ".join(filter(None, (attrs["defects"], more))))
        for attrs, table, more in tables
    ]


def _with_unit(column: str) -> str:
    name, _, suffix = column.rpartition("_")
    unit = {"ms": "ms", "mib": "MiB"}.get(suffix)
    return f"{name} [{unit}]" if unit else column.replace("samples_per_s", "samples/s")


def _as_published(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def published_source() -> dict[str, str]:
    """Return the source of the published tables, with the keys title, machine and found_in."""
    return dict(_content()["source"])


def _marked(lines: list[dict], section: dict) -> pd.DataFrame:
    source, defects = published_source(), "; ".join(section["defects"])
    table = pd.DataFrame(lines).assign(source=f"{source['title']}; {source['machine']}", defects=defects)
    table.attrs = {"title": section["title"], "defects": defects}
    return table


@functools.cache
def _content() -> dict:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
