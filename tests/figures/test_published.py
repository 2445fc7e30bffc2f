"""The published tables are shown number by number, each with source and defects."""

import pytest

from hyperion.errors import HyperionError
from hyperion.figures.published import published_bandwidth, published_baseline, published_gemm, published_source, published_tables


def test_the_tables_are_as_published():
    gemm = published_gemm().set_index(["dtype", "n"])["tflops"]
    assert len(gemm) == 12 and gemm["fp16", 8192] == 128.22 and gemm["fp32", 1024] == 12.46 and gemm["bf16", 2048] == 64.51
    streams = published_bandwidth()
    assert streams["gb_s"].tolist() == [796, 992, 1249, 1266, 1261, 1269]
    assert streams["percent_of_peak"].max().round() == 77
    assert published_baseline()["total_ms"].tolist() == [56.32, 5.44, 12.52]


def test_every_line_carries_source_and_defects():
    for table in (published_gemm(), published_bandwidth(), published_baseline()):
        assert table["source"].str.contains("MI250X").all() and table["defects"].str.len().gt(20).all()
    assert "without warm-up" in published_gemm()["defects"].iloc[0]
    vit = published_baseline().set_index("model").loc["Vision Transformer"]
    assert "not a Vision Transformer" in vit["defects"]
    assert "GCD" in published_source()["machine"]


def test_peaks_are_those_of_one_gcd():
    table = published_gemm().set_index(["dtype", "n"])
    assert round(table.loc[("fp16", 8192), "percent_of_peak"]) == 67
    assert table.loc["fp32", "percent_of_peak"].isna().all()


def test_the_shown_tables_keep_the_published_digits_and_say_each_defect_once():
    (_, rates, _), (_, streams, _), (_, steps, defects) = published_tables("gemm", "bandwidth", "baseline")
    assert rates["fp16 [TFLOPS]"].tolist() == ["15.4", "71.56", "113.21", "128.22"]
    assert streams["% of 1638 GB/s"].tolist()[0] == "48.6" and steps["forward [ms]"].tolist()[0] == "18.66"
    assert defects.count("not a Vision Transformer") == 1 and defects.count("nothing is learned") == 1


def test_each_further_table_is_found_by_name_with_its_defects():
    (title, steps, defects), (_, speeds, _) = published_tables("scaling", "compilation")
    assert title.startswith("One to four devices") and steps["speed-up"].tolist() == ["3.42", "2.93", "2.83"]
    assert "the work is not the same" in defects and speeds["best speed-up"].tolist() == ["1.68", "1.07"]
    assert len(published_tables()) == 7
    with pytest.raises(HyperionError, match="no published table is named gem"):
        published_tables("gem")
