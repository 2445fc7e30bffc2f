import json

import pytest

from hyperion.reproduce.notebooks import BookError, read_book, read_notebook, select
from tests.reproduce.small_book import make_book, write_notebook


def stems(notebooks):
    return [notebook.stem for notebook in notebooks]


def test_the_book_is_in_order_of_phase_number_and_file_name(tmp_path):
    for folder, stem in (("phase10_later", "01_c"), ("phase2_middle", "02_b"), ("phase2_middle", "01_a"), ("phase1_x", "01_z")):
        write_notebook(tmp_path / folder, stem, ["1"])
    write_notebook(tmp_path / "phase1_x", "draft", ["1"])
    assert stems(read_book(tmp_path)) == ["01_z", "01_a", "02_b", "01_c"]


def test_metadata_and_code_are_read(tmp_path):
    path = write_notebook(tmp_path / "phase1_x", "01_z", ["1", " "], time_budget_s={"smoke": 7}, optional=[])
    notebook = read_notebook(path)
    assert notebook.produces == ("counting",) and notebook.budget_s("smoke") == 7 and notebook.budget_s("replay") > 0
    assert len(notebook.code) == 2  # the parameters and one cell; a blank one is not executed


def test_a_chapter_may_take_longer_on_several_devices(tmp_path):
    path = write_notebook(tmp_path, "01_z", ["1"], time_budget_s={"smoke": 5, "full": 8}, several_devices_s={"full": 40})
    notebook = read_notebook(path)
    assert notebook.budget_s("full") == 8 and notebook.budget_s("full", 2) == 40 and notebook.budget_s("smoke", 2) == 5


def test_a_chapter_may_be_shorter_without_the_frameworks(tmp_path):
    notebook = read_notebook(
        write_notebook(tmp_path, "01_z", ["1"], time_budget_s={"smoke": 95}, without_frameworks_s={"smoke": 9})
    )
    assert notebook.budget_s("smoke") == 95 and notebook.budget_s("smoke", frameworks=False) == 9
    assert notebook.budget_s("full", frameworks=False) == notebook.budget_s("full")


@pytest.mark.parametrize("only", ["03_third", "phase1_hardware/03_third.ipynb", "1.3"])
def test_one_chapter_comes_with_all_it_needs(tmp_path, only):
    assert stems(select(read_book(make_book(tmp_path)), only)) == ["01_first", "02_second", "03_third"]


@pytest.mark.parametrize("only", ["04_alone,02_second", "1.4 1.2", "1.2, 04_alone.ipynb"])
def test_several_chapters_come_with_all_they_need(tmp_path, only):
    assert stems(select(read_book(make_book(tmp_path)), only)) == ["01_first", "02_second", "04_alone"]


def test_an_unknown_chapter_is_an_error_that_lists_them(tmp_path):
    with pytest.raises(BookError, match="05_none"):
        select(read_book(make_book(tmp_path)), "02_second 05_none")
    with pytest.raises(BookError, match="05_none") as caught:
        select(read_book(make_book(tmp_path)), "05_none")
    assert "01_first, 02_second, 03_third, 04_alone" in caught.value.next_step


def test_books_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(BookError, match="no notebooks"):
        read_book(tmp_path)
    write_notebook(tmp_path / "phase1_x", "01_z", ["1"], needs=["02_later"])
    with pytest.raises(BookError, match="no earlier chapter"):
        read_book(tmp_path)
    write_notebook(tmp_path / "phase1_x", "01_z", ["1"])
    write_notebook(tmp_path / "phase2_x", "01_z", ["1"])
    with pytest.raises(BookError, match="two notebooks"):
        read_book(tmp_path)


@pytest.mark.parametrize("damage", ["not json", "[]", '{"cells": [], "metadata": {}}'])
def test_a_file_that_is_no_chapter_is_named(tmp_path, damage):
    path = tmp_path / "01_z.ipynb"
    path.write_text(damage)
    with pytest.raises(BookError) as caught:
        read_notebook(path)
    assert caught.value.where == path


def test_incomplete_metadata_are_named(tmp_path):
    path = write_notebook(tmp_path, "01_z", ["1"])
    document = json.loads(path.read_text())
    del document["metadata"]["hyperion"]["produces"]
    path.write_text(json.dumps(document))
    with pytest.raises(BookError, match="produces"):
        read_notebook(path)


def test_a_notebook_without_parameters_and_names_that_are_no_list_are_refused(tmp_path):
    path = write_notebook(tmp_path, "01_z", ["1"], needs="01_x")
    with pytest.raises(BookError, match="'01_x' is not a list of names"):
        read_notebook(path)
    path = write_notebook(tmp_path, "01_z", ["1"])
    path.write_text(path.read_text().replace('"parameters"', '"parameter"'))
    with pytest.raises(BookError, match="has the tag 'parameters'") as refusal:
        read_notebook(path)
    assert refusal.value.where == path


def test_devices_are_one_or_all_and_all_unless_told(tmp_path):
    assert read_notebook(write_notebook(tmp_path, "01_y", ["1"])).devices == "all"
    assert read_notebook(write_notebook(tmp_path, "01_z", ["1"], devices="one")).devices == "one"
    with pytest.raises(BookError, match=r"devices is .*two"):
        read_notebook(write_notebook(tmp_path, "01_z", ["1"], devices="two"))
