"""Tables say everything a row says, and why something is missing."""

from dataclasses import replace

import pandas as pd
import pytest
from nbconvert.filters.markdown import markdown2html

from hyperion.book import display
from hyperion.errors import HyperionError, not_none
from hyperion.figures.material import Material
from hyperion.figures.tables import (
    epoch_table,
    html,
    interval_header,
    markdown,
    metric_table,
    prediction_basis,
    prediction_error,
    prediction_table,
    tables_of,
    text_of,
)
from hyperion.paths import reference_folder
from hyperion.results import Row, Run


def test_a_metric_table_shows_value_interval_limit_prediction_and_check(material):
    rows = material.of("gemm")
    table = metric_table(rows, "gemm_tflops")
    best = table[(table["dtype"] == "bf16") & (table["M, N, K"] == "16384") & (table["variant"] == "torch.mm")].iloc[0]
    row = next(r for r in rows if (r.dtype, r.variant, r.params["m"]) == ("bf16", "torch.mm", 16384))
    assert float(best["gemm_tflops [TFLOPS]"]) == pytest.approx(row.value, rel=1e-3)
    assert best["limit [TFLOPS]"] == "989.5"
    assert float(best["% of limit"]) == pytest.approx(100 * row.value / 989.5, abs=0.06)
    assert float(best["prediction error [%]"]) == pytest.approx(100 * (row.predicted / row.value - 1), abs=0.06)
    assert best["prediction error [%]"].startswith("+")
    assert best["check error / tolerance"] == "0.00020 / 0.0010"


def test_a_null_value_shows_its_reason(material):
    table = metric_table(material.of("gemm"), "gemm_tflops")
    assert table[table["dtype"] == "fp8"]["why there is none"].tolist() == ["unsupported: torch.mm takes no fp8"]
    assert table[table["dtype"] == "fp8"]["gemm_tflops [TFLOPS]"].tolist() == ["none"]


def test_the_header_of_an_interval_names_the_variation_that_it_contains(material):
    speedups = [row for row in material.rows if row.metric == "speedup" and row.ci_low is not None]
    assert speedups and "95 % interval within one launch" in metric_table(speedups, "speedup")
    seeds = [replace(row, params=row.params | {"seeds": 3}) for row in speedups]
    assert interval_header(seeds) == "95 % interval of the mean over seeds"
    assert interval_header([*seeds, speedups[0]]) == "95 % interval within one launch"
    assert interval_header([replace(row, experiment="comparison") for row in speedups]) == "95 % interval over trials"
    assert interval_header([replace(row, experiment="framework_speed") for row in speedups]) == "95 % interval over launches"
    mixed = [replace(row, experiment=name) for row, name in zip(speedups, ("comparison", "framework_speed"), strict=False)]
    assert interval_header(mixed) == "95 % interval within one launch"


def test_columns_that_nothing_fills_are_left_out(cpu_material):
    table = metric_table(cpu_material.of("bandwidth"), "bandwidth_gb_s")
    assert "limit [GB/s]" not in table and "% of limit" not in table and "dtype" not in table


def test_an_absent_metric_is_refused(material):
    with pytest.raises(HyperionError, match="no row of accuracy"):
        metric_table(material.of("gemm"), "accuracy")


def test_epochs_become_lines_and_metrics_columns(material):
    table = epoch_table(material.of("language_model"))
    assert table["epoch"].tolist() == list(range(1, 9))
    assert {"training_loss [nats]", "validation_loss [nats]", "tokens_per_s [tokens/s]", "learning_rate"} <= set(table)
    assert len(epoch_table(material.of("gemm"))) == 0


def test_ranks_of_an_epoch_are_whole_numbers():
    rows = [
        Row(notebook="n", experiment="e", variant="ddp", metric="training_loss", value=1.0, rank=rank, params={"epoch": 1})
        for rank in (None, 0, 1)
    ]
    assert list(epoch_table(rows)["rank"]) == ["", "0", "1"]


@pytest.mark.slow
def test_every_row_is_in_some_table(material, cpu_material):
    for source in (material, cpu_material):
        for _, experiment in source.experiments:
            rows = source.of(experiment)
            tables = [table for _, table in tables_of(rows)]
            lines = sum(table["rows"].astype(int).sum() if "reason" in table else len(table) for table in tables)
            epochs = {(r.variant, r.params["epoch"], r.rank) for r in rows if "epoch" in r.params}
            phased = [r for r in rows if {"phase", "part"} <= r.params.keys()]
            phases = {(r.variant, r.dtype, r.params["phase"]) for r in phased}
            others = [r for r in rows if "epoch" not in r.params and r not in phased]
            assert lines == len(epochs) + len(phases) + len(others)


def test_rows_of_tables_without_any_value_are_combined_and_no_other():
    def row(variant, metric, reason="", **params) -> Row:
        value = {"value": None, "value_reason": reason} if reason else {"value": 1.0}
        return Row(notebook="n", experiment="e", variant=variant, metric=metric, dtype="fp32", params=params, **value)

    absent = "unavailable: no MIGraphX"
    rows = [
        row("eager", "speedup", model="a"),
        row("MIGraphX", "speedup", absent, model="a"),
        row("MIGraphX", "call_time_s", absent, model="a", batch=1),
        row("MIGraphX", "call_time_s", absent, model="a", batch=8),
        row("MIGraphX", "images_per_s", absent, model="a"),
        row("ONNX", "images_per_s", "unavailable: no ONNX", model="a"),
    ]
    checked = replace(row("all_reduce", "busbw_gb_s", "one device"), check="sum", check_error=0.0, check_tolerance=0.0)
    (first, speedups), (third, sums), (second, missing) = tables_of([*rows, checked])
    assert third.startswith("busbw_gb_s") and sums["check error / tolerance"].tolist() == ["0 / 0"]
    assert first.startswith("speedup") and speedups["variant"].tolist() == ["eager", "MIGraphX"]
    assert second == "Not measured" and missing.to_dict("records") == [
        {"variant": "MIGraphX", "dtype": "fp32", "metrics": "call_time_s, images_per_s", "rows": "3", "reason": absent},
        {"variant": "ONNX", "dtype": "fp32", "metrics": "images_per_s", "rows": "1", "reason": "unavailable: no ONNX"},
    ]


@pytest.mark.parametrize(
    ("value", "low", "shown"),
    [
        (-0.06, None, "alone_difference"),
        (0.01, -0.01, "alone_difference"),
        (0.06, None, "communication_share"),
        (0.06, 0.04, "communication_share"),
    ],
)
def test_a_stored_share_that_may_be_negative_is_shown_as_a_difference(value, low, shown):
    ends = {} if low is None else {"ci_low": low, "ci_high": 0.1, "n": 20}
    row = Row(notebook="nb", experiment="scaling", variant="v", metric="communication_share", value=value, **ends)
    ((caption, table),) = tables_of([row])
    assert caption.startswith(f"{shown}: ") and f"{shown} [fraction]" in table.columns


def test_prediction_error_is_signed(material):
    row = next(r for r in material.of("text_pipeline") if r.metric == "share")
    assert prediction_error(row) == pytest.approx(0.45 / 0.37 - 1)
    assert prediction_error(replace(row, predicted=0.0)) is None is prediction_error(replace(row, value=0.0))


def test_markup_in_cells_is_escaped(material):
    table = metric_table(material.of("gemm"), "gemm_tflops").head(1).assign(note="a|b <i>&\nc")
    assert "a\\|b &lt;i&gt;&amp; c" in markdown(table)
    assert "a|b &lt;i&gt;&amp;" in html(table)
    lines = markdown(table).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1 and "---:" in lines[1]


def written(estimates, guess=None, ceiling=None):
    return pd.DataFrame(
        [
            {
                "variant": "torch.mm",
                "dtype": dtype,
                "params": {"m": n, "n": n, "k": n, "cache": "cold"},
                "metric": "gemm_tflops",
                "guess": guess if not position else None,
                "ceiling": ceiling,
                "estimate": estimate,
                "low": estimate and estimate / 2,
                "high": estimate and 2 * estimate,
                "basis": "roofline of the data sheet" if estimate else "no such instructions known",
            }
            for position, (dtype, n, estimate) in enumerate(estimates)
        ]
    )


def test_a_column_has_one_meaning_even_if_an_experiment_has_a_param_named_what():
    predictions = written([("fp32", 1024, 0.1)], guess=None)
    predictions["params"] = [{"what": "padding"}]
    predictions = pd.concat([predictions, predictions.assign(params=[{"what": "cropping"}])])
    _, table = prediction_table(predictions)
    columns = list(table.columns)
    assert {"what", "quantity"} <= set(columns) and len(columns) == len(set(columns))


def test_a_reason_that_begins_with_a_number_is_text():
    table = pd.DataFrame({"n": ["3"], "why there is none": ["54 samples; an interval of this percentile needs 72"]})
    assert html(table).count('class="number"') == 2  # the header and the cell of n


@pytest.mark.parametrize("cell", ["3", "-0.5", "+1.2", "1,024", "0 / 0", "7e-07 / 0.00010", "0.8 to 1.1", "512 × 512", "12 %"])
def test_numbers_are_right_aligned(cell):
    assert html(pd.DataFrame({"column": [cell]})).count('class="number"') == 2


@pytest.mark.parametrize("cell", ["1F1B", "--fp16", "8x", "-", "10_frameworks", "ddp"])
def test_names_are_left_aligned(cell):
    assert 'class="number"' not in html(pd.DataFrame({"column": [cell]}))


def test_sizes_guess_and_estimate_stand_in_columns_of_their_own():
    caption, table = prediction_table(written([("fp32", 1024, 0.166153), ("fp16", 1024, None), ("fp32", 512, 0.1)], guess=0.2))
    assert table["M, N, K"].tolist() == ["1024", "512"]
    assert "dtype" not in table and "dtype fp32" in caption  # both lines share it
    assert table["quantity"].tolist() == ["gemm_tflops [TFLOPS]"] * 2
    assert table["your guess"].tolist() == ["0.2000", "none"] and table["prediction"].tolist() == ["0.1662", "0.1000"]
    assert table["80 % interval"].tolist() == ["0.08308 to 0.3323", "0.05000 to 0.2000"] and "ceiling" not in table


def test_a_ceiling_is_no_prediction():
    forecasts = written([("fp32", 1024, None)], ceiling=0.2)
    _, table = prediction_table(forecasts)
    assert table["ceiling"].tolist() == ["0.2000"] and table["prediction"].tolist() == ["none"]
    assert prediction_basis(forecasts) == ["Only a ceiling: no such instructions known."]


def test_the_stored_ceilings_of_earlier_versions_have_a_column_of_their_own(material):
    """The reference runs stored the roofline as prediction."""
    reference = Material(Run.open(reference_folder() / "h200-study"))
    rows = reference.of("gemm", metric="gemm_tflops")
    table = metric_table(rows, "gemm_tflops", prediction=reference.prediction)
    assert "989.4" in set(table["ceiling [TFLOPS]"]) and not any("predict" in column for column in table)
    row = next(row for row in rows if row.predicted)
    now = replace(not_none(reference.prediction(row)), made_at="2026-01-01", low=500.0, high=700.0)
    table = metric_table([row], "gemm_tflops", prediction=lambda row: now)
    assert table["80 % interval of the prediction"].tolist() == ["500 to 700"] and "prediction error [%]" in table
    assert "ceiling [TFLOPS]" not in table


def test_what_is_asked_stays_even_where_nothing_is_known():
    _, table = prediction_table(written([("fp32", 1024, None), ("fp32", 512, None)]))
    assert len(table) == 1 and table["prediction"].tolist() == ["none"]
    assert prediction_basis(written([("fp32", 1024, None)])) == ["No prediction: no such instructions known."]


def test_each_basis_is_said_once():
    said = prediction_basis(written([("fp32", 1024, 0.1), ("bf16", 1024, 0.2), ("fp16", 1024, None)]))
    assert said == [
        "Prediction for fp32, bf16: roofline of the data sheet.",
        "No prediction for fp16: no such instructions known.",
    ]


def test_the_notebook_shows_both(monkeypatch):
    bundles = []
    monkeypatch.setattr(display, "_display", bundles.append)
    display.show_predictions(written([("fp32", 1024, 0.1)]))
    assert "text/html" in bundles[0] and "data sheet" in bundles[1]["text/markdown"]


def test_the_link_at_the_end_of_a_basis_is_only_the_address(monkeypatch):
    bundles = []
    monkeypatch.setattr(display, "_display", bundles.append)
    display.show_predictions(written([("fp32", 1024, 0.1)]).assign(basis="data sheet, https://example.com/h200/"))
    page = markdown2html(bundles[1]["text/markdown"])
    assert 'href="https://example.com/h200/"' in page and "<em>Prediction: data sheet" in page and "*" not in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.018548488616943, "4.018548"),
        (0.9999997627788944, "0.9999998"),
        (1e-08, "1e-08"),
        (0.001, "0.001"),
        (2.0, "2"),
        (12345678.25, "12345678.25"),
        (65536, "65,536"),
        (True, "yes"),
        (["float32"], '["float32"]'),
        (float("nan"), ""),
    ],
)
def test_a_param_has_at_most_seven_digits(value, text):
    assert text_of(value) == text
