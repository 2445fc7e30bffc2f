"""Settings of environment variables are read from the ordinary forms of shell scripts, Dockerfiles and Python files."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.install.assignments import Assignment, python_assignments, read_assignments, shell_assignments

SHELL = {
    "export A=1 B_2='two words'": [("A", "1"), ("B_2", "two words")],
    "A=1 B=2 python train.py C=3": [("A", "1"), ("B", "2")],
    "if true; then export A=1; fi && B=2 true": [("A", "1"), ("B", "2")],
    'ENV A=1 B="2 3" \\\n    C=4\nENV D some words\nRUN E=5 make': [
        ("A", "1"),
        ("B", "2 3"),
        ("C", "4"),
        ("D", "some words"),
        ("E", "5"),
    ],
    "docker run -e A=1 --env B=2 --env=C=3 -eD=4 -e PATH image python x.py E=5": [("A", "1"), ("B", "2"), ("C", "3"), ("D", "4")],
    "mpirun -np 2 -x A=1 -x PATH python x.py": [("A", "1")],
    "mpiexec -genv A 1 python x.py": [("A", "1")],
    "srun --export=ALL,A=1,B=2 env -u C D=4 python x.py E=5": [("A", "1"), ("B", "2"), ("D", "4")],
    "set -gx A WARN\nset -x B two words\nsetenv C 1": [("A", "WARN"), ("B", "two words"), ("C", "1")],
    "set -euo pipefail\nset -x": [],
    "bash -lc 'export A=1; B=\"2 3\" python x.py'": [("A", "1"), ("B", "2 3")],
    'python -c \'import os; os.environ["A"] = "1"\'': [("A", "1")],
    "export A=1 # not B=2\n# export C=3\nexport D=#4": [("A", "1"), ("D", "#4")],
    "A=1 python x.py 2>&1 > B=2; C=3 < D=4 true": [("A", "1"), ("C", "3")],
    "A=$(B=2 nproc --all) C=`true` D=$((1 + 2))": [("B", "2"), ("A", "$"), ("C", "$"), ("D", "$")],
    "export A='one\ntwo' B=2\nexport C=3": [("A", "one\ntwo"), ("B", "2"), ("C", "3")],
    "cat <<EOF\ndon't stop\nexport A=1\nEOF\nexport B='2'": [("A", "1"), ("B", "2")],
    "python - <<'EOF'\nimport os\nos.putenv('A', 'it is')\nEOF\nB=1 true": [("A", "it is"), ("B", "1")],
    "echo don't\nexport A=1": [("A", "1")],
    'echo "<<EOF"\nexport A=1': [("A", "1")],
    "if [[ $A == B=1 ]]; then true; fi": [],
}
PYTHON = {
    'os.environ["A"] = "1"; environ["B"] = "2"': [("A", "1"), ("B", "2")],
    'os.environ.update({"A": "1"}, B="2")': [("A", "1"), ("B", "2")],
    'os.environ.setdefault("A", "1"); os.putenv("B", "2"); monkeypatch.setenv("C", "3")': [("A", "1"), ("B", "2"), ("C", "3")],
    'os.environ |= {"A": "1"}': [("A", "1")],
    'run(x, env={**os.environ, "A": "1"}); run(env=dict(os.environ, B="2")); run(env=os.environ | {"C": "3"})': [
        ("A", "1"),
        ("B", "2"),
        ("C", "3"),
    ],
    'if x:\n    os.environ["A"] = "1"\nos.environ["A"] = str(rank)': [("A", "1"), ("A", "$(str(rank))")],
    'values = {"A": "1"}; other["B"] = "2"; print("export C=3")  # os.environ["D"] = "4"': [],
}
# A backquote or a $ starts a substitution, and shlex.quote() continues a value with a newline on the next line.
VALUES = st.text(st.characters(exclude_characters="\0\n$`", exclude_categories=["Cs"]))
PAIRS = st.lists(st.tuples(st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True), VALUES), min_size=1, max_size=5)


@pytest.mark.parametrize("text", SHELL)
def test_a_shell_script_or_dockerfile_is_read(text):
    assert shell_assignments(text) == SHELL[text]


@pytest.mark.parametrize("text", PYTHON)
def test_a_python_program_is_read(text):
    assert python_assignments(text) == PYTHON[text]


@given(PAIRS)
def test_quoted_values_come_back_from_every_form(pairs):
    quoted = [f"{name}={shlex.quote(value)}" for name, value in pairs]
    for before in ("export ", "ENV ", "", "true && ", "env -i ", "exec env ", "docker run -e ", "mpirun -x "):
        joint = f" {before.split()[-1]} " if before.startswith(("docker", "mpirun")) else " "
        assert shell_assignments(f"{before}{joint.join(quoted)} python x.py # A=1\n") == pairs
    lines = "".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in pairs)
    assert python_assignments(lines) == pairs
    assert python_assignments(f"os.environ.update({dict(pairs)!r})") == list(dict(pairs).items())


@given(st.text("AB1= '\"\\\n#;&|<>()$`-eE"))
def test_no_text_ends_with_an_exception(text):
    assert all(name.isidentifier() for name, _ in shell_assignments(text))


def test_the_name_or_the_first_line_of_a_file_says_that_it_is_python(tmp_path):
    for name, first in (("run.py", ""), ("run", "#!/usr/bin/env python3\n")):
        (tmp_path / name).write_text(f'{first}import os\nos.environ["A"] = "1"\n')
        assert read_assignments(tmp_path / name) == [Assignment("A", "1")]
    (tmp_path / "run.sh").write_text("export A=2\n")
    assert read_assignments(tmp_path / "run.sh") == [Assignment("A", "2")]
    (tmp_path / "wrong.py").write_text("export A=2\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, fault in (("wrong.py", "no valid Python"), ("binary", "cannot read"), ("absent.sh", "cannot read")):
        with pytest.raises(HyperionError, match=fault) as caught:
            read_assignments(tmp_path / name)
        assert name in str(caught.value) and ("line 1" in str(caught.value)) is (name == "wrong.py")


@pytest.mark.parametrize("name", ["compose.yaml", "notebook.ipynb"])
def test_a_file_whose_settings_are_not_read_is_refused_and_not_called_clean(name, tmp_path):
    (tmp_path / name).write_text('{"cells": [{"source": ["%env RCCL_TIMEOUT=3"]}]}')
    with pytest.raises(HyperionError, match="are not read"):
        read_assignments(tmp_path / name)
