"""Rows of the baseline chapter that no machine measured: test data, valid by every rule of a row."""

import pandas as pd

from hyperion.results import Row
from tests.book.made_up.hardware import timed

BASELINE = "02_baseline_performance"
EAGER = {"layout": "contiguous", "mode": "eager"}
LAST = EAGER | {"layout": "channels_last"}
# Model, format, variant; milliseconds of forward, backward and update, and of the whole at the limit.
STEPS = [
    ("resnet50", "fp32", EAGER, (9.0, 19.0, 0.4, 11.6)),
    ("resnet50", "tf32", EAGER, (7.0, 12.0, 0.4, 1.5)),
    ("resnet50", "bf16", EAGER, (6.5, 9.2, 0.4, 0.73)),
    ("resnet50", "bf16", LAST, (4.5, 7.2, 0.4, 0.73)),
    ("resnet50", "bf16", LAST | {"mode": "compiled"}, (2.5, 4.2, 0.4, 0.73)),
    ("vit_b_16", "fp32", EAGER, (24.0, 49.0, 1.1, 50.3)),
    ("vit_b_16", "bf16", EAGER, (3.1, 6.6, 1.1, 3.14)),
    ("encoder_d512_h8_l6", "fp32", EAGER, (1.6, 3.2, 0.4, 0.86)),
]
ABSENT = "no variant: it works on sequences"
MIB_PER_SAMPLE = {"resnet50": 55.0, "vit_b_16": 98.0, "encoder_d512_h8_l6": 3.1}


def operator_cost_rows(random, limited):
    """A slow host's; a CPU's profile leaves out the compiled block."""
    clock = {"clock": "host", "cache": "hot"}
    check = {"check": "last loss / first loss", "check_error": 0.4, "check_tolerance": 1.0}
    costs = (
        ("operator", "operator_time_s", 31e-6, {"operators": 88, "parts": 2}),
        ("convolution", "operator_time_s", 72e-6, {"operators": 16, "beside": 12, "parts": 4}),
        ("once a step", "step_overhead_s", 430e-6, {"operators": 56}),
    )
    rows = [
        _timed(random, "operator_cost", name, metric, seconds, None, params=clock | more, **check)
        for name, metric, seconds, more in costs
    ]
    block = clock | {"kernels": 28, "blocks": 4}
    if limited:
        common = {"dtype": "bf16", "params": block} | check
        return [*rows, _timed(random, "operator_cost", "compiled block", "block_time_s", 2.1e-3, None, **common)]
    return [
        *rows,
        Row(
            notebook=BASELINE,
            experiment="operator_cost",
            variant="compiled block",
            metric="block_time_s",
            value=None,
            value_reason="left out by this profile",
            params=clock,
        ),
    ]


def model_steps_rows(random, limited):
    rows = []
    for model, dtype, variant, (*phases, least) in STEPS:
        common = {"dtype": dtype, "params": {"batch": 32, "step": "steady"} | variant}
        check = {"check": "forward + backward + optimizer = step", "check_error": 0.004, "check_tolerance": 0.05}
        whole = sum(phases)
        for metric, duration, share in zip(
            ("forward_time_s", "backward_time_s", "optimizer_time_s", "step_time_s"),
            [*phases, whole],
            (0.33, 0.65, 0.02, 1),
            strict=True,
        ):
            floor = share * least / 1e3 if limited else None
            more = check | {"predicted": 0.8 * duration / 1e3} if metric == "step_time_s" else {}
            rows.append(_timed(random, "model_steps", model, metric, duration / 1e3, floor, **common, **more))
        rate = 32e3 / whole
        rows.append(_timed(random, "model_steps", model, "samples_per_s", rate, None, predicted=1.25 * rate, **common))
        share = least / whole / 1.1
        maf = common | {"params": common["params"] | {"maf": "gemm"}}
        rows.append(_timed(random, "model_steps", model, "mfu_maf", 1.4 * share, None, **maf))
        if limited:
            rows.append(_timed(random, "model_steps", model, "mfu", share, None, **common))
    absent = {"batch": 32, "step": "steady"} | LAST
    return [
        *rows,
        Row(
            notebook=BASELINE,
            experiment="model_steps",
            variant="vit_b_16",
            dtype="bf16",
            metric="step_time_s",
            value=None,
            value_reason=ABSENT,
            params=absent,
        ),
    ]


def batch_scaling_rows(random, limited):
    metric = "peak_memory_gib" if limited else "peak_rss_gib"
    rows = []
    for number, (model, mib) in enumerate(MIB_PER_SAMPLE.items(), 1):

        def row(name, value, params, model=model, **columns):
            return Row(
                notebook=BASELINE,
                experiment="batch_scaling",
                variant=model,
                dtype="bf16",
                metric=name,
                value=value,
                params=params,
                limit_source="no limit: the cap is not the device's",
                **columns,
            )

        for batch in (1, 4, 16, 64):
            params = {"batch": batch, "step": "steady"}
            rate = number * 2000 * batch / (batch + 12)
            more = {"dtype": "bf16", "params": params, "predicted": 1.5 * rate}
            rows.append(_timed(random, "batch_scaling", model, "samples_per_s", rate, None, **more))
            rows.append(row(metric, 0.4 + mib * batch / 1024, params))
        largest = int((24 - 0.4) * 1024 / mib)
        rows.append(row("sample_memory_mib", mib, {"what": "slope"}))
        rows.append(row(metric, 0.4 + mib * (largest // 2) / 1024, {"batch": largest // 2, "step": "half way"}))
        rows.append(row(metric, 18.1, {"batch": int(0.75 * largest), "step": "probe"}))
        refused = "out of memory: CUDA out of memory. Tried to allocate 392.00 MiB."
        rows.append(row(metric, None, {"batch": int(1.25 * largest), "step": "probe"}, value_reason=refused))
        rows.append(row("count", float(largest), {"what": "largest batch"}))
    return rows


def monitor_overhead_rows(random):
    params = {"batch": 32, "interval_s": 0.1, "block_s": 0.2, "pairs": 40, "readings": 130, "devices": 1}
    model = "encoder_d512_h8_l6"
    return [_timed(random, "monitor_overhead", model, "monitor_overhead", 0.0021, None, dtype="fp32", params=params)]


def monitor_overhead_samples(random):
    times = {"stopped": random.normal(5e-3, 2e-5, 40), "running": random.normal(5.01e-3, 2e-5, 40)}
    frames = [pd.DataFrame({"kind": f"monitor {state}", "index": range(40), "time_s": s}) for state, s in times.items()]
    return pd.concat(frames, ignore_index=True)


def baseline_chapters(random, limited):
    """(notebook, experiment, rows, samples) of its experiments."""
    frame = pd.DataFrame({"x": [1]})
    return [
        (BASELINE, "operator_cost", operator_cost_rows(random, limited), frame),
        (BASELINE, "model_steps", model_steps_rows(random, limited), frame),
        (BASELINE, "batch_scaling", batch_scaling_rows(random, limited), frame),
        (BASELINE, "monitor_overhead", monitor_overhead_rows(random), monitor_overhead_samples(random)),
    ]


def _timed(random, experiment, model, metric, value, limit, **columns):
    """`timed` of made_up_hardware takes limits as maxima; a floor is set afterwards."""
    row = timed(random, BASELINE, experiment, model, metric, value, None, **columns)
    source = "model FLOPs at the data sheet's rate" if limit else "no limit: no data sheet entry"
    return Row(**{name: getattr(row, name) for name in row.__dataclass_fields__} | {"limit": limit, "limit_source": source})
