"""What the figures of the chapter on serving show."""

import dataclasses

import pandas as pd
import pytest

from hyperion.experiments.serving.figures import kv_cache_memory, server_load, server_soak
from hyperion.figures.material import Material
from hyperion.figures.style import png, styled
from hyperion.results import Run
from tests.book.made_up.run import GPU
from tests.book.made_up.serving import serving_chapters


@pytest.fixture
def material(tmp_path):
    return material_of(tmp_path, serving_chapters())


def material_of(tmp_path, experiments):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in experiments:
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_bytes_are_marks_on_the_predicted_line(material):
    figure = drawn(kv_cache_memory, material)
    assert legend(figure.axes[0]) == ["tensors of the cache", "predicted"]
    marks, line = figure.axes[0].lines
    assert list(marks.get_ydata()) == list(line.get_ydata()) == [16.0, 64.0]
    assert "device memory: not measured (unavailable: made up)" in figure.get_supxlabel()


def test_latencies_have_a_line_for_each_percentile_and_hollow_marks_for_the_open_loop(material):
    figure = drawn(server_load, material)
    throughput, ttft, tpot = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Throughput", "Time to first token", "Time per output token"]
    assert legend(throughput) == ["predicted: batching is free", "transformers serve"]
    assert legend(ttft) == legend(tpot) == ["p50", "p95"]
    closed, opened = ttft.containers[0].lines[0], ttft.containers[1].lines[0]
    assert list(closed.get_xdata()) == [1, 16] and list(closed.get_ydata()) == pytest.approx([50, 100])
    assert opened.get_fillstyle() == "none" and list(opened.get_ydata()) == pytest.approx([150])
    labels = dict(zip(ttft.get_xticks(), (label.get_text() for label in ttft.get_xticklabels()), strict=True))
    assert labels == {1: "1", 16: "16", 32: "open\nloop"} and list(opened.get_xdata()) == [32]
    assert "50 % of the throughput" in figure.get_supxlabel() and "vllm: not measured" in figure.get_supxlabel()


def test_no_legend_covers_a_point_of_the_load(material):
    figure = drawn(server_load, material)
    png(figure)
    for axes in figure.axes:
        legend_box = axes.get_legend().get_window_extent()
        points = [axes.transData.transform(point) for line in axes.lines for point in zip(*line.get_data(), strict=True)]
        assert all(y < legend_box.y0 for _, y in points)


def test_the_bound_of_the_memory_starts_where_the_fit_starts(material):
    figure = drawn(server_soak, material)
    memory, bound = figure.axes[0].lines[:2]
    assert list(bound.get_xdata()) == [21, 100]
    assert bound.get_ydata()[0] == pytest.approx(memory.get_ydata()[20])
    assert bound.get_ydata()[1] - bound.get_ydata()[0] == pytest.approx(79 / 16)
    assert legend(figure.axes[0]) == ["resident memory of all processes: 2 KiB a request", "bound: 64 KiB a request"]


def test_a_server_for_comparison_has_a_line_and_no_bound(tmp_path):
    chapter, name, rows, readings = serving_chapters()[-1]
    other = dataclasses.replace(rows[0], value=4096.0, ci_low=4000.0, ci_high=4200.0, check="made up", check_tolerance=0.0)
    other = dataclasses.replace(other, params={**rows[0].params, "backend": "other", "requests": 50})
    more = readings.head(50).assign(backend="other")
    samples = pd.concat([readings, more], ignore_index=True)
    figure = drawn(server_soak, material_of(tmp_path, [(chapter, name, [*rows, other], samples)]))
    assert legend(figure.axes[0]) == [
        "transformers serve, resident memory of all processes: 2 KiB a request",
        "other, resident memory of all processes: 4 KiB a request",
        "bound: 64 KiB a request",
    ]
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [100, 2, 50, 0]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert [function(empty) for function in (kv_cache_memory, server_load, server_soak)] == [None] * 3
