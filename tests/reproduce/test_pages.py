import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from hyperion.errors import HyperionError
from hyperion.reproduce.page_css import STYLE
from hyperion.reproduce.pages import demand_no_machine_paths, kept_copy, page, with_drawn_formulas


def executed():
    text = 'File "/home/me/hyperion/hyperion/x.py", line 3\n/tmp/ipykernel_12/345.py:3: UserWarning'
    bar = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "50%"}
    outputs = [new_output("stream", text=text), new_output("display_data", data=bar)]
    document = new_notebook(cells=[new_markdown_cell("$a$"), new_code_cell("1", outputs=outputs)])
    document.metadata.papermill = {"input_path": "/home/me/in.ipynb", "output_path": "/x", "duration": 1.5}
    document.metadata.widgets = {"state": {}}
    return document


def test_the_kept_copy_names_no_machine_and_keeps_what_was_printed():
    copy = kept_copy(executed(), {"/home/me/hyperion": ".", "/home/me": "~"})
    text = nbformat.writes(copy)
    assert "/home" not in text and "ipykernel_" not in text and "widget" not in text
    assert 'File "./hyperion/x.py", line 3' in copy.cells[1].outputs[0].text
    assert copy.metadata.papermill == {"duration": 1.5}
    demand_no_machine_paths("copy.ipynb", text.encode())


def test_the_page_fetches_nothing_and_draws_its_formulas():
    text = page(kept_copy(executed(), {}), "A chapter")
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
        demand_no_machine_paths("run.json", text.encode())


@pytest.mark.parametrize("text", ["https://x.org/home/jo/x", "a/tmp/b", "./data/raw", "GB/s", "results/x/notebooks"])
def test_what_is_no_path_of_a_machine_passes(text):
    assert demand_no_machine_paths("run.json", text.encode()) is None
