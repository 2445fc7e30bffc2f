"""A headline has at least five launches; its interval contains what differs between launches; the page is what the rows say."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hyperion.book.headline_page import LEAST_LAUNCHES, launches_markdown, launches_of, update_page
from hyperion.errors import HyperionError
from hyperion.results import Row, Run
from hyperion.results.statistics import launches_estimate

PAGE = Path(__file__).parents[2] / "docs" / "headlines.md"


def _run(folder: Path, value: float, device: str = "NVIDIA H200", uuid: str = "GPU-1", throttle: str = "sw_power_cap") -> Run:
    environment = {"gpus": [{"name": device, "uuid": uuid}], "host_hash": "h"}
    run = Run.create(folder, {"environment": environment, "profile": "full"})
    row = Row(
        notebook="nb",
        experiment="gemm",
        variant="square",
        metric="gemm_tflops",
        value=value,
        ci_low=value * 0.998,
        ci_high=value * 1.002,
        n=30,
        dtype="bf16",
        params={"m": 8, "n": 8, "k": 8},
        limit=1000.0,
        limit_source="the peak at the maximum clock; data sheet",
        check="relative error",
        check_error=1e-4,
        check_tolerance=1e-2,
        throttle=throttle,
    )
    run.record("nb", "gemm", [row], pd.DataFrame({"x": [1.0]}), input_hash="x", environment=environment)
    return run


def _runs(folder: Path, values, **options) -> list[Run]:
    return [_run(folder / str(number), value, uuid=f"GPU-{number % 2}", **options) for number, value in enumerate(values)]


def test_five_launches_make_a_headline_and_four_do_not(tmp_path):
    values = [700.0, 710.0, 720.0, 730.0, 740.0]
    headline, others = launches_markdown(_runs(tmp_path / "five", values)).split("**Two to 4 launches")
    assert "| matrix product, bf16, cold caches | NVIDIA H200 | 720 TFLOPS | 5 | 2 | ± 0.2 % |" in headline
    assert "power limit of the device" in headline and "None." in others
    headline, others = launches_markdown(_runs(tmp_path / "four", values[:4])).split("**Two to 4 launches")
    assert "None yet." in headline and "| 4 | 2 |" in others
    assert "matrix product" not in launches_markdown(_runs(tmp_path / "one", values[:1]))
    assert LEAST_LAUNCHES == 5


def test_launches_on_different_devices_are_different_quantities(tmp_path):
    runs = [_run(tmp_path / "a", 700.0), _run(tmp_path / "b", 300.0, device="AMD Instinct MI250X")]
    assert [(q.device, len(q.headlines)) for q in launches_of(runs)] == [("NVIDIA H200", 1), ("AMD Instinct MI250X", 1)]


def test_a_launch_below_its_power_limit_leaves_the_bound_open(tmp_path):
    (quantity,) = launches_of([*_runs(tmp_path / "a", [700.0]), *_runs(tmp_path / "b", [701.0], throttle="none")])
    assert quantity.bound == ""


@pytest.mark.parametrize("between, within", [(0.02, 0.002), (0.0, 0.01), (0.01, 0.01)])
def test_the_interval_contains_the_true_value_in_at_least_nine_of_ten_cases(between, within):
    """400 simulated sets of eight launches. A rule with 95 % contains fewer than 361 with a chance of 1e-4."""
    random, contained = np.random.default_rng(3), 0
    for _ in range(400):
        values = 1 + between * random.standard_normal(8) + within * random.standard_normal(8)
        estimate = launches_estimate(values, [(v - 1.96 * within, v + 1.96 * within) for v in values])
        contained += estimate.ci_low <= 1 <= estimate.ci_high
    assert contained >= 361


def test_one_launch_keeps_the_interval_within_it():
    estimate = launches_estimate([10.0], [(9.0, 11.0)])
    assert (
        estimate.value == 10 and estimate.ci_low == pytest.approx(9, abs=0.15) and estimate.ci_high == pytest.approx(11, abs=0.15)
    )


@pytest.mark.slow
def test_the_committed_page_is_what_the_rows_say(tmp_path, monkeypatch):
    monkeypatch.chdir(PAGE.parents[1])
    copy = Path(shutil.copy(PAGE, tmp_path))
    text = PAGE.read_text()
    copy.write_text(text.replace("| 2 | 2 |", "| 9 | 9 |"))
    assert copy.read_text() != text
    assert len(update_page(copy)) == text.count("<!-- end of")
    assert copy.read_text() == text


def test_a_page_without_markers_and_a_folder_without_runs_are_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(HyperionError, match="no markers"):
        update_page(page)
    page.write_text(f"<!-- launches: {tmp_path} -->\nold\n<!-- end of launches -->\n")
    with pytest.raises(HyperionError, match="no run is in this folder"):
        update_page(page)
    assert "old" in page.read_text()
