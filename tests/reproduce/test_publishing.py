import base64

import pandas as pd
import pytest

from hyperion.errors import HyperionError
from hyperion.reproduce import publishing
from hyperion.reproduce.publishing import publish
from hyperion.results import Row, Run


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run", {"profile": "smoke", "environment": {}})
    row = Row(notebook="01_x", experiment="counting", variant="v", metric="count", value=2.0)
    run.record("01_x", "counting", [row], pd.DataFrame({"x": [1.0]}), input_hash="h")
    run.write({"notebooks/01_x.html": b"<p>small</p>", "notebooks/01_x.ipynb": b"{}", "notebooks/02_y.html": b"x" * 500})
    return run


def test_a_reference_holds_rows_samples_pages_and_a_readme(run, tmp_path):
    folder, left_out = publish(run, "h100", tmp_path / "reference")
    assert folder == tmp_path / "reference/h100" and left_out == []
    reference = Run.open(folder)
    assert {"README.md", "rows.csv", "run.json", "notebooks/01_x.html"} <= set(reference.verify())
    assert reference.rows() == run.rows() and reference.finished("01_x", "counting")
    assert not (folder / "notebooks/01_x.ipynb").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["h100"]


def test_publishing_again_replaces_it_whole(run, tmp_path):
    publish(run, "h100", tmp_path / "reference")
    run.write({"notebooks/01_x.html": b"<p>newer</p>"})
    folder, _ = publish(run, "h100", tmp_path / "reference")
    assert (folder / "notebooks/01_x.html").read_bytes() == b"<p>newer</p>"


def test_the_report_is_not_kept_since_it_is_rebuilt_from_the_rows(run, tmp_path):
    run.write({"report.html": b"<p>pictures again</p>"})
    folder, _ = publish(run, "h100", tmp_path / "reference")
    assert not (folder / "report.html").exists() and (folder / "README.md").exists()


def test_a_picture_that_lies_beside_a_page_is_linked_and_another_stays_in_it(run, tmp_path):
    kept, only_here = b"picture" * 40, b"another"
    script = '<script>"data:image/png;base64,x" + y</script>'
    page = '<img src="data:image/png;base64,{}"><img src="data:image/png;base64,{}">' + script
    run.write(
        {
            "benchmarks/gemm/a.png": kept,
            "notebooks/01_x.html": page.format(*(base64.b64encode(png).decode() for png in (kept, only_here))).encode(),
        }
    )
    folder, _ = publish(run, "h100", tmp_path / "reference")
    told = (folder / "notebooks/01_x.html").read_text()
    link = "../benchmarks/gemm/a.png"
    assert told == f'<img src="{link}"><img src="data:image/png;base64,{base64.b64encode(only_here).decode()}">{script}'
    assert (folder / "notebooks" / link).resolve().read_bytes() == kept


def test_large_pages_are_left_out_and_named(run, tmp_path, monkeypatch):
    without_pages = sum(len(run.read(name)) for name in run.verify() if not name.startswith("notebooks/"))
    monkeypatch.setattr(publishing, "LARGEST_BYTES", without_pages + 100)
    folder, left_out = publish(run, "h100", tmp_path / "reference")
    assert left_out == ["notebooks/02_y.html"] and (folder / "notebooks/01_x.html").exists()
    monkeypatch.setattr(publishing, "LARGEST_BYTES", without_pages - 1)
    with pytest.raises(HyperionError, match="beyond its"):
        publish(run, "h200", tmp_path / "reference")
    assert not (tmp_path / "reference/h200").exists()


def test_a_path_of_the_machine_or_an_edited_file_is_refused_and_the_old_reference_stays(run, tmp_path):
    folder, _ = publish(run, "h100", tmp_path / "reference")
    run.write({"notebooks/01_x.html": b"made in /home/me/hyperion"})
    with pytest.raises(HyperionError, match="/home/me/hyperion") as caught:
        publish(run, "h100", tmp_path / "reference")
    assert caught.value.where == "notebooks/01_x.html"
    (run.folder / "rows.csv").write_text("edited")
    with pytest.raises(HyperionError, match="edited"):
        publish(run, "h100", tmp_path / "reference")
    Run.open(folder).verify()


def test_a_name_that_is_no_folder_name_is_refused(run, tmp_path):
    with pytest.raises(HyperionError, match="cannot name"):
        publish(run, "../h100", tmp_path / "reference")
