import sys

from nbformat.v4 import new_code_cell, new_notebook, new_output

from hyperion.reproduce.execution import Fault
from hyperion.reproduce.keeping import kept_files, show_fault
from hyperion.reproduce.notebooks import read_notebook
from tests.reproduce.small_book import write_notebook


def test_copy_and_page_name_neither_run_nor_checkout_nor_interpreter_folders(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path / "phase1_x", "01_x", ["1"]))
    folder = tmp_path / "results" / "today"
    printed = f"{folder}/rows.csv {tmp_path}/phase1_x {sys.prefix}/lib"
    document = new_notebook(cells=[new_code_cell("1", outputs=[new_output("stream", text=printed)])])
    files = kept_files(notebook, document, folder, tmp_path)
    assert set(files) == {"notebooks/01_x.ipynb", "notebooks/01_x.html"}
    assert b"results/today/rows.csv ./phase1_x <python>/lib" in files["notebooks/01_x.ipynb"]
    for content in files.values():
        assert str(tmp_path).encode() not in content


def test_a_fault_is_told_with_cell_traceback_and_copy(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path / "phase1_x", "01_x", ["1"]))
    lines = []
    show_fault(lines.append, notebook, Fault("ValueError: why", 4, "\n".join(map(str, range(100)))), tmp_path)
    assert lines[0] == "FAILED phase1_x/01_x.ipynb, cell In [4]: ValueError: why"
    assert "    99" in lines and "    1" not in lines
    assert lines[-1].endswith("notebooks/01_x.ipynb")


def test_an_error_in_its_own_words_keeps_its_lines(tmp_path):
    notebook = read_notebook(write_notebook(tmp_path / "phase1_x", "01_x", ["1"]))
    lines = []
    show_fault(lines.append, notebook, Fault("DataError: why\n  where: a.bin\n  next:  copy it", 3), tmp_path)
    assert lines[:3] == ["FAILED phase1_x/01_x.ipynb, cell In [3]: DataError: why", "      where: a.bin", "      next:  copy it"]
