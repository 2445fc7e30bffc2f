"""What the pictures of memories and launches show: levels and limits, values in bars, the matrix of peers, the crossing."""

import numpy as np
import pandas as pd
import pytest

from hyperion.book.plots import draw
from hyperion.experiments.hardware.figures_memory import element_bytes, launch_cost, memory_levels, stream_formats, transfers
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.measure import FORMATS
from hyperion.results import Run
from tests.book.made_up.levels import LIMITS
from tests.book.made_up.run import GPU


def drawn(function, material):
    with styled():
        return function(material)


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return " | ".join([*found, figure.get_supxlabel(), figure.get_suptitle()])


def test_the_size_of_an_element_follows_from_the_name_of_each_format():
    assert {name: element_bytes(name) for name in FORMATS} == {name: chosen.bytes for name, chosen in FORMATS.items()}
    assert (element_bytes("fp8"), element_bytes("nf4")) == (1, 0.5)


def recorded(folder, experiment, rows):
    run = Run.create(folder, {"environment": GPU})
    run.record(LIMITS, experiment, rows, pd.DataFrame({"time_s": [0.1]}), input_hash="h")
    return Material(run)


def test_levels_mark_every_known_capacity(material, cpu_material):
    assert "last-level cache 60 MiB" in texts(drawn(memory_levels, material))
    shown = texts(drawn(memory_levels, cpu_material))
    assert "L1 32 KiB × 2" in shown and "L2 1 MiB × 2" in shown and "L3 32 MiB" in shown


def test_levels_draw_the_data_sheets_limit_where_there_is_one(material, cpu_material):
    assert "device memory, limit 4,800 GB/s" in texts(drawn(memory_levels, material))
    assert "limit 4,800" not in texts(drawn(memory_levels, cpu_material))


def test_levels_show_every_point_and_say_where_launches_are_measured(material):
    figure = drawn(memory_levels, material)
    rows = material.of("memory_levels", metric="bandwidth_gb_s")
    x = np.concatenate([line.get_xdata() for line in figure.axes[0].lines if len(line.get_xdata()) > 2])
    assert set(x) == {row.params["working_set_bytes"] for row in rows}
    assert "Hollow" in texts(figure) and "4 KiB to 128 KiB: no limit: mostly launching" in texts(figure)


def test_a_gap_in_the_levels_is_named(tmp_path, material):
    gone = [row for row in material.of("memory_levels") if row.variant != "copy"]
    copy = next(row for row in material.of("memory_levels") if row.variant == "copy")
    absent = {"value": None, "value_reason": "out of memory: no room", "limit": None, "n": None, "ci_low": None, "ci_high": None}
    row = type(copy)(**{**{name: getattr(copy, name) for name in copy.__dataclass_fields__}, **absent})
    figure = drawn(memory_levels, recorded(tmp_path / "run", "memory_levels", [*gone, row]))
    assert "not measured (out of memory: no room)" in texts(figure)


def test_bars_are_the_rates_and_no_others(material):
    figure = drawn(stream_formats, material)
    rates = [r.value for r in material.of("stream_formats", metric="bandwidth_gb_s") if "plain_loop_calls" not in r.params]
    assert sorted(bar.get_height() for bar in figure.axes[0].patches) == pytest.approx(sorted(rates))


def test_formats_say_limit_plain_loop_triad_and_energy(material):
    shown = texts(drawn(stream_formats, material)).replace("\n", " ")
    assert "limit 4,800 GB/s" in shown and "copy over a plain loop of copy_" in shown
    assert "% of its limit" in shown and "Joules per gigabyte in fp32, from the power during the stream: copy 0.12" in shown
    assert "Arrays have 1 GiB in every format" in shown


def test_formats_without_limit_or_power_say_so(cpu_material):
    shown = texts(drawn(stream_formats, cpu_material))
    assert "no limit: unknown" in shown and "unknown: no power" in shown and "% of its limit" not in shown


def test_the_matrix_of_peers_has_a_number_for_every_pair_and_none_on_its_diagonal(material):
    axes = drawn(transfers, material).axes[1]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    peers = [row for row in material.of("transfers") if "destination" in row.params]
    assert len(peers) == 12
    for row in peers:
        assert shown[row.params["destination"], row.params["source"]] == f"{row.value:.0f}"
    assert [shown[place, place] for place in range(4)] == [""] * 4
    assert "limit 450" in axes.get_title(loc="left")


def test_copies_have_a_curve_for_each_direction_and_memory(material):
    labels = drawn(transfers, material).axes[0].get_legend_handles_labels()[1]
    assert sorted(labels) == sorted(f"{d}, {m}" for d in ("host to device", "device to host") for m in ("pinned", "pageable"))


def test_one_gpu_has_no_matrix(tmp_path, material):
    alone = [row for row in material.of("transfers") if "destination" not in row.params]
    figure = drawn(transfers, recorded(tmp_path / "run", "transfers", alone))
    assert len(figure.axes) == 1 and "Largest tensor: 138.1 GiB" in texts(figure)


def test_a_cpu_shows_its_largest_tensor_and_why_nothing_is_copied(cpu_material):
    figure = drawn(transfers, cpu_material)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [0.98]
    assert "host and device are one memory" in texts(figure)


def test_launches_are_bars_in_microseconds(material, cpu_material):
    bars = [bar.get_height() for bar in drawn(launch_cost, material).axes[0].patches]
    launches = [1e6 * row.value for row in material.of("launch_cost", metric="launch_time_s")]
    assert bars == pytest.approx(launches) and len(bars) == 2
    labels = [text.get_text() for text in drawn(launch_cost, material).axes[0].texts]
    assert all(len(label.removesuffix(" µs").replace(".", "").lstrip("0")) <= 4 for label in labels)
    figure = drawn(launch_cost, cpu_material)
    assert len(figure.axes[0].patches) == 1 and "a CPU has no graphs" in texts(figure)


def test_a_copys_time_is_its_bytes_over_its_rate(material):
    line = drawn(launch_cost, material).axes[1].lines[0]
    rows = material.of("launch_cost", metric="bandwidth_gb_s")
    times = {row.params["working_set_bytes"]: row.params["working_set_bytes"] / row.value / 1e3 for row in rows}
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(times)


def test_the_crossing_is_drawn_with_the_line_that_it_crosses(material, cpu_material):
    assert "Smallest copy that takes longer than its launch: 13 MiB" in texts(drawn(launch_cost, material))
    assert "2 × eager" in texts(drawn(launch_cost, cpu_material)) and "2 × eager" not in texts(drawn(launch_cost, material))


@pytest.mark.parametrize("name", ["memory_levels", "stream_formats", "transfers", "launch_cost"])
def test_the_book_knows_the_picture_by_its_name(material, name):
    assert draw(name, material)[:4] == b"\x89PNG"
