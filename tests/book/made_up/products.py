"""Rows of best products and of operands' data that no machine measured: test data, valid by every rule of a row."""

from dataclasses import replace

import pandas as pd

from hyperion.results import Row
from tests.book.made_up.hardware import timed

LIMITS = "04_limits_explained"
# Limit, share of it that the fastest product reaches, its shape, shapes seen of 512.
GPU = {
    "fp64": (66.9, 0.94, (8192, 4096, 8192), 301),
    "fp32": (66.9, 0.77, (6144, 6144, 2048), 344),
    "tf32": (535.3, 0.81, (8192, 8192, 4096), 512),
    "fp16": (1070.5, 0.72, (5120, 8192, 3072), 512),
    "bf16": (1070.5, 0.75, (8192, 4096, 4096), 512),
    "fp8_e4m3fn": (2141.0, 0.68, (8192, 8192, 8192), 512),
    "int8": (2141.0, 0.71, (8192, 6144, 8192), 512),
}
CPU = {"fp32": (None, 0.11, (1024, 512, 768), 41), "bf16": (None, 0.19, (768, 768, 1024), 64)}
UNSUPPORTED = {
    "tf32": "unsupported: TF32 is a format of GPU matrix units; a CPU multiplies in fp32",
    "fp8": "unsupported: this CPU has no fp8 instructions: PyTorch would convert the operands to fp32, which measures fp32",
}
SHAPES = {"query, key, value of GPT-2": (8192, 2304, 768, 0.55), "MLP of a 7B Llama": (4096, 11008, 4096, 0.92)}
# Rate over normal data's alone, power in W, clock in MHz.
DATA = {
    "zeros": (1.31, 362.0, 1980.0),
    "constant": (1.27, 398.0, 1980.0),
    "uniform": (1.02, 688.0, 1545.0),
    "normal": (1.0, 699.0, 1515.0),
    "activations": (1.05, 690.0, 1590.0),
}
_CHECK = {"check": "float64 slice", "check_error": 2e-4, "check_tolerance": 6e-3}


def best_rows(random, limited: bool) -> list[Row]:
    rows = []
    for dtype, (limit, share, shape, seen) in (GPU if limited else CPU).items():
        known = dict(zip("mnk", shape, strict=True)) | {"cache": "cold", "data": "normal"}
        state = {"clock_mhz": 1755.0, "power_w": 690.0} if limited else {}
        found = timed(
            random,
            LIMITS,
            "best_products",
            "finalist",
            "gemm_tflops",
            (limit or 1) * share,
            limit,
            dtype=dtype,
            params=known,
            **state,
            **_CHECK,
        )
        stopped = "all shapes seen" if seen == 512 else "limit of 5 s"
        told = known | {"seen": seen, "shapes": 512, "stopped": stopped}
        rows += [found, replace(found, variant="fastest found", params=told)]
        for name, (m, n, k, part) in SHAPES.items():
            params = {"shape": name, "m": m, "n": n, "k": k, "cache": "cold", "data": "normal"}
            rate = (limit or 1) * share * part
            rows.append(
                timed(
                    random,
                    LIMITS,
                    "best_products",
                    "given shape",
                    "gemm_tflops",
                    rate,
                    limit,
                    dtype=dtype,
                    params=params,
                    **_CHECK,
                )
            )
    for dtype, reason in {} if limited else UNSUPPORTED.items():
        rows.append(
            Row(
                notebook=LIMITS,
                experiment="best_products",
                variant="fastest found",
                metric="gemm_tflops",
                value=None,
                dtype=dtype,
                params={"cache": "cold", "data": "normal"},
                value_reason=reason,
            )
        )
    return rows


def data_rows(random, limited: bool) -> list[Row]:
    """Of a GPU, whose clock follows its power, or of a CPU that tells neither and has one speed."""
    rows, size, dtype = [], (8192 if limited else 256), ("bf16" if limited else "fp32")
    normal, limit = (690.0, 1070.5) if limited else (0.1, None)
    for data, (alone, watts, megahertz) in DATA.items():
        for turn in ("in turn", "alone"):
            params = {"m": size, "n": size, "k": size, "cache": "hot", "timed": turn}
            factor = alone if turn == "alone" and limited else 1.0
            state = {"power_w": watts if turn == "alone" else 610.0, "clock_mhz": megahertz} if limited else {}
            common = {"dtype": dtype, **state}
            rows.append(
                timed(
                    random, LIMITS, "operand_data", data, "gemm_tflops", normal * factor, limit, params=params, **common, **_CHECK
                )
            )
            if data != "normal":
                over = params | {"over": "normal"}
                metric = "rate_ratio" if turn == "alone" else "speedup"
                rows.append(timed(random, LIMITS, "operand_data", data, metric, factor, None, params=over, **common))
        rows.append(_energy(random, data, dtype, params, watts / (normal * alone) if limited else None))
    return rows


def _energy(random, data: str, dtype: str, params: dict, joules: float | None) -> Row:
    if joules is not None:
        params = params | {"power_of": "device"}
        return timed(random, LIMITS, "operand_data", data, "energy_j_per_tflop", joules, None, dtype=dtype, params=params)
    reason = "no power: CPU power counters need rights that an ordinary user has not"
    return Row(
        notebook=LIMITS,
        experiment="operand_data",
        variant=data,
        metric="energy_j_per_tflop",
        value=None,
        dtype=dtype,
        params=params,
        value_reason=reason,
    )


def products_chapters(random, limited: bool):
    """(notebook, experiment, rows, samples) of both experiments."""
    samples = pd.DataFrame({"time_s": [0.1]})
    return [
        (LIMITS, "best_products", best_rows(random, limited), samples),
        (LIMITS, "operand_data", data_rows(random, limited), samples),
    ]
