"""Find constructs that tie source code to CUDA, and grade how much work each of them needs in a port to ROCm.

The rules are regular expressions for single lines, stored in `rules.toml`. This module decides which text is searched. It removes
comments with the lexers of Pygments. In Python, it also removes docstrings and text that is only printed, logged or raised. CUDA
source in a Python string is searched with the C++ rules, and shell commands in a notebook with the rules of build files.
"""

import ast
import functools
import io
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment

from hyperion.errors import HyperionError
from hyperion.untrusted import printable, read_bounded

GRADES = ("unchanged", "hipify", "rewrite")
PYTHON, CPP, BUILD = "python", "cpp", "build"
# (language of the rules, Pygments lexer) by file suffix, and below by file name.
_SUFFIXES = {
    **dict.fromkeys((".py", ".pyi", ".ipynb"), (PYTHON, "python")),
    **dict.fromkeys((".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inl"), (CPP, "cuda")),
    **dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch"), (BUILD, "bash")),
    **dict.fromkeys((".cmake",), (BUILD, "cmake")),
    **dict.fromkeys((".mk",), (BUILD, "make")),
    **dict.fromkeys((".yaml", ".yml"), (BUILD, "yaml")),
}
_NAMES = {
    "Dockerfile": (BUILD, "docker"),
    "Makefile": (BUILD, "make"),
    "CMakeLists.txt": (BUILD, "cmake"),
    "pyproject.toml": (BUILD, "toml"),
    "setup.cfg": (BUILD, "ini"),
}
_REQUIREMENTS = re.compile(r"requirements.*\.txt")
_NOT_SOURCE = {".git", ".venv", "venv", "node_modules", "__pycache__"}
# Folders with these names usually contain generated files. They are left out too, but the result names them.
_GENERATED = {"build", "dist"}
# Shell commands in a notebook cell: lines that begin with ! or a magic that calls a program, and cells in a shell's language.
_SHELL_LINE = re.compile(r"\s*(?:!+|%(?=(?:pip|conda|env|sx|system)\b))")
_SHELL_CELL = re.compile(r"%%(?:bash|sh|!|sx|system|script\s+\S*sh)\b.*|%%!.*")
_LARGEST_BYTES = 4 << 20
# Calls whose arguments are messages for people. Strings in `raise` statements are not searched either.
_PROSE_CALLS = {"print", "warn", "warning", "info", "debug", "error", "exception", "critical", "log", "write", "fail", "skip"}
_PROSE_ARGUMENTS = {"help", "description", "epilog", "reason", "message", "msg", "title", "label"}
_FORMATS = {"format", "join"}  # methods of a string
_LONGEST_LINE = 2000  # longer lines are generated code; some patterns take time quadratic in the length
_CUDA_SOURCE = re.compile(r"__global__|__device__|^\s*#\s*include\s*[<\"]", re.MULTILINE)
_BUILD_PROSE = re.compile(
    r"^\s*@?(?:echo|printf)\b(?![^\n]*>>?\s*\S).*|\bmessage\s*\(.*|^\s*-?\s*name:.*|^\s*(?:name|description)\s+=.*", re.IGNORECASE
)


@dataclass(frozen=True, eq=False)
class Rule:
    """Rule for one kind of construct.

    Args:
        kind: name of the kind of construct.
        grade: "unchanged" (works on ROCm as it is), "hipify" (works after an automatic translation) or "rewrite" (a person must
            change it).
        remedy: what to do in a port.
        patterns: regular expressions that are matched against each line, by language.
    """

    kind: str
    grade: str
    remedy: str
    patterns: dict[str, tuple[re.Pattern[str], ...]]


@dataclass(frozen=True)
class Finding:
    """A construct that was found in a file.

    Args:
        path: path of the file. For a notebook, it includes the number of the code cell, such as "train.ipynb, cell 3".
        line: line number, counted from 1 in the file or the cell.
        rule: the rule that found it.
        text: the matched text.
    """

    path: str
    line: int
    rule: Rule
    text: str


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return the rules in the order of rules.toml."""
    content = tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))
    return tuple(
        Rule(kind, table["grade"], table["remedy"], {name: _compiled(table, name) for name in (PYTHON, CPP, BUILD)})
        for kind, table in content.items()
    )


def _compiled(table: dict[str, Any], language: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in table.get(language, ()))


def scan(path: Path) -> tuple[list[Finding], list[str], list[Path]]:
    """Scan a file, or all source files in a folder and its subfolders.

    Returns:
        (the findings, ordered by file and line; an error message for each file that could not be scanned; the subfolders that
        were left out, because their names are those of generated files).

    Raises:
        HyperionError: the path does not exist, or it is a file of a type that has no rules, or a folder without source files.
    """
    if not path.exists():
        raise HyperionError(f"{path} does not exist", where=path, next_step="name a file or a folder with source code")
    if not path.is_dir() and _language_of(path) is None:
        raise HyperionError(f"{path.name} is no source file that the rules know", where=path, next_step="name a folder")
    findings: list[Finding] = []
    problems: list[str] = []
    left_out: list[Path] = []
    files = list(_files(path, problems, left_out)) if path.is_dir() else [path]
    for file in files:
        try:
            findings += _scan_file(file)
        # The parsers of foreign files raise exceptions of many kinds, also MemoryError and RecursionError for deep expressions.
        except Exception as error:
            problems.append(f"{file}: {_first_line(error)}")
    if not files and not problems:
        raise HyperionError("the folder has no source file that the rules know", where=path, next_step="name another folder")
    return findings, problems, left_out


def _files(folder: Path, problems: list[str], left_out: list[Path]) -> Iterator[Path]:
    """Yield the source files of a folder and its subfolders.

    Subfolders that cannot be read are added to `problems`, and those with generated files to `left_out`.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        problems.append(f"{folder}: {_first_line(error)}")
        return
    for entry in entries:
        if entry.is_symlink() or entry.name in _NOT_SOURCE:
            continue
        if entry.is_dir() and entry.name in _GENERATED:
            left_out.append(entry)
        elif entry.is_dir():
            yield from _files(entry, problems, left_out)
        elif _language_of(entry) is not None:
            yield entry


def _first_line(error: Exception) -> str:
    return printable(str(error).partition("\n")[0] or type(error).__name__)


def _language_of(path: Path) -> tuple[str, str] | None:
    if _REQUIREMENTS.fullmatch(path.name):
        return BUILD, "bash"
    stem = path.name.split(".")[0]
    return _NAMES.get(path.name) or _SUFFIXES.get(path.suffix.lower()) or (_NAMES.get(stem) if stem == "Dockerfile" else None)


def _scan_file(path: Path) -> list[Finding]:
    content = read_bounded(path, HyperionError, "scan a part of it; larger files are usually generated", _LARGEST_BYTES)
    # Some editors write a byte order mark. Line ends of other systems become "\n".
    text = io.StringIO(content.decode("utf-8-sig"), newline=None).read()
    if path.suffix != ".ipynb":
        return scan_text(text, str(path))
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    return [found for n, cell in enumerate(cells, 1) for found in _scan_cell(cell.source, f"{path}, cell {n}")]


def _scan_cell(source: str, path: str) -> list[Finding]:
    """Scan a code cell: its Python, and the shell commands in its IPython lines."""
    lines = source.split("\n")
    if _SHELL_CELL.fullmatch(lines[0].strip()):
        return scan_text("\n".join(["", *lines[1:]]), path, "cell.sh")
    if lines[0].startswith("%%writefile"):
        name = lines[0].split()[-1]
        return scan_text("\n".join(["", *lines[1:]]), path, name) if _language_of(Path(name)) else []
    python = "\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in lines)
    commands = "\n".join(_SHELL_LINE.sub("", line, count=1) if _SHELL_LINE.match(line) else "" for line in lines)
    found = scan_text(python, path, "cell.py") + scan_text(commands, path, "cell.sh")
    return sorted(found, key=lambda one: one.line)


def scan_text(text: str, path: str, name: str = "") -> list[Finding]:
    """Scan source text.

    Args:
        text: the source text.
        path: path that is reported in the findings.
        name: file name that determines the language. Defaults to `path`.

    Raises:
        ValueError: there are no rules for the language of this file name.
        SyntaxError: the text is not valid Python.
    """
    language = _language_of(Path(name or path))
    if language is None:
        raise ValueError(f"{name or path} belongs to no language of the rules")
    kind, lexer = language
    found: dict[tuple[int, str], Finding] = {}
    parts = _parts_of_python(text) if kind == PYTHON else [(kind, 0, _without_comments(text, lexer))]
    for searched, offset, content in parts:
        for number, line in enumerate(content.split("\n"), offset + 1):
            if searched == BUILD:
                line = _BUILD_PROSE.sub("", line[:_LONGEST_LINE])
            for rule in rules():
                match = next(
                    (match for pattern in rule.patterns[searched] if (match := pattern.search(line, 0, _LONGEST_LINE))), None
                )
                if match is not None:
                    found.setdefault((number, rule.kind), Finding(path, number, rule, match[0].strip()))
    order = {rule.kind: place for place, rule in enumerate(rules())}
    return [found[key] for key in sorted(found, key=lambda key: (key[0], order[key[1]]))]


def _without_comments(text: str, lexer: str) -> str:
    """Return the text with comments replaced by spaces. Preprocessor lines are kept, although Pygments calls them comments."""
    parts = []
    for kind, value in get_lexer_by_name(lexer, stripnl=False, ensurenl=False).get_tokens(text):
        comment = (
            kind in Comment and kind not in Comment.Preproc and kind not in Comment.PreprocFile and kind not in Comment.Hashbang
        )
        parts.append(re.sub(r"[^\n]", " ", value) if comment else value)
    return "".join(parts)


def _parts_of_python(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (language, line offset, text) for CUDA source in strings, and for the program without docstrings and messages."""
    tree = ast.parse(text)
    lines = _without_comments(text, "python").split("\n")
    for node in [*_prose(tree)]:
        _blank(lines, node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CUDA_SOURCE.search(node.value):
            source = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
            _blank(lines, node)
            yield CPP, node.lineno - 1, _without_comments(source, "cuda")
    program = "\n".join(lines)
    for alias, module in _aliases(tree).items():
        program = re.sub(rf"(?<![\w.]){alias}(?=\s*\.\s*\w)", module, program)
    yield PYTHON, 0, program


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Map each name under which a program imports a part of torch to its full name, such as {"cudnn": "torch.backends.cudnn"}."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {item.asname: item.name for item in node.names if item.asname and item.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
    return names


def _prose(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the strings of a program that are only for people: docstrings, messages and help texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from _strings(node.value)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc
            arguments = [*raised.args, *(each.value for each in raised.keywords)] if isinstance(raised, ast.Call) else [raised]
            for argument in arguments:
                yield from _strings(argument)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield from _strings(node.msg)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            prose = list(node.args) if name in _PROSE_CALLS else []
            prose += [keyword.value for keyword in node.keywords if keyword.arg in _PROSE_ARGUMENTS]
            for argument in prose:
                yield from _strings(argument)


def _strings(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the strings in an expression.

    Strings in a call are skipped, because the call may use them, unless it only formats a text. f-strings that contain values are
    skipped, because the values are code.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _FORMATS and isinstance(node.func.value, ast.Constant):
            yield from _strings(node.func.value)
    elif not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)
    elif not any(isinstance(part, ast.FormattedValue) for part in node.values):
        yield node


def _blank(lines: list[str], node: ast.expr) -> None:
    """Replace the characters of a string in `lines` by spaces."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    for number in range(node.lineno - 1, node.end_lineno):
        raw = lines[number].encode()  # ast counts columns in bytes
        start = node.col_offset if number == node.lineno - 1 else 0
        end = node.end_col_offset if number == node.end_lineno - 1 else len(raw)
        lines[number] = (raw[:start] + b" " * (end - start) + raw[end:]).decode(errors="replace")
