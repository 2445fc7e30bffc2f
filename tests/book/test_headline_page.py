"""A headline has at least five launches of one version; its interval contains what differs between launches."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.book.headline_page import (
    LEAST_LAUNCHES,
    MOST_LINES,
    Launches,
    counts_markdown,
    headlines_markdown,
    launches_page,
    runs_in,
    summary_markdown,
    update_page,
)
from hyperion.errors import HyperionError
from hyperion.figures.material import NO_DRIFT
from hyperion.results import BUSY_GPU, Row, Run
from hyperion.results.rows import canonical_params
from hyperion.results.statistics import launches_estimate

FEW = "**Not headlines"


def _speed_row(value: float, **changes) -> Row:
    row = {
        "notebook": "nb",
        "experiment": "gemm",
        "variant": "torch.mm",
        "metric": "gemm_tflops",
        "value": value,
        "ci_low": value * 0.998,
        "ci_high": value * 1.002,
        "n": 30,
        "dtype": "bf16",
        "params": {"m": 8, "n": 8, "k": 8},
        "limit": 1000.0,
        "limit_source": "bf16: 100 x 5 ops/clock x 2000 MHz; data sheet",
        "check": "relative error",
        "check_error": 1e-4,
        "check_tolerance": 1e-2,
        "throttle": "sw_power_cap",
        "clock_mhz": 1500.0,
    }
    return Row(**(row | changes))


def _run(
    folder: Path, rows: list[Row], device: str = "NVIDIA H200", uuid: str = "GPU-1", version: str = "v1", code: str = ""
) -> Run:
    environment = {"gpus": [{"name": device, "uuid": uuid}], "host_hash": "h"}
    run = Run.create(folder, {"environment": environment, "profile": "full"})
    for experiment in dict.fromkeys(row.experiment for row in rows):
        chosen = [row for row in rows if row.experiment == experiment]
        provenance = {"source": {"hash": version}} | ({"code": code} if code else {})
        samples = pd.concat(map(_steady_samples, chosen))
        run.record("nb", experiment, chosen, samples, input_hash="x", provenance=provenance, environment=environment)
    return run


def _steady_samples(row: Row) -> pd.DataFrame:
    identity = {"variant": row.variant, "dtype": row.dtype, "params": canonical_params(row.params)}
    return pd.DataFrame(identity | {"index": range(10), "time_s": 1.0, "warm": True, "unsteady": ""})


def _launches(folder: Path, values, **options) -> dict[Run, str]:
    runs = [_run(folder / str(n), [_speed_row(value)], uuid=f"GPU-{n % 2}", **options) for n, value in enumerate(values)]
    return dict.fromkeys(runs, folder.name)


def test_five_launches_make_a_headline_and_four_do_not(tmp_path):
    values = [700.0, 710.0, 720.0, 730.0, 740.0]
    headlines, few = headlines_markdown(_launches(tmp_path / "five", values)).split(FEW)
    assert "| matrix product, 8 × 8, bf16, cold caches | NVIDIA H200 | 720 TFLOPS | 5 | 2 | ± 0.2 % |" in headlines
    assert "| 72.0 | power limit of the device |" in headlines and "None yet." in few
    headlines, few = headlines_markdown(_launches(tmp_path / "four", values[:4])).split(FEW)
    assert "matrix product" not in headlines and "| 4 | 2 |" in few
    # Instead of an interval, which a bootstrap of four launches would make too narrow, the lowest and the highest launch.
    assert "lowest – highest launch" in few and "between launches" not in few and "| 700 TFLOPS – 730 TFLOPS |" in few
    assert "matrix product" not in headlines_markdown(_launches(tmp_path / "one", values[:1]))
    assert LEAST_LAUNCHES == 5


def test_launches_of_different_versions_are_not_added_up(tmp_path):
    old = _launches(tmp_path / "old", [600.0, 601.0, 602.0, 603.0])
    new = _launches(tmp_path / "new", [700.0, 710.0, 720.0], version="v2")
    headlines, few = headlines_markdown(old | new).split(FEW)
    assert "matrix product" not in headlines and "| 7 | 2 |" in few and "| 2 | old, new |" in few
    more = _launches(tmp_path / "more", [730.0, 740.0], version="v2")
    headlines, few = headlines_markdown(old | new | more).split(FEW)
    assert "| 720 TFLOPS | 5 |" in headlines and "matrix product" not in few
    assert "601.5 TFLOPS (old, median of 4) | new, more |" in headlines


def test_of_two_versions_with_as_many_launches_the_one_on_more_machines_is_the_headline(tmp_path):
    one_machine = {_run(tmp_path / f"one/{n}", [_speed_row(500.0 + n)], uuid="GPU-1", version="v2"): "one" for n in range(5)}
    two_machines = _launches(tmp_path / "two", [700.0, 710.0, 720.0, 730.0, 740.0])
    for runs in (one_machine | two_machines, two_machines | one_machine):
        headlines = headlines_markdown(runs).split(FEW)[0]
        assert "| 720 TFLOPS | 5 | 2 |" in headlines and "| 502 TFLOPS (one, median of 5) | two |" in headlines


def test_launches_with_the_same_code_of_the_experiment_are_added_up_although_the_rest_of_the_library_changed(tmp_path):
    old = _launches(tmp_path / "old", [700.0, 710.0, 720.0], code="c1")
    new = _launches(tmp_path / "new", [730.0, 740.0], version="v2", code="c1")
    assert "| 720 TFLOPS | 5 |" in headlines_markdown(old | new).split(FEW)[0]
    changed = _launches(tmp_path / "changed", [730.0, 740.0], version="v1", code="c2")
    assert "matrix product" not in headlines_markdown(old | changed).split(FEW)[0]


def test_the_same_row_in_two_runs_is_one_launch(tmp_path):
    runs = _launches(tmp_path / "a", [700.0, 710.0, 720.0, 730.0])
    copy = _run(tmp_path / "copy", [_speed_row(730.0)], uuid="GPU-1")
    assert "| 4 | 2 |" in headlines_markdown(runs | {copy: "copy"}).split(FEW)[1]


def test_launches_on_different_devices_are_different_quantities(tmp_path):
    runs = _launches(tmp_path / "a", [700.0, 701.0, 702.0, 703.0, 704.0])
    others = _launches(tmp_path / "b", [300.0, 301.0, 302.0, 303.0, 304.0], device="AMD Instinct MI250X")
    summary = summary_markdown(runs | others)
    assert "| NVIDIA H200 | 702 TFLOPS | 5 launches on 2 machines |" in summary
    assert "| AMD Instinct MI250X | 302 TFLOPS |" in summary


def test_a_launch_below_its_power_limit_leaves_the_bound_open(tmp_path):
    runs = {}
    for number in range(5):
        row = _speed_row(700.0 + number, throttle="none" if number == 3 else "sw_power_cap")
        runs[_run(tmp_path / str(number), [row])] = "launches"
    assert "power limit" not in headlines_markdown(runs)


def _trained(notebook: str = "nb") -> list[Row]:
    common = {"notebook": notebook, "n": 5, "check": "", "limit": None, "data_source": "mirror"}
    mean = {"split": "test, mean of seeds", "seeds": 5}
    parity = {"ranks": 2, "steps": 20}
    limit = "no limit: a property of the task"
    return [
        Row(
            **common | {"limit": 1.0, "limit_source": "all images", "n": 5},
            experiment="image_classifier",
            variant="resnet18",
            metric="accuracy",
            value=0.94,
            ci_low=0.93,
            ci_high=0.95,
            params=mean,
        ),
        Row(
            **common | {"limit": 1.0, "limit_source": "all images"},
            experiment="image_classifier",
            variant="vit",
            metric="accuracy",
            value=0.91,
            ci_low=0.90,
            ci_high=0.92,
            params={"split": "test"},
        ),
        Row(
            **common | {"n": None, "check": "losses of one device", "check_error": 1e-7, "check_tolerance": 1e-4},
            experiment="parallel_parity",
            variant="ddp",
            metric="relative_difference",
            value=1e-7,
            params=parity,
            limit_source=limit,
        ),
    ]


def test_runs_of_the_profile_smoke_have_no_headlines(tmp_path):
    for launch in range(LEAST_LAUNCHES):
        run = Run.create(tmp_path / "small" / str(launch), {"environment": {}, "profile": "smoke"})
        run.record("nb", "gemm", [_speed_row(700.0 + launch)], pd.DataFrame({"x": [1.0]}), input_hash="h")
    assert "matrix product" not in headlines_markdown(runs_in(tmp_path)) + summary_markdown(runs_in(tmp_path))


def test_one_run_gives_means_over_seeds_and_differences_and_no_speed(tmp_path):
    trained = _trained()
    # On one rank, both trainings are on one device.
    trained.append(replace(trained[-1], variant="fsdp", value=0.0, params=trained[-1].params | {"ranks": 1}))
    runs = {_run(tmp_path / "a", [_speed_row(700.0), *trained]): "h200"}
    headlines, few = headlines_markdown(runs).split(FEW)
    assert re.search(r"\| resnet18, accuracy, test split, mean of 5 seeds[^|]*\| NVIDIA H200 \| 94.0 % \| 5 \|", headlines)
    assert "DDP on 2 ranks: difference of the loss from one device | NVIDIA H200 | 1.0e-07 | 0.0001 | h200 |" in headlines
    assert "FSDP" not in headlines and "vit" not in headlines and "matrix product" not in headlines + few
    summary = summary_markdown(runs)
    assert "5 trainings" in summary and "matrix product" not in summary and "No time and no rate is in this table yet" in summary


def test_the_summary_has_at_most_ten_lines_and_no_weak_scaling_without_strong(tmp_path):
    products = [_speed_row(700.0, dtype=dtype) for dtype in ("bf16", "fp8_e4m3fn", "fp8_e5m2", "fp32")]
    links = [
        _speed_row(
            300.0, experiment="collectives", variant="all_reduce", metric="busbw_gb_s", params={"ranks": ranks, "bytes": 8}
        )
        for ranks in (2, 3, 4, 5, 6, 8)
    ]
    scaled = [
        _speed_row(
            0.9,
            experiment="scaling",
            variant="ddp",
            metric="scaling_efficiency",
            params={"ranks": 2, "model": "gpt2_124m", "strategy": "ddp", "mode": mode},
            limit=None,
            limit_source="no limit: ideal is 1",
        )
        for mode in ("strong", "weak")
    ]
    traced = replace(
        scaled[0], metric="share", value=0.95, params={"ranks": 1, "mode": "weak", **BUSY_GPU}, ci_low=None, ci_high=None
    )
    runs = {}
    for number in range(5):
        rows = [*(_scaled_row(row, 1 + number / 1000) for row in (*products, *links, *scaled)), traced]
        runs[_run(tmp_path / str(number), rows)] = "launches"
    summary = summary_markdown(runs)
    lines = [line for line in summary.splitlines() if line.startswith("| ") and "quantity" not in line and "---" not in line]
    assert len(lines) == MOST_LINES - 1 and "scaling" not in summary and "fp32" not in summary
    assert "No time" not in summary
    page = headlines_markdown(runs)
    assert page.count("weak scaling") == page.count("strong scaling") == 1


def _scaled_row(row: Row, factor: float) -> Row:
    ends = {name: getattr(row, name) * factor for name in ("value", "ci_low", "ci_high")}
    return replace(row, **ends)


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt2_124m_cut_to_l4"])
def test_the_summary_names_the_training_loop_in_each_profile(name, tmp_path):
    params = {"batch": 65536, "compiled": True, "over": "plain"}
    runs = {}
    for number in range(5):
        speed = _speed_row(
            1.1 + number / 1000,
            experiment="language_training_speed",
            variant=name,
            metric="speedup",
            params=params,
            limit=None,
            limit_source="no limit: not bounded",
        )
        times = [replace(speed, metric="step_time_s", params=params | {"loop": loop}) for loop in ("plain", "hyperion")]
        runs[_run(tmp_path / str(number), [speed, *times])] = "launches"
    assert (
        f"| {name}, training, batch 65,536 tokens: this library over a plain compiled loop | NVIDIA H200 | 1.102 × | 5 launches"
        in (summary_markdown(runs))
    )


def test_rows_are_counted(tmp_path):
    sentence = counts_markdown({_run(tmp_path / "a", [_speed_row(700.0), *_trained()]): "a"})
    assert sentence.startswith(
        "Of the 4 rows of the reference runs, 3 have an interval and 2 have a check. 3 state a limit, and 1 "
    )


def test_the_page_of_launches_names_their_number_and_their_median(tmp_path):
    page = launches_page("h200-launches", _launches(tmp_path / "a", [700.0, 710.0, 720.0]))
    assert page.startswith("# h200-launches\n") and "Each of the 3 numbered folders" in page and "| 710 TFLOPS | 3 |" in page


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


def test_a_page_gets_tables_with_links_to_the_runs(tmp_path, monkeypatch):
    """Folders of launches are found one level deeper than runs, and their link leads to the folder of all launches."""
    monkeypatch.chdir(tmp_path)
    _launches(tmp_path / "reference/h200-launches", [700.0, 710.0, 720.0, 730.0, 740.0])
    _run(tmp_path / "reference/h200", _trained())
    assert sorted(set(runs_in(Path("reference")).values())) == ["h200", "h200-launches"]
    page = Path("docs/page.md")
    page.parent.mkdir()
    page.write_text(
        "before <!-- counts: reference -->old<!-- end of counts --> after\n"
        "<!-- summary: reference -->\nold\n<!-- end of summary -->\n\nend\n"
    )
    assert update_page(page) == ["counts: reference", "summary: reference"]
    text = page.read_text()
    assert text.startswith("before <!-- counts: reference -->Of the 8 rows") and text.endswith("<!-- end of summary -->\n\nend\n")
    assert (
        "| [h200-launches](../reference/h200-launches/README.md) |" in text and "| [h200](../reference/h200/README.md) |" in text
    )
    update_page(page)
    assert page.read_text() == text


def test_a_page_without_markers_and_a_folder_without_runs_are_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(HyperionError, match="no markers"):
        update_page(page)
    page.write_text(f"<!-- headlines: {tmp_path} -->\nold\n<!-- end of headlines -->\n")
    with pytest.raises(HyperionError, match="no run is in this folder"):
        update_page(page)
    assert "old" in page.read_text()


@pytest.mark.parametrize(
    ("damaged", "fault"),
    [
        ("<!-- summary: reference -->\nold\n<!-- end of sumary -->\n", "summary: reference --> has no end marker"),
        ("<!-- counts: reference -->\nold\n<!-- end of counts ->\n", "counts: reference --> has no end marker"),
        ("<!-- summary -->\nold\n<!-- end of summary -->\n", "end of summary --> has no opening marker"),
        ("<!-- summary reference -->\nold\n<!-- end of summary -->\n", "end of summary --> has no opening marker"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_damaged_marker_is_named_and_the_page_is_unchanged(damaged, fault, first, tmp_path, monkeypatch):
    """Other markers of the page are whole: of another kind and, of the same kind, in front or behind."""
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "reference/h200", _trained())
    whole = "<!-- counts: reference -->\nold\n<!-- end of counts -->\n"
    page, text = Path("page.md"), damaged + whole if first else whole + damaged
    page.write_text(text)
    with pytest.raises(HyperionError, match=fault) as caught:
        update_page(page)
    line = (1 if first else 4) + 2 * fault.startswith("end of")
    assert caught.value.where == f"page.md, line {line}" and page.read_text() == text


def test_a_page_that_is_not_utf_8_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(HyperionError, match="the page is not UTF-8"):
        update_page(page)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=2, max_size=6))
def test_the_interval_of_times_stays_positive_and_contains_the_median(launches):
    """With wide intervals within launches, an error added to a time could make it negative, and its rate would be nonsense."""
    values = [value for value, _, _ in launches]
    estimate = launches_estimate(values, [(value / below, value * above) for value, below, above in launches])
    rate = estimate.map(lambda seconds: 1 / seconds)
    assert 0 < estimate.ci_low <= estimate.value <= estimate.ci_high
    assert 0 < rate.ci_low <= rate.value <= rate.ci_high


@pytest.mark.parametrize(
    ("states", "steady"),
    [(["yes", "yes"], "yes"), (["yes", NO_DRIFT], NO_DRIFT), ([NO_DRIFT, NO_DRIFT], NO_DRIFT), (["yes", ""], ""), ([""], "")],
)
def test_launches_are_as_steady_as_the_worst_of_them(states, steady):
    members = [SimpleNamespace(headline=SimpleNamespace(steady=state)) for state in states]
    assert Launches(tuple(members)).steady == steady
    many = Launches(tuple(members * LEAST_LAUNCHES))
    assert many.is_headline is (steady != NO_DRIFT) and not Launches(many.members[: LEAST_LAUNCHES - 1]).is_headline
