"""Predictions are shown with unit and reason, never as raw dictionaries."""

import pandas as pd

from hyperion.book import display
from hyperion.figures.tables_predictions import prediction_basis, prediction_table


def written(estimates, guess=None):
    return pd.DataFrame(
        [
            {
                "variant": "torch.mm",
                "dtype": dtype,
                "params": {"m": n, "n": n, "k": n, "cache": "cold"},
                "metric": "gemm_tflops",
                "guess": guess if not position else None,
                "estimate": estimate,
                "basis": "roofline of the data sheet" if estimate else "no such instructions known",
            }
            for position, (dtype, n, estimate) in enumerate(estimates)
        ]
    )


def test_sizes_guess_and_estimate_stand_in_columns_of_their_own():
    table = prediction_table(written([("fp32", 1024, 0.166153), ("fp16", 1024, None), ("fp32", 512, 0.1)], guess=0.2))
    assert table["M, N, K"].tolist() == ["1024", "512"] and table["dtype"].tolist() == ["fp32", "fp32"]
    assert table["what"].tolist() == ["gemm_tflops [TFLOPS]"] * 2
    assert table["your guess"].tolist() == ["0.2000", "none"] and table["estimate"].tolist() == ["0.1662", "0.1000"]


def test_what_is_asked_stays_even_where_nothing_is_known():
    table = prediction_table(written([("fp32", 1024, None), ("fp32", 512, None)]))
    assert len(table) == 1 and table["estimate"].tolist() == ["none"]
    assert prediction_basis(written([("fp32", 1024, None)])) == ["No estimate: no such instructions known."]


def test_each_basis_is_said_once():
    said = prediction_basis(written([("fp32", 1024, 0.1), ("bf16", 1024, 0.2), ("fp16", 1024, None)]))
    assert said == ["Estimate for fp32, bf16: roofline of the data sheet.", "No estimate for fp16: no such instructions known."]


def test_the_notebook_shows_both(monkeypatch):
    bundles = []
    monkeypatch.setattr(display, "_display", bundles.append)
    display.show_predictions(written([("fp32", 1024, 0.1)]))
    assert "text/html" in bundles[0] and "data sheet" in bundles[1]["text/markdown"]
