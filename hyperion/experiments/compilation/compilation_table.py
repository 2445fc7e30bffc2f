"""The compilation rows as one flat table for spreadsheets, one line per model and mode."""

import json
from collections.abc import Iterable

import pandas as pd

from hyperion.results import Row
from hyperion.units import GIB

COLUMNS = (
    "model",
    "variant",
    "time_ms",
    "mem_gb",
    "speedup",
    "speedup_ci_low",
    "speedup_ci_high",
    "dtype",
    "reps",
    "compile_s",
    "graph_breaks",
    "break_even_calls",
    "error_from_eager",
    "error_from_float64",
    "mem_reserved_gb",
    "mem_kind",
    "batch",
    "input",
    "weights",
    "reason",
)
_MEMORY = {"peak_memory_gib": "device tensors", "peak_rss_gib": "resident host memory"}


def compilation_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line per model and mode with the columns COLUMNS: times in ms, memory in GB (10^9 bytes).

    Cells without value are None; `reason` says why there is no time.
    """
    lines: dict[tuple, list[Row]] = {}
    for row in rows:
        lines.setdefault((row.params["model"], row.dtype, row.params["batch"], row.variant), []).append(row)
    return pd.DataFrame([_line(group) for group in lines.values()], columns=list(COLUMNS), dtype=object)


def compilation_csv(rows: Iterable[Row]) -> str:
    """Return the table as CSV. Numbers round-trip exactly."""
    return compilation_table(rows).to_csv(index=False, lineterminator="\n")


def compilation_json(rows: Iterable[Row]) -> str:
    """Return the table as a JSON list of objects."""
    lines = compilation_table(rows).to_dict("records")
    return json.dumps(lines, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _line(rows: list[Row]) -> dict:
    first = rows[0]
    time, speedup = _row(rows, "inference_time_s"), _row(rows, "speedup")
    memory = next((row for metric in _MEMORY if (row := _row(rows, metric)) and row.value is not None), None)
    reserved = _value(_row(rows, "reserved_memory_gib"))
    differences = {row.params["from"]: row.value for row in rows if row.metric == "relative_difference"}
    return {
        "model": first.params["model"],
        "variant": first.variant,
        "time_ms": None if time is None or time.value is None else 1e3 * time.value,
        "mem_gb": None if memory is None or memory.value is None else memory.value * GIB / 1e9,
        "speedup": _value(speedup),
        "speedup_ci_low": speedup and speedup.ci_low,
        "speedup_ci_high": speedup and speedup.ci_high,
        "dtype": first.dtype,
        "reps": time and time.n,
        "compile_s": _value(_row(rows, "compile_time_s")),
        "graph_breaks": _value(_row(rows, "graph_breaks")),
        "break_even_calls": _value(_row(rows, "break_even_calls")),
        "error_from_eager": differences.get("eager"),
        "error_from_float64": differences.get("float64"),
        "mem_reserved_gb": None if reserved is None else reserved * GIB / 1e9,
        "mem_kind": None if memory is None else _MEMORY[memory.metric],
        **{name: first.params[name] for name in ("batch", "input", "weights")},
        "reason": (time and time.value_reason) or None,
    }


def _row(rows: list[Row], metric: str) -> Row | None:
    return next((row for row in rows if row.metric == metric), None)


def _value(row: Row | None) -> float | None:
    return None if row is None else row.value
