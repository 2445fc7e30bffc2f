"""The run in one picture: as many panels as the run has subjects for, readable at half size."""

import io

import pytest
from PIL import Image

from hyperion.book.plots import draw, predictions, scored, summary
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.paths import reference_folder
from hyperion.results import Row, Run, metric_named
from tests.experiments.hardware.test_figures import texts


def panels(material):
    with styled():
        figure = summary(material)
    return figure, [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.slow
def test_it_shows_rates_with_limits_the_roofline_and_the_losses(material):
    figure, titles = panels(material)
    assert [title.split(",")[0] for title in titles] == [
        "Matrix products",
        "Memory bandwidth",
        "Roofline as measured",
        "Language model",
    ]
    shown = texts(figure)
    assert "fp16, bf16 limit" in shown and "limit 4,800 GB/s" in shown and "unigram" in shown and "ridge" in shown
    assert "of the test images (data mirror)" in shown
    assert min(text.get_fontsize() for axes in figure.axes for text in axes.texts) >= 9


@pytest.mark.slow
def test_without_a_datasheet_no_share_is_spoken_of(cpu_material):
    figure, titles = panels(cpu_material)
    assert len(titles) == 4 and "%" not in titles[0] + titles[1] and "floor" in texts(figure)


@pytest.mark.slow
def test_its_size_fits_the_first_screen_of_a_page(material):
    content = draw("summary", material)
    picture = Image.open(io.BytesIO(content))
    assert 1100 <= picture.width <= 1300 and 600 <= picture.height <= 800 and len(content) < 200_000


@pytest.mark.slow
def test_a_run_of_one_subject_has_none_and_of_two_has_one_line(run, tmp_path):
    hardware = Run.create(tmp_path / "hardware", run.information())
    for experiment, drawn in (("gemm", False), ("bandwidth", True)):
        notebook = "01_hardware_exploration"
        kept = run.finished(notebook, experiment)
        hardware.record(
            notebook,
            experiment,
            run.rows(notebook, experiment),
            run.samples(notebook, experiment),
            input_hash=kept["input_hash"],
            source=kept["source"],
        )
        assert (draw("summary", Material(hardware)) is not None) == drawn
    assert len(panels(Material(hardware))[1]) == 3


def drawn(material):
    with styled():
        return predictions(material)


def rank_row(rank, value, predicted, **columns):
    return Row(
        notebook="n",
        experiment="e",
        variant="ddp",
        metric="tokens_per_s",
        value=value,
        rank=rank,
        predicted=predicted,
        params={"epoch": 1},
        **columns,
    )


def test_ratios_and_the_readers_guess(material):
    lines = {line.get_label(): line for line in drawn(material).axes[0].lines}
    row = next(r for r in material.of("gemm") if (r.dtype, r.params["m"], r.variant) == ("bf16", 16384, "torch.mm"))
    assert lines["reader's guess"].get_ydata()[0] == pytest.approx(500 / row.value)
    foretold = [r for r in material.of("gemm") if r.predicted and r.value]
    assert sorted(lines["gemm_tflops [TFLOPS] ↑"].get_ydata()) == pytest.approx(sorted(r.predicted / r.value for r in foretold))


def test_ceilings_that_an_earlier_version_stored_are_not_drawn():
    figure = drawn(Material(Run.open(reference_folder() / "h200x2")))
    labels = [str(line.get_label()) for line in figure.axes[0].lines]
    assert labels and not any(label.startswith(("gemm_tflops", "bandwidth_gb_s", "images_per_s")) for label in labels)


def test_where_less_is_better_the_ratio_is_turned_round(material):
    figure = drawn(material)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    rows = scored(material.rows)
    lower = {row.metric for row in rows if metric_named(row.metric).direction == "lower"}
    assert lower and "above 1 the prediction was too optimistic" in figure.get_supxlabel().replace("\n", " ")
    for metric in lower:
        line = next(line for name, line in lines.items() if name.startswith(metric) and name.endswith("↓"))
        expected = [row.value / row.predicted for row in rows if row.metric == metric]
        assert list(line.get_ydata()) == pytest.approx(expected)


def test_a_forecast_of_each_rank_is_scored_for_each():
    parts = [rank_row(rank, 100.0, 120.0) for rank in range(4)]
    assert scored([rank_row(None, 400.0, None), *parts]) == parts
