"""Which recommendations of the adaptation guide are valid for this release of megatron-core?

The guide recommends command-line options and environment variables. An option is valid if the argument parser of the release has
it. A variable can have an effect only if some library contains its name, because libraries read variables by name. The experiment
searches the libraries of this machine. `rocm_readers.toml` lists the places in the sources of ROCm that read a variable.
"""

import mmap
import tomllib
from pathlib import Path

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.errors import HyperionError
from hyperion.parallel.megatron.release import find_release

OPTIONS, TORCH, MEGATRON, ROCM = "parser of core_v0.16.1", "PyTorch", "megatron-core", "ROCm runtime"
SOURCES = "sources of ROCm"
HOLDS, EXITS, UNKNOWN, REQUIRED = (
    "holds",
    "accepted, then the program exits",
    "refused by the parser",
    "required, missing in the guide",
)
READ, UNREAD = "a library contains the name", "no library contains the name"
HAS_READER, NO_READER = "ROCm reads it", "ROCm does not read it"
_ROCM_LIBRARIES = ("libamdhip64*", "libhsa-runtime64*", "librccl*")
_FOLDER = Path(__file__).parent


def forecast(context: Context) -> list[Forecast]:
    """Predict what the guide claims: each recommended option occurs in the parser."""
    names = [entry["name"] for entry in advice()["option"]]
    return [
        Forecast(name, "count", 1, "the guide recommends it", params={"where": OPTIONS, "what": "occurrences in the parser"})
        for name in names
    ]


def run(context: Context, report: Report) -> Result:
    """Look up each option in the parser, and search each variable in the libraries of this machine."""
    table = advice()
    rows = [_option_row(context, entry) for entry in table["option"]]
    rows += [_reader_row(context, entry) for entry in table["variable"]]
    places = libraries()
    names = [entry["name"] for entry in table["variable"]]
    for done, (place, files) in enumerate(places.items()):
        report(done, len(places), place)
        found = files_with(names, files)
        for entry in table["variable"]:
            name = entry["name"]
            params = {"where": place, "what": "files that contain the name"} | _remedy(entry)
            if files:
                verdict = READ if found[name] else UNREAD
                example = {"example": found[name][0].name} if found[name] else {}
                params |= {"verdict": verdict, "files": len(files)} | example
                rows.append(context.row(name, "count", len(found[name]), params=params))
            else:
                rows.append(context.absent_row(name, "count", f"unavailable: {place} is not on this machine", params=params))
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


def advice() -> dict:
    """Return the advice of the guide: {"option": entries, "variable": entries}."""
    return tomllib.loads((_FOLDER / "advice.toml").read_text("utf-8"))


def parser() -> dict:
    """Return the content of `parser_options.toml`: the facts about the argument parser of the release."""
    return tomllib.loads((_FOLDER / "parser_options.toml").read_text("utf-8"))


def rocm_readers() -> dict[str, list[str]]:
    """Return, for each variable, the places in the sources of ROCm that read it. They are listed in `rocm_readers.toml`."""
    return tomllib.loads((_FOLDER / "rocm_readers.toml").read_text("utf-8"))["readers"]


def verdict_on(option: str) -> tuple[str, str]:
    """Return what the parser of the release does with an option, and the evidence."""
    known = parser()
    if option in known["exits"]:
        return EXITS, known["exits"][option]
    if option in known["required"]:
        return REQUIRED, known["required"][option]
    if option in known["options"]["names"]:
        return HOLDS, f"one of {len(known['options']['names'])} options"
    return UNKNOWN, f"not one of {len(known['options']['names'])} options"


def libraries() -> dict[str, list[Path]]:
    """Return the files in which names of variables are searched, by place: shared libraries and Python files.

    The list of a place that is not on this machine is empty.
    """
    root = Path(torch.__file__).parent
    try:
        megatron = sorted(find_release().rglob("*.py"))
    except HyperionError:
        megatron = []
    shared = sorted({path.resolve() for path in (root / "lib").glob("*.so*")})
    rocm = sorted(
        {
            path.resolve()
            for folder in (root / "lib", Path("/opt/rocm/lib"))
            for name in _ROCM_LIBRARIES
            for path in folder.glob(name)
        }
    )
    return {TORCH: [path for path in shared if path not in rocm] + sorted(root.rglob("*.py")), MEGATRON: megatron, ROCM: rocm}


def files_with(names: list[str], files: list[Path]) -> dict[str, list[Path]]:
    """Return, for each name, the files that contain it as a whole word. NCCL_DEBUG_FILE does not count as NCCL_DEBUG."""
    found: dict[str, list[Path]] = {name: [] for name in names}
    for path in files:
        if path.stat().st_size == 0:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for name in names:
                if _contains(content, name.encode()):
                    found[name].append(path)
    return found


def _contains(content: mmap.mmap, name: bytes) -> bool:
    place = content.find(name)
    while place >= 0:
        ends = content[max(0, place - 1) : place] + content[place + len(name) : place + len(name) + 1]
        if not any(chr(byte).isalnum() and byte < 128 or byte == ord("_") for byte in ends):
            return True
        place = content.find(name, place + 1)
    return False


def _option_row(context: Context, entry: dict):
    verdict, evidence = verdict_on(entry["name"])
    count = parser()["options"]["names"].count(entry["name"])
    params = {"where": OPTIONS, "what": "occurrences in the parser", "verdict": verdict, "evidence": evidence} | _remedy(entry)
    return context.row(entry["name"], "count", count, params=params)


def _reader_row(context: Context, entry: dict):
    places = rocm_readers()[entry["name"]]
    params = {"where": SOURCES, "what": "places that read it", "verdict": HAS_READER if places else NO_READER}
    params |= {"evidence": "; ".join(places)} if places else {}
    return context.row(entry["name"], "count", len(places), params=params | _remedy(entry))


def _remedy(entry: dict) -> dict:
    return {"remedy": entry["remedy"]} if "remedy" in entry else {}
