"""The scanner for CUDA-only constructs, against a corpus that someone else labelled without knowing the rules."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hyperion.commands.port import app
from hyperion.errors import HyperionError
from hyperion.porting import GRADES, rules, scan, scan_text

CORPUS = tomllib.loads(Path(__file__).with_name("corpus.toml").read_text("utf-8"))["snippet"]
# Every third snippet was held out: the rules were corrected with the others only. Snippets that were written together with a rule
# are not held out.
HELD_OUT = [snippet for snippet in CORPUS if not snippet.get("with_rule")][2::3]
KNOWN = [snippet for snippet in CORPUS if snippet not in HELD_OUT]


def found(snippet: dict) -> set[str]:
    return {f"{one.line}:{one.rule.kind}" for one in scan_text(snippet["code"], snippet["file"])}


def test_the_corpus_has_every_kind_and_enough_snippets():
    labelled = {label.partition(":")[2] for snippet in CORPUS for label in snippet["labels"]}
    assert labelled == {rule.kind for rule in rules()} and len(CORPUS) >= 60
    assert {rule.grade for rule in rules()} == set(GRADES)


@pytest.mark.parametrize("snippet", KNOWN, ids=lambda snippet: snippet["name"])
def test_snippets_that_the_rules_were_written_with_are_exact(snippet):
    assert found(snippet) == set(snippet["labels"])


def test_precision_and_recall_on_the_held_out_third_are_those_that_the_page_states():
    pairs = [(found(snippet), set(snippet["labels"])) for snippet in HELD_OUT]
    right = sum(len(seen & labels) for seen, labels in pairs)
    precision, recall = (right / sum(len(pair[place]) for pair in pairs) for place in (0, 1))
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text("utf-8")
    assert f"{precision:.0%} of the findings are right, and {recall:.0%} of".replace("%", " %") in page


@pytest.mark.parametrize("suffix", ["cu", "sh", "yaml", "cmake", "py"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=300))
def test_any_text_is_scanned_or_is_no_python(suffix, text):
    try:
        findings = scan_text(text, f"any.{suffix}")
    except (SyntaxError, ValueError):
        assert suffix == "py"
        return
    assert all(1 <= finding.line <= text.count("\n") + 1 for finding in findings)


def test_columns_of_bytes_do_not_move_what_is_left_out():
    code = 'print("ä nvidia-smi"); tool = "nvidia-smi"\n"""nvidia-smi"""\n'
    assert [(one.line, one.rule.kind) for one in scan_text(code, "a.py")] == [(1, "nvidia-tool")]
    assert scan_text('print("ä nvidia-smi")\n', "a.py") == []


def test_a_folder_is_scanned_with_its_notebooks_and_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "good.py").write_text("import apex\n")
    (tmp_path / "bad.py").write_text("print 'python 2'\n")
    (tmp_path / "notes.txt").write_text("nvidia-smi\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "third.py").write_text("import apex\n")
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None, "source": "!ls\nx.cuda()"}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "book.ipynb").write_text(json.dumps(book))
    findings, problems, _ = scan(tmp_path)
    places = [(one.path.removeprefix(str(tmp_path)), one.line, one.rule.kind) for one in findings]
    assert places == [("/book.ipynb, cell 1", 2, "torch-cuda-api"), ("/good.py", 1, "nvidia-package")]
    assert len(problems) == 1 and "bad.py" in problems[0]


def test_strings_that_a_call_inside_a_message_uses_are_searched():
    code = """print(subprocess.check_output(["nvidia-smi", "-L"]))
print(torch.zeros(1, device="cuda:1"))
raise ValueError("needs nvidia-smi, {}".format(run(["nvidia-smi"])))
raise ValueError("nvidia-smi: {}".format(1))
print("nvidia-smi", ", ".join(names))
"""
    assert [one.line for one in scan_text(code, "a.py") if one.rule.kind == "nvidia-tool"] == [1, 3]
    assert 2 in {one.line for one in scan_text(code, "a.py")}


def test_shell_commands_of_a_notebook_are_searched(tmp_path):
    sources = [
        "import os\n!nvidia-smi\n!nvcc -arch=sm_80 kernel.cu -o kernel",
        "%pip install apex",
        "%%bash\necho start\nnvcc -arch=sm_80 kernel.cu",
        "%%time\nimport apex",
        "%%writefile kernel.cu\nint w = __shfl_down_sync(0xffffffff, v, 1);",
        "%matplotlib inline",
    ]
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [cell | {"id": f"c{n}", "source": source} for n, source in enumerate(sources)]
    (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    findings, problems, _ = scan(tmp_path)
    assert not problems
    places = {(int(one.path.rpartition(" ")[2]), one.line) for one in findings}
    assert places == {(1, 2), (1, 3), (2, 1), (3, 3), (4, 2), (5, 2)}


def test_folders_of_generated_files_are_left_out_and_named(tmp_path):
    for folder in (tmp_path / "build", tmp_path / "a" / "dist"):
        folder.mkdir(parents=True)
        (folder / "run.sh").write_text("nvcc -arch=sm_80 kernel.cu\n")
    (tmp_path / "a" / "clean.py").write_text("x = 1\n")
    assert scan(tmp_path) == ([], [], [tmp_path / "a" / "dist", tmp_path / "build"])
    assert scan(tmp_path / "build")[0]
    done = CliRunner().invoke(app, ["scan", str(tmp_path)])
    assert done.exit_code == 0 and done.output.replace("\n", "").count("left out") == 2


def test_files_that_no_parser_accepts_are_named_and_the_others_are_scanned(tmp_path):
    (tmp_path / "a.ipynb").write_text("[]")
    (tmp_path / "b.ipynb").write_text('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}')
    (tmp_path / "c.py").write_text("-" * 100_000 + "1")
    os.mkfifo(tmp_path / "d.py")
    (tmp_path / "e.py").write_bytes(b" " * ((4 << 20) + 1))
    (tmp_path / "f.py").write_bytes(b"\xef\xbb\xbfimport os\r\nimport apex\r\n")  # as editors on Windows write it
    findings, problems, _ = scan(tmp_path)
    assert [(Path(one.path).name, one.line) for one in findings] == [("f.py", 2)]
    assert [Path(problem.partition(":")[0]).name for problem in problems] == ["a.ipynb", "b.ipynb", "c.py", "d.py", "e.py"]
    assert "MemoryError" in problems[2] and "pipe" in problems[3] and "larger than 4 MiB" in problems[4]


def test_a_folder_that_cannot_be_listed_is_named_and_the_others_are_scanned(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "good.py").write_text("import apex\n")
    listed = Path.iterdir

    def iterdir(folder):
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    findings, problems, _ = scan(tmp_path)
    assert len(findings) == 1 and len(problems) == 1 and "Permission denied" in problems[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", 'dependencies = ["flash-attn>=2.5", "nvidia-cublas-cu12", "transformer-engine[pytorch]"]\n'),
        ("setup.cfg", "[options]\ninstall_requires =\n    apex\n"),
    ],
)
def test_a_folder_with_only_a_file_of_requirements_has_findings(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    findings, problems, _ = scan(tmp_path)
    assert {one.rule.kind for one in findings} >= {"nvidia-package"} and not problems
    assert CliRunner().invoke(app, ["scan", str(tmp_path)]).exit_code == 1


def test_the_command_has_exit_codes_and_json(tmp_path):
    clean, tied = tmp_path / "clean.py", tmp_path / "tied.cu"
    clean.write_text('x = x.to("cuda")\n')
    tied.write_text('int w = __shfl_down_sync(0xffffffff, v, 1);\nasm volatile("bar.sync 0;");\n')
    assert CliRunner().invoke(app, ["scan", str(clean)]).exit_code == 0
    done = CliRunner().invoke(app, ["scan", str(tied)])
    assert done.exit_code == 1 and "0 unchanged, 0 hipify, 2 rewrite" in done.output and "64 lanes" in done.output
    content = json.loads(CliRunner().invoke(app, ["scan", str(tied), "--json"]).output)
    assert [(one["line"], one["kind"]) for one in content["findings"]] == [(1, "warp-32"), (2, "ptx")]
    for wrong, text in ((tmp_path / "none", "does not exist"), (tmp_path / "a.txt", "no source file")):
        (tmp_path / "a.txt").write_text("")
        with pytest.raises(HyperionError, match=text):
            scan(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HyperionError, match="has no source file"):
        scan(tmp_path / "empty")


@pytest.mark.parametrize(
    ("line", "name", "kind"),
    [
        ("import amp_C", "a.py", "nvidia-package"),
        ("from fused_layer_norm_cuda import forward", "a.py", "nvidia-package"),
        ("from megatron.core.extensions.transformer_engine import TELinear", "a.py", "nvidia-package"),
        ("unsigned mask = __activemask();", "a.cu", "warp-32"),
        ("cuTensorMapEncodeTiled(&map, type, 2, data, sizes, strides, box, one, a, b, c, d);", "a.cu", "tensor-cores"),
        ("const __grid_constant__ CUtensorMap map;", "a.cuh", "tensor-cores"),
        ("void * cuTensor = nullptr;", "a.cu", None),
        ("from transformers import amp", "a.py", None),
    ],
)
def test_constructs_of_megatron_and_of_hopper_kernels(line, name, kind):
    assert {finding.rule.kind for finding in scan_text(line + "\n", name)} == ({kind} if kind else set())
