import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hyperion.errors import HyperionError
from hyperion.reproduce.notebooks import read_notebook
from hyperion.reproduce.publishing import (
    STYLE,
    notebook_files,
    page,
    portable_copy,
    require_no_machine_paths,
    with_drawn_formulas,
)
from tests.reproduce.small_book import write_notebook


def executed():
    text = 'File "/home/me/hyperion/hyperion/x.py", line 3\n/tmp/ipykernel_12/345.py:3: UserWarning'
    bar = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "50%"}
    outputs = [new_output("stream", text=text), new_output("display_data", data=bar)]
    document = new_notebook(cells=[new_markdown_cell("$a$"), new_code_cell("1", outputs=outputs)])
    document.metadata.papermill = {"input_path": "/home/me/in.ipynb", "output_path": "/x", "duration": 1.5}
    document.metadata.widgets = {"state": {}}
    return document


def test_the_kept_copy_names_no_machine_and_keeps_what_was_printed():
    copy = portable_copy(executed(), {"/home/me/hyperion": ".", "/home/me": "~"})
    text = nbformat.writes(copy)
    assert "/home" not in text and "ipykernel_" not in text and "widget" not in text
    assert 'File "./hyperion/x.py", line 3' in copy.cells[1].outputs[0].text
    assert copy.metadata.papermill == {"duration": 1.5}
    require_no_machine_paths("copy.ipynb", text.encode())


def test_the_page_fetches_nothing_and_draws_its_formulas():
    text = page(portable_copy(executed(), {}), "A chapter")
    assert "<title>A chapter</title>" in text
    assert '<img alt="a" src="data:image/svg+xml' in text
    assert STYLE in text and len(text) < 40_000  # without JupyterLab's style sheets
    for foreign in ('src="http', "src='http", 'link href="http', "cdnjs", "@import"):
        assert foreign not in text


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
