"""A run beside others: the same quantity in one line, and nothing set beside what is another quantity."""

import shutil

from hyperion.book.comparison import comparison_table, reference_machines
from hyperion.book.headlines import headlines
from hyperion.figures.material import Material
from hyperion.results import Run
from tests.book.made_up import made_up_run


def test_the_same_quantity_stands_in_one_line_with_its_ratio(material, tmp_path):
    other = Material(Run.open(shutil.copytree(material.run.folder, tmp_path / "other")))
    table = comparison_table(material, [other]).set_index("")
    assert table.index.tolist() == [headline.label for headline in headlines(material)]
    best = table.loc["matrix product, bf16, cold caches"]
    assert best["other"] == best["this run"] and best["this run / other"] == "1"
    assert best["MI250X, as published"] == "121.07 TFLOPS"


def test_other_data_are_another_quantity(material, tmp_path):
    synthetic = Material(made_up_run(tmp_path / "invented", source="synthetic"))
    table = comparison_table(material, [synthetic]).set_index("")
    told = {label.partition(", ")[2]: label for label in table.index}
    assert table.loc[told["perplexity per token, valid split"], "invented"] == ""
    assert table.loc["matrix product, bf16, cold caches", "invented"] != ""


def test_a_run_is_not_its_own_reference(material, tmp_path):
    names = {m.run.folder.name for m in reference_machines(material)}
    assert names and not any("synthetic" in name for name in names)
    name = sorted(names)[0]
    replayed = Material(made_up_run(tmp_path / "again", replay=f"replay:{name}:"))
    assert name not in {m.run.folder.name for m in reference_machines(replayed)}
