"""Read the settings of environment variables from shell scripts, Dockerfiles and Python files.

Nothing is run. A value that is known only at run time is given as it is written, with a `$`.

Every setting has a scope, which says where it applies. Two settings can only contradict each other if they apply to the same
program: the settings of two commands, or of two branches of an `if`, cannot.
"""

import ast
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hyperion.errors import HyperionError

Assignments = list[tuple[str, str]]
Scope = tuple[int, ...]


class Assignment(NamedTuple):
    """One setting of an environment variable.

    Args:
        name: the variable.
        value: its value, or None if the variable is removed here.
        scope: where the setting applies. () is the rest of the file. Otherwise, it is a path of numbers that differ between
            commands, branches, loops, functions and subshells. A setting also applies to the scopes whose paths begin with it.
    """

    name: str
    value: str | None
    scope: Scope = ()


_SETTING = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
# Words that may stand before a command. RUN, CMD and ENTRYPOINT are instructions of a Dockerfile.
_BEFORE_COMMAND = {"if", "then", "else", "elif", "while", "until", "do", "time", "!", "{", "RUN", "CMD", "ENTRYPOINT"}
# Options of docker, podman, mpirun and Singularity that set a variable in the program that they start.
_OPTIONS = {"-e", "-x", "--env"}
_QUOTED_OR_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:^|(?<=[\s;&|(]))\#[^\n]*""", re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\(\([^()]*\)\)|\$\(([^()]*)\)|`([^`\n]*)`")
_SHELLS, _PYTHONS = re.compile(r"(?:.*/)?(?:ba|da|z|k|fi)?sh"), re.compile(r"(?:.*/)?python[\d.]*")
# Words that open a part of a script that may not be run, and words that close it. `end` is fish's, `endif` is csh's.
_OPENING, _NEXT_BRANCH = {"if", "for", "while", "until", "case", "select", "{"}, {"then", "else", "elif"}
_CLOSING = {"fi", "done", "esac", "}", "end", "endif"}
_LINES_OF_A_QUOTE = 100  # a quote that is open for longer is a stray quotation mark, such as an apostrophe


def read_assignments(file: Path) -> list[Assignment]:
    """Return the settings in a shell script, a Dockerfile or a Python file, in their order, with their scopes.

    Raises:
        HyperionError: the file cannot be read as text, it is a Python file with a syntax error, or a file of data.
    """
    if file.suffix in (".yaml", ".yml", ".json", ".toml", ".ipynb"):
        raise HyperionError(
            f"settings in {file.suffix} files are not read",
            where=file,
            next_step="name a shell script, Dockerfile or Python file",
        )
    try:
        text = file.read_text(encoding="utf-8")
        first_line = text.partition("\n")[0]
        is_python = file.suffix == ".py" or (first_line.startswith("#!") and "python" in first_line)
        return list(_of_python(text) if is_python else _of_shell(text))
    except SyntaxError as error:
        where, remedy = f"{file}, line {error.lineno}", "correct the program, or name another file"
        raise HyperionError(f"no valid Python: {error.msg}", where=where, next_step=remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise HyperionError(
            f"cannot read: {error}", where=file, next_step="name a shell script, Dockerfile or Python file"
        ) from error


def shell_assignments(text: str) -> Assignments:
    """Return the settings in the text of a shell script or a Dockerfile.

    These are commands such as `export A=1 B=2`, `A=1 python train.py`, `env A=1 …`, `ENV A=1 B=2` and fish's `set -gx A 1`, and
    options such as `docker run -e A=1`, `mpirun -x A=1` and `srun --export=ALL,A=1`. The text after `bash -c`, the code after
    `python -c`, and here-documents are read too.
    """
    return _pairs(_of_shell(text))


def _pairs(assignments: Iterable[Assignment]) -> Assignments:
    return [(one.name, one.value) for one in assignments if one.value is not None]


def _of_shell(text: str) -> Iterator[Assignment]:
    numbers = itertools.count()
    # The parts of the script around the command, from the outermost inwards: what opened each part, and its number.
    parts: list[tuple[str, int]] = []
    for operators, words in _commands(text):
        keywords = itertools.takewhile((_BEFORE_COMMAND | _OPENING | _CLOSING).__contains__, words)
        for word in (*re.findall(r";;|[()]", operators), *keywords):
            opener = parts[-1][0] if parts else ""
            if word == "(" or word in _OPENING:
                parts.append((word, next(numbers)))
            elif (word == ")" and opener == "(") or (word in _CLOSING and opener):
                parts.pop()
            elif (word == ";;" and opener == "case") or (word in _NEXT_BRANCH and opener == "if"):
                parts[-1] = (opener, next(numbers))
        scope, command = tuple(number for _, number in parts), next(numbers)
        if "&&" in operators or "||" in operators:
            scope = (*scope, command)
        for one in _of_command(words):
            # The settings of a program, whose scope is relative to the command, apply to this program only.
            yield one._replace(scope=scope if one.scope == _LASTING else (*scope, command, *one.scope))


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the operators before each command, and its words.

    A here-document is yielded as the command ["bash" or "python", "-c", TEXT], and a substitution as a subshell.
    """
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
        for inner in substituted:
            yield "(", []
            yield from _commands(inner)
            yield ")", []
        yield from _simple_commands(words)
        for operator, end in itertools.pairwise(words):
            body = list(itertools.takewhile(lambda one, end=end: one.strip() != end.removeprefix("-"), lines))
            if operator == "<<" and len(body) < len(lines):
                del lines[: len(body) + 1]
                is_python = any(_PYTHONS.fullmatch(word) or word.endswith(".py") for word in words)
                yield "", ["python" if is_python else "bash", "-c", "\n".join(body)]


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


def _simple_commands(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Divide the words of a line at operators such as `;` and `&&`. Yield the operator before each command, and its words.

    Redirections are left out.
    """
    command, is_target, operator = [], False, ""
    for word in words:
        if set(word) <= set("();<>|&") and word:
            is_target = bool(set(word) & set("<>"))
            if not is_target:
                yield operator, command
                command, operator = [], word
        elif is_target:
            is_target = False
        else:
            command.append(word)
    yield operator, command


_LASTING: Scope = (-1,)  # scope, relative to a command, of a setting that also applies to the commands after it


def _of_command(words: list[str]) -> Iterator[Assignment]:
    words = list(itertools.dropwhile(_BEFORE_COMMAND.__contains__, words))
    match words:
        case ["ENV" | "setenv", name, value, *more] if _NAME.fullmatch(name):
            yield Assignment(name, " ".join([value, *more]), _LASTING)
        case ["set", flags, name, *values] if re.fullmatch(r"-[gUl]*x", flags) and _NAME.fullmatch(name):
            yield Assignment(name, " ".join(values), _LASTING)
        case ["unset" | "unsetenv", *names]:
            yield from (Assignment(name, None, _LASTING) for name in names if _NAME.fullmatch(name))
        case ["ENV" | "export" | "declare" | "typeset" | "readonly" | "local", *rest]:
            yield from (Assignment(*pair, _LASTING) for pair in _settings(rest))
        case _:
            yield from _of_program(words)


def _settings(words: Iterable[str]) -> Assignments:
    return [(found[1], found[2]) for found in map(_SETTING.fullmatch, words) if found]


def _of_program(words: list[str]) -> Iterator[Assignment]:
    """Yield the settings before the name of a program, those of `env`, those of its options, and those of the text after -c."""
    may_set, before, reader = True, ["", ""], ""
    for word in words:
        setting = _SETTING.fullmatch(word)
        if setting and (may_set or before[1] in _OPTIONS):
            yield Assignment(setting[1], setting[2])
        elif before[0] in ("-genv", "-env") and _NAME.fullmatch(before[1]):  # mpiexec of MPICH
            yield Assignment(before[1], word)
        elif option := re.fullmatch(r"(?:--env=|-e)(.*)", word, re.DOTALL):
            yield from itertools.starmap(Assignment, _settings([option[1]]))
        elif word.startswith("--export="):  # srun and sbatch
            yield from itertools.starmap(Assignment, _settings(word.removeprefix("--export=").split(",")))
        elif reader and re.fullmatch("-[a-z]*c", before[1]):  # bash -lc TEXT
            yield from _of_shell(word) if _SHELLS.fullmatch(reader) else _of_embedded_python(word)
        # `env -i A=1 program`: the options of env do not end its settings.
        may_set = word == "env" or (may_set and (setting is not None or word.startswith("-") or before[1] == "-u"))
        reader = word if _SHELLS.fullmatch(word) or _PYTHONS.fullmatch(word) else reader
        before = [before[1], word]


def _of_embedded_python(text: str) -> list[Assignment]:
    try:
        return list(_of_python(text))
    except SyntaxError:  # the shell replaces a part of the text
        return []


def python_assignments(text: str) -> Assignments:
    """Return the settings in the text of a Python program.

    These are assignments to `os.environ`, its methods `update` and `setdefault`, `os.putenv`, and the argument `env` of a call,
    such as `env={**os.environ, "A": "1"}`.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    return _pairs(_of_python(text))


def _of_python(text: str) -> Iterator[Assignment]:
    numbers = itertools.count()
    nodes = list(_scoped_nodes(ast.parse(text), numbers))
    nodes.sort(key=lambda found: (found[0].lineno, found[0].col_offset))  # a call begins after the calls in its arguments
    for node, scope in nodes:
        of_call = isinstance(node, ast.Call) and any(one.arg == "env" for one in node.keywords)
        place = (*scope, next(numbers)) if of_call else scope
        yield from (Assignment(name, value, place) for name, value in _of_node(node))


def _scoped_nodes(tree: ast.Module, numbers: Iterator[int]) -> Iterator[tuple[ast.stmt | ast.expr, Scope]]:
    """Yield the statements and expressions of a program with their scopes. Each block that may not be run has its own scope."""
    pending: list[tuple[ast.AST, Scope]] = [(tree, ())]
    while pending:
        node, scope = pending.pop()
        if isinstance(node, ast.stmt | ast.expr):
            yield node, scope
        always = isinstance(node, ast.Module | ast.With | ast.AsyncWith)
        for _, content in ast.iter_fields(node):
            children = [one for one in (content if isinstance(content, list) else [content]) if isinstance(one, ast.AST)]
            is_block = isinstance(content, list) and any(isinstance(one, ast.stmt) for one in children)
            within = (*scope, next(numbers)) if is_block and not always else scope
            pending += [(child, within) for child in children]


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
