"""`hyperion passport`: write this machine's, or check files of others."""

from pathlib import Path

from hyperion.passport import PassportError, measure_passport, passport_name, verify_passport, write_passport
from hyperion.paths import results_folder
from hyperion.results.folders import PASSPORTS
from hyperion.untrusted import printable


def write(time_limit_s: float, output: Path | None) -> int:
    """Measure this machine, write its passport, and hold the file to its rules."""
    content = measure_passport(time_limit_s)
    path = output or results_folder() / PASSPORTS / passport_name(content)
    write_passport(content, path)
    print(f"{path}: {verify_passport(path)} values")
    return 0


def verify(files: list[Path]) -> int:
    """Hold files to the rules, each by itself; 1 when one breaks them, with the field and the reason."""
    refused = 0
    for path in files:
        try:
            print(f"{path}: {verify_passport(path)} values keep the rules")
        except PassportError as error:
            refused += 1
            print(printable(f"{path}: {error.what}"))
    return 1 if refused else 0
