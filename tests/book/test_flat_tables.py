"""Flat tables: each value is that of a row, in the documented column, and what was not measured is said."""

import math

import pandas as pd
import pytest

from hyperion.book.flat_tables import flat_tables
from hyperion.paths import reference_folder
from hyperion.results import Row, Run

GEMM = {"notebook": "01_x", "experiment": "gemm", "variant": "torch.mm", "metric": "gemm_tflops"}
BATCH = {"notebook": "02_x", "experiment": "batch_scaling", "variant": "resnet50", "dtype": "bf16"}
SCALING = {"notebook": "08_x", "experiment": "scaling", "variant": "lm_ddp", "dtype": "bf16"}
EPOCH = {"notebook": "02_x", "experiment": "language_model", "variant": "lm", "dtype": "bf16"}


def only(path: str, *runs: list[Row]) -> pd.DataFrame:
    tables = flat_tables(runs)
    assert list(tables) == [path]
    return tables[path]


def test_products_have_the_documented_columns_and_the_time_of_their_rate():
    square = {"m": 1000, "n": 1000, "k": 1000}
    rows = [
        Row(**GEMM, dtype="bf16", value=4.0, params=square | {"cache": "cold"}),
        Row(**GEMM, dtype="tf32", value=None, value_reason="not here", params=square | {"cache": "cold"}),
        Row(**GEMM, dtype="bf16", value=9.0, params=square | {"cache": "hot"}),
        Row(**GEMM, dtype="bf16", value=8.0, params=square | {"k": 10, "cache": "cold"}),
    ]
    table = only("hardware/precision_results.csv", rows)
    assert table.to_csv(index=False).splitlines() == ["Size,Precision,Time (s),TFLOPS", "1000,BF16,0.0005,4.0", "1000,TF32,,"]


def test_bandwidth_is_that_of_the_documented_sum():
    what = {"notebook": "01_x", "experiment": "bandwidth", "metric": "bandwidth_gb_s", "dtype": "fp32"}
    rows = [
        Row(**what, variant=variant, value=value, params={"elements": 10_000_000, "cache": cache})
        for variant, value, cache in (("add", 800.0, "cold"), ("add", 900.0, "hot"), ("copy", 700.0, "cold"))
    ]
    table = only("hardware/bandwidth_results.csv", rows)
    assert table.to_csv(index=False).splitlines() == ["Size (M elements),Bandwidth (GB/s)", "10.0,800.0"]


def test_a_batch_that_was_refused_is_marked_and_batches_are_in_order():
    steady = {"batch": 2, "step": "steady"}
    values = {"forward_time_s": 0.001, "backward_time_s": 0.002, "optimizer_time_s": 0.003, "step_time_s": 0.006}
    rows = [Row(**BATCH, metric=metric, value=value, params=steady) for metric, value in values.items()]
    rows.append(Row(**BATCH, metric="peak_memory_gib", value=None, value_reason="out of memory: made up", params={"batch": 9}))
    rows.insert(0, Row(**BATCH, metric="samples_per_s", value=5.0, params={"batch": 1, "step": "steady"}))
    rows.append(Row(**BATCH, metric="peak_memory_gib", value=0.5, params=steady))
    table = only("scaling/resnet50_batch_scaling.csv", rows)
    assert table.to_csv(index=False).splitlines() == [
        "model,batch,forward_ms,backward_ms,optimizer_ms,total_ms,memory_mib,samples_per_s",
        "resnet50,1,,,,,,5.0",
        "resnet50,2,1.0,2.0,3.0,6.0,512.0,",
        "resnet50,9,out of memory,out of memory,out of memory,out of memory,out of memory,out of memory",
    ]


def scaling_run(speedup: float | None) -> list[Row]:
    alone, pair = {"mode": "weak", "ranks": 1}, {"mode": "weak", "ranks": 2}
    reason = "" if speedup else "this machine has 1 device"
    return [
        Row(**SCALING, metric="step_time_s", value=0.5, params=alone),
        Row(**SCALING, metric="speedup", value=speedup, value_reason=reason, params=pair),
        Row(**SCALING, metric="scaling_efficiency", value=speedup and speedup / 2, value_reason=reason, params=pair),
    ]


def test_scaling_has_the_mean_the_number_and_the_deviation_of_the_runs():
    table = only("scaling/scaling_analysis.csv", scaling_run(1.8), scaling_run(1.6))
    assert list(table.columns[:4]) == ["gpus", "ideal", "lm_ddp_speedup", "lm_ddp_efficiency"]
    pair = table.iloc[1].to_dict()
    assert pair == {
        "gpus": 2,
        "ideal": 2,
        "lm_ddp_speedup": pytest.approx(1.7),
        "lm_ddp_efficiency": pytest.approx(0.85),
        "mode": "weak",
        "lm_ddp_n_runs": 2,
        "lm_ddp_stdev": pytest.approx(0.2 / math.sqrt(2)),
    }
    assert table.iloc[0][["lm_ddp_speedup", "lm_ddp_n_runs", "lm_ddp_stdev"]].tolist() == [1.0, 2, 0.0]


def test_scaling_that_was_not_measured_is_missing():
    lines = only("scaling/scaling_analysis.csv", scaling_run(None)).to_csv(index=False).splitlines()
    assert lines[1:] == ["1,1,1.0,1.0,weak,1,missing", "2,2,missing,missing,weak,0,missing"]


def test_an_epoch_has_a_line_for_each_split_and_rank():
    values = {
        "training_loss": 3.0,
        "tokens_per_s": 10.0,
        "peak_memory_gib": 1.0,
        "reserved_memory_gib": 2.0,
        "learning_rate": 0.1,
        "epoch_time_s": 4.0,
    }
    rows = [Row(**EPOCH, metric=metric, value=value, params={"epoch": 1}) for metric, value in values.items()]
    rows.append(Row(**EPOCH, metric="validation_loss", value=2.0, params={"epoch": 1}))
    rows.append(Row(**EPOCH, metric="training_loss", value=3.5, rank=1, params={"epoch": 1}))
    table = only("training/epoch_metrics.csv", rows)
    assert table.to_csv(index=False, float_format="%.4g").splitlines() == [
        "experiment,model,rank,epoch,split,loss,accuracy,perplexity,samples_per_s,tokens_per_s,peak_allocated_mib,"
        "peak_reserved_mib,learning_rate,wall_s",
        f"language_model,lm,,1,train,3,,{math.exp(3):.4g},,10,1024,2048,0.1,4",
        f"language_model,lm,,1,held-out,2,,{math.exp(2):.4g},,,,,,",
        f"language_model,lm,1,1,train,3.5,,{math.exp(3.5):.4g},,,,,,",
    ]


def test_a_reference_has_each_measured_point_once():
    tables = flat_tables([Run.open(reference_folder() / "h200x2").rows()])
    keys = {
        "Size (M elements)": [],
        "Size": ["Precision"],
        "batch": [],
        "gpus": ["mode"],
        "epoch": ["experiment", "model", "rank", "split"],
    }
    assert len(tables) == 7
    for path, table in tables.items():
        (first,) = keys.keys() & set(table.columns)
        assert not table.duplicated([first, *keys[first]]).any(), path
    assert set(tables["hardware/bandwidth_results.csv"]["Size (M elements)"]) >= {10, 20, 50, 100, 200, 500}
    assert set(tables["hardware/precision_results.csv"]["Size"]) == {1024, 2048, 4096, 8192}
