"""The metric registry speaks the field's language and says what each row needs."""

import pytest

from hyperion.errors import HyperionError
from hyperion.results import REGISTRY, metric_named


def test_every_metric_is_fully_described():
    for name, metric in REGISTRY.items():
        assert name == metric.name == name.lower() and metric.unit and metric.meaning
    for name in ("gemm_tflops", "bandwidth_gb_s", "step_time_s", "perplexity_token", "accuracy"):
        assert metric_named(name).needs_limit and metric_named(name).needs_interval


def test_an_unknown_metric_is_refused():
    with pytest.raises(HyperionError, match="unknown metric 'tflops'"):
        metric_named("tflops")
