"""Read the settings of environment variables from shell scripts, Dockerfiles and Python files.

Nothing is run. A value that is known only at run time is given as it is written, with a `$`.
"""

import ast
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from hyperion.errors import HyperionError

Assignments = list[tuple[str, str]]
_SETTING = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
# Words that may stand before a command. RUN, CMD and ENTRYPOINT are instructions of a Dockerfile.
_BEFORE_COMMAND = {"if", "then", "else", "elif", "while", "until", "do", "time", "!", "{", "RUN", "CMD", "ENTRYPOINT"}
# Options of docker, podman, mpirun and Singularity that set a variable in the program that they start.
_OPTIONS = {"-e", "-x", "--env"}
_QUOTED_OR_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:^|(?<=[\s;&|(]))\#[^\n]*""", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(\([^()]*\)\)|\$\(([^()]*)\)|`([^`\n]*)`")
_SHELLS, _PYTHONS = re.compile(r"(?:.*/)?(?:ba|da|z|k|fi)?sh"), re.compile(r"(?:.*/)?python[\d.]*")
_LINES_OF_A_QUOTE = 100  # a quote that is open for longer is a stray quotation mark, such as an apostrophe


def read_assignments(file: Path) -> Assignments:
    """Return the settings in a shell script, a Dockerfile or a Python file, in their order.

    Raises:
        HyperionError: the file cannot be read as text, it is a Python file with a syntax error, or a file of data.
    """
    if file.suffix in (".yaml", ".yml", ".json", ".toml"):
        raise HyperionError(
            f"settings in {file.suffix} files are not read",
            where=file,
            next_step="name a shell script, Dockerfile or Python file",
        )
    try:
        text = file.read_text(encoding="utf-8")
        first_line = text.partition("\n")[0]
        is_python = file.suffix == ".py" or (first_line.startswith("#!") and "python" in first_line)
        return python_assignments(text) if is_python else shell_assignments(text)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise HyperionError(
            f"cannot read: {error}", where=file, next_step="name a shell script, Dockerfile or Python file"
        ) from error


def shell_assignments(text: str) -> Assignments:
    """Return the settings in the text of a shell script or a Dockerfile.

    These are commands such as `export A=1 B=2`, `A=1 python train.py`, `env A=1 …`, `ENV A=1 B=2` and fish's `set -gx A 1`, and
    options such as `docker run -e A=1`, `mpirun -x A=1` and `srun --export=ALL,A=1`. The text after `bash -c`, the code after
    `python -c`, and here-documents are read too.
    """
    return [pair for words in _commands(text) for pair in _of_command(words)]


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command. A here-document is yielded as the command ["bash" or "python", "-c", TEXT]."""
    # A Dockerfile may have comments between the lines of one instruction.
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", text)
    lines = re.sub(r"\\\r?\n", " ", text).split("\n")
    while lines:
        line = lines.pop(0)
        words, substituted = _split(line)
        for more in range(1, min(len(lines), _LINES_OF_A_QUOTE) + 1) if words is None else ():
            words, substituted = _split("\n".join([line, *lines[:more]]))
            if words is not None:
                del lines[:more]
                break
        # A quotation mark without a partner: the words without their quotation marks are the best reading.
        words = [word.strip("\"'") for word in line.split()] if words is None else words
        yield from itertools.chain.from_iterable(map(_commands, substituted))
        yield from _simple_commands(words)
        for operator, end in itertools.pairwise(words):
            body = list(itertools.takewhile(lambda one, end=end: one.strip() != end.removeprefix("-"), lines))
            if operator == "<<" and len(body) < len(lines):
                del lines[: len(body) + 1]
                is_python = any(_PYTHONS.fullmatch(word) or word.endswith(".py") for word in words)
                yield ["python" if is_python else "bash", "-c", "\n".join(body)]


def _split(line: str) -> tuple[list[str] | None, list[str]]:
    """Return the words and operators of a line, and the commands in its substitutions `$(…)`, which are left out of the words.

    Without words (None), a quotation mark has no partner in this line.
    """
    # shlex takes the mark # in the middle of a word for a comment, so comments are removed before.
    line, inner = _QUOTED_OR_COMMENT.sub(lambda match: match[1] or "", line), []
    while found := list(_SUBSTITUTION.finditer(line)):  # from the innermost outwards
        inner += [match[1] or match[2] or "" for match in found]
        line = _SUBSTITUTION.sub("$", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer), inner
    except ValueError:
        return None, []


def _simple_commands(words: Iterable[str]) -> Iterator[list[str]]:
    """Divide the words of a line at operators such as `;` and `&&`. Redirections are left out."""
    command, is_target = [], False
    for word in words:
        if set(word) <= set("();<>|&") and word:
            is_target = bool(set(word) & set("<>"))
            if not is_target:
                yield command
                command = []
        elif is_target:
            is_target = False
        else:
            command.append(word)
    yield command


def _of_command(words: list[str]) -> Iterator[tuple[str, str]]:
    words = list(itertools.dropwhile(_BEFORE_COMMAND.__contains__, words))
    match words:
        case ["ENV" | "setenv", name, value, *more] if _NAME.fullmatch(name):
            yield name, " ".join([value, *more])
        case ["set", flags, name, *values] if re.fullmatch(r"-[gUl]*x", flags) and _NAME.fullmatch(name):
            yield name, " ".join(values)
        case ["ENV" | "export" | "declare" | "typeset" | "readonly" | "local", *rest]:
            yield from _settings(rest)
        case _:
            yield from _of_program(words)


def _settings(words: Iterable[str]) -> Assignments:
    return [(found[1], found[2]) for found in map(_SETTING.fullmatch, words) if found]


def _of_program(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the settings before the name of a program, those of `env`, and those of its options."""
    may_set, before, reader = True, ["", ""], ""
    for word in words:
        setting = _SETTING.fullmatch(word)
        if setting and (may_set or before[1] in _OPTIONS):
            yield setting[1], setting[2]
        elif before[0] in ("-genv", "-env") and _NAME.fullmatch(before[1]):  # mpiexec of MPICH
            yield before[1], word
        elif option := re.fullmatch(r"(?:--env=|-e)(.*)", word, re.DOTALL):
            yield from _settings([option[1]])
        elif word.startswith("--export="):  # srun and sbatch
            yield from _settings(word.removeprefix("--export=").split(","))
        elif reader and re.fullmatch("-[a-z]*c", before[1]):  # bash -lc TEXT
            yield from shell_assignments(word) if _SHELLS.fullmatch(reader) else _of_embedded_python(word)
        # `env -i A=1 program`: the options of env do not end its settings.
        may_set = word == "env" or (may_set and (setting is not None or word.startswith("-") or before[1] == "-u"))
        reader = word if _SHELLS.fullmatch(word) or _PYTHONS.fullmatch(word) else reader
        before = [before[1], word]


def _of_embedded_python(text: str) -> Assignments:
    try:
        return python_assignments(text)
    except SyntaxError:  # the shell replaces a part of the text
        return []


def python_assignments(text: str) -> Assignments:
    """Return the settings in the text of a Python program.

    These are assignments to `os.environ`, its methods `update` and `setdefault`, `os.putenv`, and the argument `env` of a call,
    such as `env={**os.environ, "A": "1"}`.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.expr)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))  # ast.walk goes by depth, but the last setting counts
    return list(itertools.chain.from_iterable(map(_of_node, nodes)))


def _of_node(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _pair(target.slice, value)
        case ast.AugAssign(target=target, op=ast.BitOr(), value=value) if _is_environ(target):
            yield from _of_mapping(value)
        case ast.Call(func=ast.Attribute(value=owner, attr="setdefault"), args=[name, value]) if _is_environ(owner):
            yield from _pair(name, value)
        case ast.Call(func=ast.Attribute(value=owner, attr="update")) if _is_environ(owner):
            yield from itertools.chain.from_iterable(map(_of_mapping, node.args))
            yield from _of_keywords(node)
        case ast.Call(func=ast.Attribute(attr="putenv" | "setenv") | ast.Name(id="putenv"), args=[name, value]):
            yield from _pair(name, value)
        case ast.Call(keywords=keywords):
            yield from itertools.chain.from_iterable(_of_mapping(one.value) for one in keywords if one.arg == "env")


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (isinstance(node, ast.Name) and node.id == "environ")


def _of_mapping(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the settings in a dict that is written as a display, with `|`, or as a call of `dict`."""
    match node:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                yield from _of_mapping(value) if key is None else _pair(key, value)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _of_mapping(left)
            yield from _of_mapping(right)
        case ast.Call(func=ast.Name(id="dict"), args=args):
            yield from itertools.chain.from_iterable(map(_of_mapping, args))
            yield from _of_keywords(node)


def _of_keywords(call: ast.Call) -> Iterator[tuple[str, str]]:
    for keyword in call.keywords:
        if keyword.arg is None:
            yield from _of_mapping(keyword.value)
        else:
            yield from _pair(ast.Constant(keyword.arg), keyword.value)


def _pair(name: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(name, ast.Constant) and isinstance(name.value, str) and _NAME.fullmatch(name.value):
        literal = value.value if isinstance(value, ast.Constant) else None
        yield name.value, literal if isinstance(literal, str) else f"$({ast.unparse(value)})"
