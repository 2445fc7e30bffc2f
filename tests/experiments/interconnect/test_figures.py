"""What the interconnect figures and tables show: limits, every collective and cell, and the recommended sizes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from hyperion.experiments.interconnect.figures import (
    bucket_size,
    collectives,
    kernels_chosen,
    link_meanings,
    links_between,
    mpi_collectives,
    overlap,
    rates_by_size,
)
from hyperion.figures.material import Material, number
from hyperion.figures.style import png, styled
from hyperion.results import Run
from tests.book.made_up.collectives import FACTORS, LATENCY_S, OVERLAP_S, SIZES
from tests.book.made_up.run import GPU
from tests.experiments.hardware.test_figures import texts


@pytest.fixture
def figures(material, cpu_material):
    with styled():
        return collectives(material), collectives(cpu_material)


def test_the_limit_of_the_links_is_drawn_or_its_absence_explained(figures):
    assert "limit of the links 450 GB/s" in texts(figures[0])
    assert "no limit: gloo's ranks share a host." in texts(figures[1]) and "limit of the links" not in texts(figures[1])


def test_every_collective_is_drawn_over_every_size_of_the_swept_format(figures):
    rates = figures[0].axes[0]
    assert rates.get_legend_handles_labels()[1] == list(FACTORS)
    curves = [line.get_xdata() for line in rates.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 2]
    assert len(curves) == len(FACTORS) and all(list(curve) == SIZES for curve in curves)


def test_a_ring_lies_on_each_curve_where_it_reaches_half(figures):
    rings = [line for line in figures[0].axes[0].lines if line.get_markersize() == 10]
    assert len(rings) == len(FACTORS)
    for ring, factor in zip(rings, FACTORS.values(), strict=True):
        assert ring.get_xdata()[0] == pytest.approx(LATENCY_S * 370e9 / factor)
        assert ring.get_ydata()[0] == pytest.approx(370 / 2, rel=0.05)


def test_the_fit_is_the_line_through_the_times(figures):
    fits = [line for line in figures[0].axes[1].lines if line.get_linestyle() == ":"]
    assert len(fits) == len(FACTORS)
    for fit, factor in zip(fits, FACTORS.values(), strict=True):
        expected = 1e6 * (LATENCY_S + np.array(fit.get_xdata()) * factor / 370e9)
        assert np.array(fit.get_ydata()) == pytest.approx(expected, rel=0.06)


def test_a_wide_interval_lies_within_the_panel(tmp_path, cpu_material):
    rows = [
        replace(row, ci_high=1.5 * row.value) if row.metric == "busbw_gb_s" and row.value is not None else row
        for row in cpu_material.of("collectives")
    ]
    run = Run.create(tmp_path / "run", {"environment": GPU})
    run.record(rows[0].notebook, "collectives", rows, pd.DataFrame({"time_s": [0.1]}), input_hash="h")
    with styled():
        axes = collectives(Material(run)).axes[0]
    assert axes.get_ylim()[1] >= max(row.ci_high for row in rows if row.metric == "busbw_gb_s" and row.value is not None)


def test_the_recommended_size_and_ddps_own_are_drawn_beside_the_curves(material):
    with styled():
        axes = bucket_size(material).axes[0]
    curves = {line.get_label(): line for line in axes.lines if len(line.get_xdata()) > 2}
    assert list(curves) == ["all_reduce", "all_gather", "reduce_scatter"]
    assert all(max(curve.get_ydata()) == pytest.approx(100) for curve in curves.values())
    drawn = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2]
    advised = [9 * LATENCY_S * 370e9 / FACTORS[name] for name in curves]
    assert drawn == pytest.approx([*advised, 25 * 2**20], rel=0.05)


def test_the_name_of_ddps_own_size_lies_on_no_curve(material):
    with styled():
        figure = bucket_size(material)
    png(figure)
    (axes,) = figure.axes
    name = axes.texts[0].get_window_extent()
    for curve in (line for line in axes.lines if len(line.get_xdata()) > 2):
        x, y = axes.transData.transform(np.column_stack(curve.get_data())).T
        assert np.interp([name.x0, name.x1], x, y).min() > name.y1


def test_a_negative_share_is_no_share_of_the_shorter_one(material):
    with styled():
        longer = replace(material.of("collectives", metric="overlap_share")[0], value=-0.89)
        rows = [longer if row.metric == "overlap_share" else row for row in material.of("collectives")]
        title = overlap(SimpleNamespace(of=lambda name, **_: [r for r in rows if r.variant == "overlap"], machine=lambda _: "m"))
    assert "nothing hidden" in title.axes[0].get_title("left") and "%" not in title.axes[0].get_title("left")


def test_both_at_once_is_drawn_between_hidden_and_in_turns(material):
    with styled():
        axes = overlap(material).axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1e3 * s for s in OVERLAP_S.values()], rel=0.05)
    bounds = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1 and line.get_linestyle() == "--"]
    assert bounds == pytest.approx([3.0, 5.0], rel=0.05)
    assert "25 MiB" in axes.get_title("left") and "% of the shorter one hidden" in axes.get_title("left")


def test_each_operation_through_mpi_is_drawn_beside_the_all_reduce_of_the_first_experiment(material):
    with styled():
        (axes,) = mpi_collectives(material).axes
    assert axes.get_title("left") == "4 ranks, host-staged" and axes.get_yscale() == "log"
    assert axes.get_legend_handles_labels()[1] == ["all_reduce", "broadcast", "reduce", "scatter", "gather"]
    (dashed,) = (line for line in axes.lines if line.get_linestyle() == "--")
    rates = [row for row in material.of("collectives", variant="all_reduce", metric="busbw_gb_s") if row.dtype == "fp32"]
    assert list(dashed.get_xdata()) == SIZES and list(dashed.get_ydata()) == [row.value for row in rates]


def test_the_limit_of_a_path_lies_inside_its_panel(material):
    def made(name: str, **wanted) -> list:
        staged = material.of(name, **wanted) if name == "mpi_collectives" else []
        linked = [replace(row, params=row.params | {"path": "gpu-aware"}, limit=450.0, limit_source="links") for row in staged]
        return staged + linked

    with styled():
        figure = mpi_collectives(SimpleNamespace(of=made, machine=lambda _: "m"))
    staged, linked = figure.axes
    assert linked.get_title("left") == "4 ranks, gpu-aware" and linked.get_ylim()[1] > 450
    assert staged.get_ylim()[1] < 450 and "host-staged: no limit" in texts(figure) and "gpu-aware: no limit" not in texts(figure)


def test_a_line_a_size_and_a_column_a_collective(material):
    rows = material.of("collectives")
    table = rates_by_size(rows)
    assert list(table.columns) == ["dtype", "S", *FACTORS]
    assert len(table) == len(SIZES) + 1 and list(table["S"])[:2] == ["64 B", "512 B"]
    found = next(r for r in rows if r.metric == "busbw_gb_s" and (r.variant, r.params["bytes"]) == ("broadcast", SIZES[-1]))
    assert table[table["S"] == "1 GiB"]["broadcast"].item() == number(found.value, 3)


def test_what_was_not_measured_is_an_empty_cell(material):
    rows = [row for row in material.of("collectives") if (row.variant, row.dtype) != ("all_gather", "bf16")]
    table = rates_by_size(rows)
    assert table[table["dtype"] == "bf16"]["all_gather"].item() == ""


def test_links_are_a_matrix_of_senders_and_receivers_and_kernels_are_named(material, cpu_material):
    rows = material.of("collectives")
    links = links_between(rows)
    assert list(links.columns) == ["from", "to GPU0", "to GPU1", "to GPU2", "to GPU3", "NUMA node"] and len(links) == 4
    assert [links[f"to GPU{i}"][i] for i in range(4)] == ["X"] * 4 and links["to GPU0"][1] == "NV18"
    assert link_meanings(rows) == "NV18: 18 NVLinks; source: NVML"
    (kernel,) = kernels_chosen(rows).to_dict("records")
    assert (kernel["S"], kernel["backend"], kernel["algorithm"]) == ("64 B", "nccl", "ring")
    assert not len(links_between(cpu_material.of("collectives")))
    assert kernels_chosen(cpu_material.of("collectives"))["algorithm"].tolist() == ["gloo does not tell"]
