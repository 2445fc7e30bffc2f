"""Predictions are scored with the reader's guess beside them."""

import pytest

from hyperion.book.plots_predictions import predictions
from hyperion.book.style import styled


def test_ratios_and_the_readers_guess(material):
    with styled():
        axes = predictions(material).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    row = next(r for r in material.of("gemm") if (r.dtype, r.params["m"], r.variant) == ("bf16", 16384, "torch.mm"))
    assert lines["reader's guess"].get_ydata()[0] == pytest.approx(500 / row.value)
    foretold = [r for r in material.of("gemm") if r.predicted and r.value]
    assert sorted(lines["gemm_tflops [TFLOPS]"].get_ydata()) == pytest.approx(
        sorted(r.predicted / r.value for r in foretold)
    )
