"""Rows and runs that the tests of the package results share."""

from dataclasses import replace

import pandas as pd
import pytest

from hyperion.results import Row, Run

GEMM = Row(
    notebook="01_hardware_exploration",
    experiment="gemm",
    variant="cold",
    dtype="bfloat16",
    params={"m": 64, "n": 64, "k": 64},
    metric="gemm_tflops",
    value=100.0,
    n=30,
    ci_low=99.0,
    ci_high=101.0,
    predicted=110.0,
    limit=191.5,
    limit_source="MI250X GCD datasheet",
    check="slice against float64",
    check_error=1e-3,
    check_tolerance=1e-2,
    clock_mhz=1700.0,
    power_w=250.0,
    throttle="none",
)


@pytest.fixture
def row():
    """Makes a valid GEMM row with some fields changed."""
    return lambda **changes: replace(GEMM, **changes)


@pytest.fixture
def new_run(tmp_path):
    """Makes a run in a folder of its own."""
    return lambda name="run": Run.create(tmp_path / name, {"profile": "smoke"})


@pytest.fixture
def samples():
    return pd.DataFrame({"variant": ["cold"] * 3, "index": range(3), "time_s": [0.1, 0.2, 0.3]})
