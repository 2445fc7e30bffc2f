"""What `hyperion verify` proves of the committed references, and that it says what it does not prove."""

import numpy as np
import pandas as pd
import pytest

from hyperion.paths import reference_folder
from hyperion.results import Row, Run, StoreError, median_estimate, verify_run
from hyperion.results.rows import canonical_params

# Rows that must be recomputed from their samples: fewer would mean that samples or rows changed their form.
RECOMPUTED = {"cpu-2cores": 46, "cpu-2cores-comparison": 0, "h200": 90, "h200-study": 100, "h200x2": 868, "h200x4": 370}


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(path.parent for path in reference_folder().rglob("run.json")), ids=str)
def test_every_committed_reference_is_proven(folder):
    run = Run.open(folder)
    statements = verify_run(run)
    about = [statement.partition(":")[0] for statement in statements[:4]]
    assert about == ["unchanged since written", "rules", "counts", "samples"]
    recomputations = [statement for statement in statements if statement.startswith("recomputed from samples: ")]
    recomputed = sum(int(statement.split(": ")[1].split()[0]) for statement in recomputations)
    [left] = [statement for statement in statements if statement.startswith("not recomputed: ")]
    assert recomputed >= RECOMPUTED.get(folder.name, 0)
    assert recomputed + sum(int(part.split()[0]) for part in left.partition(": ")[2].split(", ")) == len(run.rows())


TIMES_S = 5e-6 * np.random.default_rng(0).lognormal(0, 0.01, 31)


def statements(folder, params=None, phases=("",), **columns):
    """What is verified of one row, whose samples are TIMES_S, and by default of the row of their median."""
    found, params = median_estimate(TIMES_S), params or {}
    estimate = {"value": found.value, "n": found.n, "ci_low": found.ci_low, "ci_high": found.ci_high}
    about = {"metric": "launch_time_s", "limit_source": "none known", "check": "c", "check_error": 0.0, "check_tolerance": 0.0}
    row = Row(notebook="nb", experiment="e", variant="v", dtype="fp32", params=params, **about | estimate | columns)
    frame = {"variant": "v", "dtype": "fp32", "params": canonical_params(params), "time_s": TIMES_S}
    samples = pd.concat([pd.DataFrame(frame | {"phase": phase}) for phase in phases])
    run = Run.create(folder, {})
    run.record("nb", "e", [row], samples, input_hash="h")
    return verify_run(run)


def test_a_row_of_its_samples_is_proven(tmp_path):
    assert "recomputed from samples: 1 rows, value, interval and n" in statements(tmp_path)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"value": float(np.median(TIMES_S)) + 1e-9}, "but its samples give"),
        ({"n": 30}, "has n = 30, but there are 31 samples"),
        ({"n": 32}, "has n = 32, but there are 31 samples"),
    ],
)
def test_a_row_that_is_not_of_its_samples_is_refused(tmp_path, columns, fault):
    with pytest.raises(StoreError, match=fault):
        statements(tmp_path, **columns)


def test_a_row_is_not_proven_by_one_of_two_series(tmp_path):
    assert "not recomputed: 1 launch_time_s" in statements(tmp_path, phases=("", "step"))


def test_the_work_of_several_products_is_proven(tmp_path):
    sizes = {"m": 64, "n": 32, "k": 16, "products": 3}
    rate = median_estimate(TIMES_S).map(lambda time_s: 3 * 2 * 64 * 32 * 16 / time_s / 1e12)
    columns = {"metric": "gemm_tflops", "value": rate.value, "ci_low": rate.ci_low, "ci_high": rate.ci_high}
    assert "recomputed from samples: 1 rows, value, interval and n" in statements(tmp_path, sizes, **columns)
