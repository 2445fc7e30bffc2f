"""`hyperion passport`: measure this machine into one file, or check such files."""

from pathlib import Path
from typing import Annotated

import typer

from hyperion.errors import HyperionError
from hyperion.paths import results_folder
from hyperion.terminal import say


def passport(
    files: Annotated[list[Path] | None, typer.Argument(help="With --verify: passport files.", show_default=False)] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check files instead of measuring.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where to write it.", show_default="results/passports/<device>.json")
    ] = None,
    time_limit: Annotated[str, typer.Option(help="Approximate time to take: 40s, 5m.")] = "5m",
) -> None:
    """Write what this machine is and reaches into one file that can be shared: fingerprint, ceilings, floors, hashes.

    To contribute your machine, add the file under results/passports/ in a pull request. With --verify: exit code 0 when all
    files follow the rules, 1 with the field and the reason when one does not.
    """
    from hyperion.reproduce.stopping import parse_duration

    if verify != bool(files):
        raise HyperionError("files and --verify go together", next_step="hyperion passport --verify FILE [FILE ...]")
    raise typer.Exit(_verify(files) if files else _write(parse_duration(time_limit, "--time-limit"), output))


def _write(time_limit_s: float, output: Path | None) -> int:
    """Measure this machine, write its passport, and check the file."""
    from hyperion.passport import measure_passport, passport_name, verify_passport, write_passport
    from hyperion.results.store import PASSPORTS

    content = measure_passport(time_limit_s)
    path = output or results_folder() / PASSPORTS / passport_name(content)
    write_passport(content, path)
    say(f"{path}: {verify_passport(path)} values")
    return 0


def _verify(files: list[Path]) -> int:
    """Check each file; return 1 when one breaks a rule, and print the field and the reason."""
    from hyperion.passport import PassportError, verify_passport

    refused = 0
    for path in files:
        try:
            say(f"{path}: {verify_passport(path)} values keep the rules")
        except PassportError as error:
            refused += 1
            say(f"{path}: {error.what}")
    return 1 if refused else 0
