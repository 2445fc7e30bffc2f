"""Bars of scientific kernels and of shared memory: each rate, its share of a limit, and what is not measured."""

import pandas as pd

from hyperion.chapter import experiment_named
from hyperion.experiments.hardware.figures_workloads import fp64_kernels, mapped_memory
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.run import GPU
from tests.chapter.toy import toy_context


def drawn(function, folder, experiment: str, rows):
    """The figure of made-up rows, given as (variant, metric, value or reason, limit, params)."""
    experiment_named(experiment)  # registers the metrics of the subject
    context = toy_context(experiment, {}, folder)
    run = Run.create(folder / "run", {"environment": GPU})
    stored = []
    for variant, metric, value, limit, params in rows:
        if isinstance(value, str):
            stored.append(context.absent_row(variant, metric, value, params=params))
            continue
        columns = {"n": 30, "ci_low": 0.9 * value, "ci_high": 1.1 * value, "check": "made up", "check_error": 0.0}
        source = "made up" if limit else "no limit: made up"
        columns |= {"check_tolerance": 0.0, "limit": limit, "limit_source": source, "params": params}
        stored.append(context.row(variant, metric, value, **columns))
    run.record("toy", experiment, stored, pd.DataFrame({"time_s": [0.1]}), input_hash="h")
    with styled():
        return function(Material(run))


def texts(figure):
    return " | ".join([text.get_text() for axes in figure.axes for text in axes.texts] + [figure.get_supxlabel()])


def test_kernels_are_bars_with_their_share_of_the_limit_and_flops(tmp_path):
    rows = [
        ("fft 1d", "bandwidth_gb_s", 2000.0, 4000.0, {"length": 1024}),
        ("fft 1d", "fft_tflops", 3.125, 6.25, {"length": 1024}),
        ("7-point stencil", "bandwidth_gb_s", 300.0, None, {"length": 384}),
    ]
    figure = drawn(fp64_kernels, tmp_path, "fp64_kernels", rows)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [2000, 300]
    shown = texts(figure)
    assert "2,000 GB/s, 50.0 % of its limit" in shown and "300 GB/s |" in shown
    assert "fft 1d, length 1,024: 3.125" in shown and "7-point stencil, length 384: no limit: made up" in shown


def test_shared_memory_has_bars_and_reasons_and_without_values_no_figure(tmp_path):
    absent = [("managed", "bandwidth_gb_s", "unavailable: no room", None, {"access": "read"})]
    measured = [("mapped", "bandwidth_gb_s", 50.0, None, {"access": access}) for access in ("read", "write")]
    figure = drawn(mapped_memory, tmp_path / "some", "mapped_memory", measured + absent)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["mapped, read", "mapped, write"]
    assert "managed, read: not measured (unavailable: no room)" in texts(figure)
    assert drawn(mapped_memory, tmp_path / "none", "mapped_memory", absent) is None
