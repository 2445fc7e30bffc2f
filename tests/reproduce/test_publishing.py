"""Pages of executed notebooks, and runs that become references."""

import base64
import random
import re
import sys
import zlib
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hyperion.errors import HyperionError
from hyperion.locks import FileLock
from hyperion.reproduce import publishing
from hyperion.reproduce.notebooks import read_notebook
from hyperion.reproduce.publishing import (
    STYLE,
    link_pages,
    notebook_files,
    page,
    portable_copy,
    publish,
    require_no_machine_paths,
    staged_reference,
    with_drawn_formulas,
)
from hyperion.reproduce.runs import Entry, Ledger
from hyperion.results import Prediction, Row, Run
from tests.reproduce.small_book import write_notebook

ROOT = Path(__file__).resolve().parents[2]


def executed():
    text = 'File "/home/me/hyperion/hyperion/x.py", line 3\n/tmp/ipykernel_12/345.py:3: UserWarning'
    bar = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "50%"}
    finished = {"text/html": "", "text/plain": ""}  # this library's bar, when its experiment has ended
    outputs = [new_output("stream", text=text), *(new_output("display_data", data=data) for data in (bar, finished))]
    document = new_notebook(cells=[new_markdown_cell("$a$"), new_code_cell("1", outputs=outputs)])
    document.metadata.papermill = {"input_path": "/home/me/in.ipynb", "output_path": "/x", "duration": 1.5}
    document.metadata.widgets = {"state": {}}
    return document


def test_the_kept_copy_names_no_machine_and_keeps_what_was_printed():
    copy = portable_copy(executed(), {"/home/me/hyperion": ".", "/home/me": "~"})
    text = nbformat.writes(copy)
    assert "/home" not in text and "ipykernel_" not in text and "widget" not in text
    (printed,) = copy.cells[1].outputs
    assert 'File "./hyperion/x.py", line 3' in printed.text
    assert copy.metadata.papermill == {"duration": 1.5}
    require_no_machine_paths("copy.ipynb", text.encode())


def test_a_text_progress_bar_is_not_kept_and_what_was_printed_beside_it_is():
    chunks = ["\rgemm: 0it [00:00, ?it/s]", "\rgemm:  50%|█ | 1/2 [00:01<00:01, note]", "\r                     ", "\r"]
    bar = [new_output("stream", name="stderr", text=chunk) for chunk in chunks]
    warning = new_output("stream", name="stderr", text="a warning\n")
    cells = [
        new_code_cell("1", outputs=[new_output("stream", text="first\n"), *bar, new_output("stream", text="last\n")]),
        new_code_cell("2", outputs=[warning, *bar]),
    ]
    copy = portable_copy(new_notebook(cells=cells), {})
    assert [output.text for output in copy.cells[0].outputs] == ["first\n", "last\n"]
    assert "a warning" in copy.cells[1].outputs[0].text and "gemm" not in nbformat.writes(copy)


def test_the_page_fetches_nothing_and_draws_its_formulas():
    text = page(portable_copy(executed(), {}), "A chapter")
    assert "<title>A chapter</title>" in text
    assert '<img alt="a" src="data:image/svg+xml' in text
    assert STYLE in text and len(text) < 40_000  # without JupyterLab's style sheets
    for foreign in ('src="http', "src='http", 'link href="http', "cdnjs", "@import"):
        assert foreign not in text


def test_links_to_notebooks_lead_to_their_pages_and_a_link_without_a_page_is_text():
    content = (
        b'<a href="02_b.ipynb">2.2 Two</a> <a href="../phase1_x/03_c.ipynb" class="x">1.3 <b>C</b></a> '
        b'<a href="https://x.org/04_d.ipynb">D</a> <a href="#part">part</a> <a href="../docs/a.md">a</a>'
    )
    rest = b' <a href="https://x.org/04_d.ipynb">D</a> <a href="#part">part</a> <a href="../docs/a.md">a</a>'
    both = b'<a href="02_b.html">2.2 Two</a> <a href="03_c.html">1.3 <b>C</b></a>' + rest
    assert link_pages(content) == both == link_pages(both)
    assert link_pages(content, ["03_c"]) == b'2.2 Two <a href="03_c.html">1.3 <b>C</b></a>' + rest


def test_links_to_references_lead_there_from_the_page_of_a_run_and_from_that_of_a_reference():
    in_notebook = b'<a href="../results/reference/h200/README.md">a</a>'
    in_run = b'<a href="../../reference/h200/README.md">a</a>'
    assert link_pages(in_notebook) == in_run == link_pages(in_run)
    for content in (in_notebook, in_run):
        assert link_pages(content, []) == b'<a href="../../h200/README.md">a</a>'


@pytest.mark.parametrize("reference", sorted((ROOT / "results/reference").glob("*/")), ids=lambda path: path.name)
def test_no_page_of_a_reference_links_to_a_file_that_is_not_there(reference):
    dead = [
        f"{page.name}: {link}"
        for page in reference.glob("notebooks/*.html")
        for link in re.findall(r'href="([^"#:]+)["#]', page.read_text())
        if not (page.parent / link).exists()
    ]
    assert dead == []


def test_formulas():
    drawn = with_drawn_formulas(r"Rate $\frac{2MNK}{t}$ and $$\sum_i x_i$$ but `$HOME` and 5 $ or \$6.")
    assert drawn.count("<img") == 2 and "`$HOME`" in drawn and r"5 $ or \$6." in drawn
    assert with_drawn_formulas(r"$\unknowable{x}$") == "<code>&#92;unknowable{x}</code>"


@pytest.mark.parametrize("text", ["/home/jo/x.py", '"path": "/scratch/jo"', "see /tmp/x1"])
def test_paths_of_a_machine_are_found(text):
    with pytest.raises(HyperionError, match="path of this machine"):
        require_no_machine_paths("run.json", text.encode())


@pytest.mark.parametrize("text", ["https://x.org/home/jo/x", "a/tmp/b", "./data/raw", "GB/s", "results/x/notebooks"])
def test_what_is_no_path_of_a_machine_passes(text):
    assert require_no_machine_paths("run.json", text.encode()) is None


def test_copy_and_page_name_neither_run_nor_checkout_nor_interpreter_folders(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path / "phase1_x", "01_x", ["1"]))
    folder = tmp_path / "results" / "today"
    printed = f"{folder}/rows.csv {tmp_path}/phase1_x {sys.prefix}/lib"
    document = new_notebook(cells=[new_code_cell("1", outputs=[new_output("stream", text=printed)])])
    files = notebook_files(notebook, document, folder, tmp_path)
    assert set(files) == {"notebooks/01_x.ipynb", "notebooks/01_x.html"}
    assert b"results/today/rows.csv ./phase1_x <python>/lib" in files["notebooks/01_x.ipynb"]
    for content in files.values():
        assert str(tmp_path).encode() not in content


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


def test_a_notebook_that_failed_is_left_out_and_an_interrupted_one_keeps_its_finished_experiments(run, tmp_path):
    ledger = Ledger.new(run, {})
    ledger.keep("01_x", Entry("done", {}, 1.0, 1))
    rows = [Row(notebook="02_y", experiment="adding", variant="v", metric="count", value=7.0)]
    columns = {"notebook": "02_y", "experiment": "adding", "variant": "v", "dtype": "", "params": {}, "metric": "count"}
    run.predict([Prediction(**columns, guess=None, estimate=6.0, basis="twice three", input_hash="h")])
    run.record("02_y", "adding", rows, pd.DataFrame({"x": [1.0]}), input_hash="h")
    run.write({"benchmarks/both.png": b"shows the rows of both notebooks"})
    ledger.keep("02_y", Entry("failed", {}, 1.0, 1, note="out of memory"))
    folder, _ = publish(run, "h100", tmp_path / "reference")
    reference = Run.open(folder)
    names = set(reference.verify())
    assert {row.notebook for row in reference.rows()} == {"01_x"} and reference.predictions() == []
    assert not [name for name in names if "02_y" in name] and "benchmarks/both.png" not in names
    assert "did not finish in this run, and none of their rows are here: `02_y` (failed)." in (folder / "README.md").read_text()

    ledger.keep("02_y", Entry("interrupted", {}, 1.0, 1))
    folder, _ = publish(run, "h100", tmp_path / "reference")
    reference = Run.open(folder)
    assert {row.notebook for row in reference.rows()} == {"01_x", "02_y"} and reference.finished("02_y", "adding")
    assert "only the rows of their finished experiments are here: `02_y` (interrupted)." in (folder / "README.md").read_text()

    assert "Unexpected" not in (folder / "README.md").read_text()
    ledger.keep("02_y", Entry("unexpected", {}, 1.0, 1, unexpected=("loss 7, expected at most 4",)))
    folder, _ = publish(run, "h100", tmp_path / "reference")
    assert "did not hold in this run:\n\n- 02_y: loss 7, expected at most 4\n" in (folder / "README.md").read_text()
    assert {row.notebook for row in Run.open(folder).rows()} == {"01_x", "02_y"} and (folder / "benchmarks/both.png").exists()
    assert "did not finish" not in (folder / "README.md").read_text()


def test_publishing_again_replaces_it_whole(run, tmp_path):
    publish(run, "h100", tmp_path / "reference")
    run.write({"notebooks/01_x.html": b"<p>newer</p>"})
    folder, _ = publish(run, "h100", tmp_path / "reference")
    assert (folder / "notebooks/01_x.html").read_bytes() == b"<p>newer</p>"


def test_two_calls_that_publish_at_once_do_not_mix(run, tmp_path):
    reference = tmp_path / "reference"
    for name in ("h100", "h200"):  # the same name and another one, which shares the limit on the total size
        with staged_reference(reference / "h100") as staged:
            staged.mkdir()
            (staged / "first").touch()
            with pytest.raises(HyperionError, match="another call publishes in this folder"):
                publish(run, name, reference)
        assert [path.relative_to(reference).as_posix() for path in sorted(reference.rglob("*"))] == ["h100", "h100/first"]
    folder, _ = publish(run, "h100", reference)
    Run.open(folder).verify()


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
    written = (folder / "notebooks/01_x.html").read_text()
    link = "../benchmarks/gemm/a.png"
    assert written == f'<img src="{link}"><img src="data:image/png;base64,{base64.b64encode(only_here).decode()}">{script}'
    assert (folder / "notebooks" / link).resolve().read_bytes() == kept


def test_a_reference_without_pages_has_everything_else(run, tmp_path):
    whole, _ = publish(run, "whole", tmp_path / "reference")
    target, left_out = publish(run, "box", tmp_path / "reference", pages=False)
    assert left_out == [] and not (target / "notebooks").exists()
    assert {path.name for path in target.iterdir()} == {path.name for path in whole.iterdir()} - {"notebooks"}
    Run.open(target).verify()


def test_large_pages_are_left_out_and_named(run, tmp_path, monkeypatch):
    run.write({"notebooks/02_y.html": random.Random(0).randbytes(500)})  # incompressible
    without_pages = sum(len(zlib.compress(run.read(name))) for name in run.verify() if not name.startswith("notebooks/"))
    monkeypatch.setattr(publishing, "LARGEST_BYTES", without_pages + 100)
    folder, left_out = publish(run, "h100", tmp_path / "reference")
    assert left_out == ["notebooks/02_y.html"] and (folder / "notebooks/01_x.html").exists()
    monkeypatch.setattr(publishing, "LARGEST_BYTES", without_pages - 1)
    with pytest.raises(HyperionError, match="larger than its limit"):
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


def test_only_a_finished_measurement_of_this_machine_becomes_a_reference(run, tmp_path):
    replay = Run.create(tmp_path / "replay", {"profile": "replay"})
    replay.record("01_x", "counting", run.rows(), pd.DataFrame({"x": [1.0]}), input_hash="h")
    with pytest.raises(HyperionError, match="a replay: its rows are those of another machine"):
        publish(replay, "mine", tmp_path / "reference")
    with pytest.raises(HyperionError, match="has no rows"):
        publish(Run.create(tmp_path / "empty", {"profile": "smoke"}), "mine", tmp_path / "reference")
    lock = FileLock(run.folder / ".driver.lock")
    assert lock.acquire()
    with pytest.raises(HyperionError, match="a running call uses this run"):
        publish(run, "mine", tmp_path / "reference")
    lock.release()
    assert not (tmp_path / "reference").exists()


def test_a_name_that_is_no_folder_name_is_refused(run, tmp_path):
    with pytest.raises(HyperionError, match="cannot be the name"):
        publish(run, "../h100", tmp_path / "reference")
