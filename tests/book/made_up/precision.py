"""Rows of the chapters on precision and memory that nothing was measured for: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.results import Row

PRECISION, MEMORY = "03_mixed_precision", "04_memory_optimization"
MODELS = {"gpt2_124m": 8192, "resnet18": 512}
MILLISECONDS = {"fp32": 140.0, "tf32": 40.0, "bf16": 28.0}
GIB = {"fp32": 10.5, "tf32": 10.5, "bf16": 8.9, "fp16": 8.9}
PHASES = ("before forward", "after forward", "after backward", "after step")


def timed(value: float, **columns) -> dict:
    return columns | {"value": value, "n": 30, "ci_low": 0.98 * value, "ci_high": 1.02 * value}


def variant_rows() -> list[Row]:
    rows = []
    for model, batch in MODELS.items():

        def row(metric, dtype, model=model, batch=batch, **columns):
            params = {"batch": batch} | columns.pop("params", {})
            shared = {"notebook": PRECISION, "experiment": "precision_variants", "data_source": "mirror"}
            return Row(**shared, variant=model, metric=metric, dtype=dtype, params=params, **columns)

        for dtype, gib in GIB.items():
            whole = {"phase": "whole step"}
            rows.append(row("tensor_memory_gib", dtype, value=gib, predicted=gib * 1.02, params=whole))
            peak = {"value": gib * 1.05, "params": {"steps": 16}, "limit_source": "no limit: made up"}
            rows.append(row("peak_memory_gib", dtype, **peak))
            if dtype != "fp32":
                check = {"check": "loss beside fp32", "check_error": 0.004, "check_tolerance": 0.03}
                rows.append(row("relative_difference", dtype, value=0.004, params={"from": "fp32", "steps": 16}, **check))
        steady = {"params": {"step": "steady"}, "limit_source": "no limit: made up"}
        for dtype, milliseconds in MILLISECONDS.items():
            rows.append(row("step_time_s", dtype, **timed(milliseconds / 1e3), **steady))
            if dtype != "fp32":
                over = steady | {"params": {"step": "steady", "over": "fp32"}}
                rows.append(row("speedup", dtype, **timed(140.0 / milliseconds), **over))
            graph = {"params": {"step": "steady", "mode": "graph"}, "limit_source": "no limit: made up"}
            rows.append(row("step_time_s", dtype, **timed(0.9 * milliseconds / 1e3), **graph))
        rows.append(row("step_time_s", "fp16", value=None, value_reason="unsupported: made up", params={"step": "steady"}))
        rows.append(row("count", "fp16", value=2.0, params={"what": "skipped steps", "steps": 16}))
    return rows


def variant_samples() -> pd.DataFrame:
    lines = [
        {"kind": "step", "variant": model, "dtype": dtype, "step": step, "loss": 5 / step * (1 + (dtype != "fp32") * 1e-3)}
        for model in MODELS
        for dtype in GIB
        for step in range(1, 17)
    ]
    return pd.DataFrame(lines)


def phase_rows() -> list[Row]:
    rows = []
    for model, batch in MODELS.items():
        for dtype, activations in (("fp32", 6.0), ("bf16", 3.5)):
            for phase in PHASES:
                parts = {
                    "parameters": 0.5,
                    "optimizer state": 1.0,
                    "buffers": 0.0,
                    "batch": 0.1,
                    "activations": activations if phase == "after forward" else 0.0,
                    "gradients": 0.5 if phase in PHASES[2:] else 0.0,
                }
                shared = {"notebook": PRECISION, "experiment": "memory_phases", "variant": model, "dtype": dtype}
                params = {"batch": batch, "phase": phase}
                allocated = shared | {"metric": "allocated_memory_gib"}
                rows += [Row(**allocated, value=size, params=params | {"part": part}) for part, size in parts.items()]
                check = {"check": "the parts add up to all tensors", "check_error": 1e-6, "check_tolerance": 0.01}
                total = params | {"part": "all tensors"}
                rows.append(Row(**allocated, value=sum(parts.values()), params=total, **check))
                if phase != PHASES[0]:
                    peak = sum(parts.values()) + 2.0
                    rows.append(Row(**shared, metric="tensor_memory_gib", value=peak, params=params))
    return rows


LADDER_BUSY = {"baseline": 1.0, "bf16": 0.9, "fused optimizer": 0.8, "chunked loss": 0.4}
LADDER = {"baseline": (140.0, 10.0), "bf16": (60.0, 6.0), "fused optimizer": (50.0, 6.0), "chunked loss": (55.0, 4.0)}


def ladder_rows() -> list[Row]:
    rows: list[Row] = []
    before = ""
    for name, (milliseconds, gib) in LADDER.items():
        dtype = "fp32" if name == "baseline" else "bf16"
        shared = {"notebook": PRECISION, "experiment": "training_ladder", "variant": "gpt2_124m", "dtype": dtype}
        params = {"batch": 4096, "rung": name}
        no_limit = {"limit_source": "no limit: made up"}
        steady = params | {"step": "steady"}
        rows.append(Row(**shared, metric="step_time_s", params=steady, **timed(milliseconds / 1e3), **no_limit))
        rows.append(Row(**shared, metric="peak_memory_gib", value=gib, params=params, **no_limit))
        busy = {"metric": "share", "value": LADDER_BUSY[name], "params": steady | {"what": "device time over step time"}}
        rows.append(Row(**shared, **busy, **no_limit))
        if before:
            ratio = timed(LADDER[before][0] / milliseconds)
            rows.append(Row(**shared, metric="speedup", params=steady | {"over": before}, **ratio, **no_limit))
            for window, first, last, value, tolerance in (("early", 1, 25, 2e-4, 1e-3), ("late", 151, 200, 4e-3, 0.03)):
                check = {"check": "twins", "check_error": value, "check_tolerance": tolerance}
                where = {"from": "baseline", "steps": 200, "window": window, "first": first, "last": last}
                rows.append(Row(**shared, metric="relative_difference", value=value, params=params | where, **check))
        before = name
    absent = shared | {"dtype": "fp8", "metric": "step_time_s", "value": None, "value_reason": "unsupported: made up"}
    return [*rows, Row(**absent, params=params | {"rung": "fp8", "step": "steady"})]


def checkpointing_rows() -> list[Row]:
    rows = []
    shared = {"notebook": MEMORY, "experiment": "activation_checkpointing", "dtype": "bf16"}
    for model, batch in MODELS.items():
        for how, gib, milliseconds in (
            ("none", 10.0, 30.0),
            ("every block", 4.0, 40.0),
            ("selective", 7.0, 32.0),
            ("budget", 6.0, 36.0),
        ):
            params = {"batch": batch, "checkpointing": how} | ({"checkpointed_blocks": 5} if how == "budget" else {})
            fullest = {"value": gib, "predicted": 1.01 * gib, "params": params | {"phase": "forward and backward"}}
            rows.append(Row(**shared, variant=model, metric="tensor_memory_gib", **fullest))
            step = timed(milliseconds / 1e3, limit_source="no limit: made up", params=params | {"step": "steady"})
            rows.append(Row(**shared, variant=model, metric="step_time_s", **step))
            if how != "none":
                over = params | {"step": "steady", "over": "no checkpointing"}
                ratio = timed(30.0 / milliseconds, limit_source="no limit: made up", params=over)
                rows.append(Row(**shared, variant=model, metric="speedup", **ratio))
    for layers in (3, 12):
        for how, slope in (("none", 0.8), ("every block", 0.05)):
            params = {"batch": 8192, "checkpointing": how, "layers": layers, "what": "activations after forward"}
            name = "gpt2_124m" + ("" if layers == 12 else f"_cut_to_l{layers}")
            kept = {"value": 1.5 + slope * layers, "predicted": 1.5 + slope * layers}
            rows.append(Row(**shared, variant=name, metric="allocated_memory_gib", params=params, **kept))
    return rows


def estimate_rows() -> list[Row]:
    shared = {"notebook": MEMORY, "experiment": "memory_estimate", "dtype": "bf16"}
    peak = {"metric": "peak_memory_gib", "limit_source": "no limit: made up"}
    rows = [
        Row(**shared, **peak, variant=model, value=gib, predicted=foretold, params={"batch": 512, "checkpointing": "none"})
        for model, gib, foretold in (("gpt2_124m", 9.2, 9.1), ("resnet18", 1.3, 1.5))
    ]
    capped = {"batch": 28672, "checkpointing": "none", "memory_gib": 24.0}
    rows.append(Row(**shared, **peak, variant="gpt2_124m", value=22.0, predicted=22.1, params=capped))
    larger = capped | {"batch": 35840}
    rows.append(Row(**shared, **peak, variant="gpt2_124m", value=None, value_reason="out of memory: made up", params=larger))
    asked = {"what": "largest batch that fits", "memory_gib": 24.0, "checkpointing": "none"}
    return [*rows, Row(**shared, variant="gpt2_124m", metric="count", value=28, predicted=28, params=asked)]


def trace_rows() -> tuple[list[Row], pd.DataFrame]:
    shared = {"notebook": MEMORY, "experiment": "memory_trace", "variant": "gpt2_124m", "dtype": "bf16"}
    rows = [
        Row(**shared, metric="tensor_memory_gib", value=gib, params={"checkpointing": how})
        for how, gib in (("none", 3.0), ("every block", 2.0))
    ]
    for place, name in enumerate(("nvjet_tst_128x256", "flash_fwd_kernel", "multi_tensor_apply_kernel<" + 90 * "x")):
        params = {"of": "time of all kernels", "what": name, "kind": "GEMM"}
        rows.append(Row(**shared, metric="share", value=0.4 / (1 + place), params=params))
    lines = [
        {"event": event, "phase": phase, "kind": kind, "gib": gib, "checkpointing": how, "variant": "gpt2_124m", "dtype": "bf16"}
        for how in ("none", "every block")
        for event, phase in enumerate(("forward", "backward", "update"))
        for kind, gib in (("parameters", 1.0), ("activations", (0.5, 2.0 if how == "none" else 1.0, 0.0)[event]))
    ]
    return rows, pd.DataFrame(lines)


def precision_chapters():
    """(notebook, experiment, rows, samples) of chapters 2.3 and 2.4."""
    nothing = pd.DataFrame({"x": [1]})
    yield PRECISION, "precision_variants", variant_rows(), variant_samples()
    yield PRECISION, "memory_phases", phase_rows(), nothing
    yield PRECISION, "training_ladder", ladder_rows(), nothing
    yield MEMORY, "activation_checkpointing", checkpointing_rows(), nothing
    yield MEMORY, "memory_estimate", estimate_rows(), nothing
    yield MEMORY, "memory_trace", *trace_rows()
