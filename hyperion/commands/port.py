"""The command `hyperion port`: find what ties source code to CUDA, and what a port to ROCm must change."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hyperion.commands.console import console
from hyperion.terminal import say

app = typer.Typer(help="Port source code from CUDA to ROCm.", no_args_is_help=True)


@app.callback()
def port() -> None:
    """Keep `scan` a subcommand. Without this callback, typer would make a single command the whole application."""


@app.command()
def scan(
    path: Annotated[Path, typer.Argument(help="A source file, or a folder with source code.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Find constructs that tie Python, C++, CUDA and build files to CUDA. Nothing is changed.

    Subfolders named `build` or `dist` are left out and listed.

    Each finding has a grade: `unchanged` works on ROCm as it is, `hipify` works after an automatic translation, and `rewrite`
    must be changed by a person. Exit codes: 0 nothing must be changed; 1 something must be translated or rewritten, or a file
    could not be scanned.
    """
    from hyperion.porting import GRADES
    from hyperion.porting import scan as scan_path

    findings, problems, left_out = scan_path(path)
    counts = Counter(finding.rule.grade for finding in findings)
    if as_json:
        content = {
            "findings": [
                {
                    "path": one.path,
                    "line": one.line,
                    "kind": one.rule.kind,
                    "grade": one.rule.grade,
                    "text": one.text,
                    "remedy": one.rule.remedy,
                }
                for one in findings
            ],
            "not_scanned": problems,
            "left_out": [str(folder) for folder in left_out],
            "summary": {grade: counts[grade] for grade in GRADES},
        }
        print(json.dumps(content, indent=1))
    else:
        places = Table("where", "grade", "kind", "text")
        for finding in findings:
            places.add_row(escape(f"{finding.path}:{finding.line}"), finding.rule.grade, finding.rule.kind, escape(finding.text))
        if findings:
            console().print(places)
        for rule in sorted({finding.rule for finding in findings}, key=lambda rule: (GRADES.index(rule.grade), rule.kind)):
            say(f"{rule.kind} ({rule.grade}): {rule.remedy}")
        for problem in problems:
            say(f"not scanned: {problem}")
        for folder in left_out:
            say(f"left out, because a folder of this name usually contains generated files: {folder} (name it to scan it)")
        say(", ".join(f"{counts[grade]} {grade}" for grade in GRADES))
    if problems or counts["hipify"] or counts["rewrite"]:
        raise typer.Exit(1)
