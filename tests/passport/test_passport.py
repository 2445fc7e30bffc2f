"""Passports: those that are committed keep the rules, and one that does not is refused by the field and the reason."""

import copy
import errno
import getpass
import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hyperion.cli import app
from hyperion.doctor import FloorReport, judge
from hyperion.errors import HyperionError
from hyperion.hardware import collect_facts, detect, fingerprint, floors_for, lookup
from hyperion.passport import (
    PassportError,
    measure_passport,
    new_passport_path,
    not_measured,
    passport_name,
    verify,
    verify_passport,
    write_passport,
)
from hyperion.passport.measure import passport_of
from hyperion.passport.verify import hashes_of, private_text
from hyperion.results import Row
from tests.doctor.test_floors import healthy, row
from tests.hardware.machines import facts, gpu

COMMITTED = sorted((Path(__file__).resolve().parents[2] / "results/passports").glob("*.json"))
NODE = facts(gpus=tuple(gpu("MI250X", pci_address=f"0000:{bus:02x}:00.0") for bus in range(8)))


def of_node(**changes) -> dict:
    """The passport of a node of eight MI250X dies with injected rows."""
    device = detect(NODE)
    limits = {"bandwidth_gb_s": 1638.4, "gemm_tflops": 47.872}
    rows = [replace(measured, limit=limits.get(measured.metric)) for measured in healthy(**changes)]
    rows = [row("copy", None, dtype="fp16", value_reason="not measured"), *rows]
    floors, unknown = floors_for(device, 8)
    return passport_of(NODE, device, 8, rows, FloorReport(device.name, tuple(judge(floors, rows)), unknown))


def file_of(folder: Path, content: dict, *, rehashed: bool = True) -> Path:
    if rehashed:
        content = content | {"hashes": hashes_of(content)}
    path = folder / "passport.json"
    path.write_text(json.dumps(content))
    return path


def refusal(folder: Path, content: dict, **options) -> str:
    with pytest.raises(PassportError) as error:
        verify_passport(file_of(folder, content, **options))
    assert error.value.next_step and error.value.where and error.value.exit_code == 1
    return error.value.what


def test_there_is_a_passport_of_a_cpu():
    assert any(path.name.startswith("cpu-") for path in COMMITTED)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_every_committed_passport_keeps_the_rules(path):
    assert verify_passport(path) >= 5
    name = passport_name(json.loads(path.read_text())).removesuffix(".json")
    assert re.fullmatch(rf"{re.escape(name)}(-\d+)?\.json", path.name)


def test_a_node_of_mi250x_has_a_passport_with_amds_floors(tmp_path):
    content = of_node(copy=1150)
    assert verify_passport(file_of(tmp_path, content)) == 7
    outcomes = {(v["quantity"], v["dtype"]): v["outcome"] for v in content["floors"]["verdicts"]}
    assert outcomes["copy", "fp64"] == "not met" and outcomes["triad", "fp64"] == "met"
    assert passport_name(content) == "amd-instinct-mi250x-mi250-x8.json"


def at(content: dict, path: str):
    """The object that holds the field, and the field's name."""
    *outer, name = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in outer:
        content = content[part]
    return content, name


def changed(path: str, value) -> dict:
    content = of_node()
    holder, name = at(content, path)
    holder[name] = value
    return content


TAMPERED = [
    ("ceilings/1/value", 1355.0, "ceilings", "ceilings[1].value: is"),
    ("fingerprint/driver", "amdgpu 9", "fingerprint", ""),
    ("floors/verdicts/0/outcome", "not met", "floors", "floors.verdicts[0].outcome: is 'not met', but the rows say 'met'"),
    ("created", "2030-01-01", "whole", ""),
]


@pytest.mark.parametrize(("path", "value", "section", "_"), TAMPERED)
def test_a_change_shows_in_the_hash_of_its_section(tmp_path, path, value, section, _):
    said = refusal(tmp_path, changed(path, value), rehashed=False)
    assert said.startswith(f"hashes.{section}: does not match the content")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("ceilings/1/value", 1700.0, "ceilings[1]: row of bandwidth_gb_s lies outside its own interval"),
        ("ceilings/1/ci_low", 1400.0, "ceilings[1]: row of bandwidth_gb_s lies outside its own interval"),
        ("ceilings/1/n", 7, "ceilings[1].n: is 7, but at least 30"),
        ("ceilings/1/n", None, "ceilings[1]: row of bandwidth_gb_s lacks n"),
        ("ceilings/1/unit", "GiB/s", "ceilings[1].unit: is 'GiB/s', but the unit of bandwidth_gb_s is 'GB/s'"),
        ("ceilings/1/check_error", 0.5, "ceilings[1]: row of bandwidth_gb_s failed its check"),
        ("ceilings/1/metric", "speedup", "ceilings[1].metric: is 'speedup'"),
        ("ceilings/1/metric", "luck", "ceilings[1].metric: is 'luck'"),
        ("ceilings/1/limit", None, "ceilings[1].limit: is None, but the data sheet has 1638.4"),
        ("ceilings/1/limit", 9999.0, "ceilings[1].limit: is 9999.0, but the data sheet has 1638.4"),
        ("ceilings/1/colour", "red", "ceilings[1].colour: is an unknown field"),
        ("ceilings/1/params", {"elements": 2**28, "cache": "cold", "luck": 1}, "ceilings[1].params.luck: is an unknown field"),
        ("ceilings/1/params/elements", -1, "ceilings[1].params.elements: is -1"),
        ("ceilings/1/params", {"cache": "cold"}, "ceilings[1].params.elements must be a valid integer, not None"),
        ("ceilings/1/value", "fast", "ceilings[1].value must be a valid number, not 'fast'"),
        ("ceilings/2", None, "ceilings[2] must be an object"),
        ("floors/verdicts/0/value", 1000, "floors.verdicts[0].value: is 1000, but its source says 1200"),
        ("floors/verdicts/0/measured", 1.0, "floors.verdicts[0].measured: is 1.0, but the rows say 1350"),
        ("floors/verdicts/0/quantity", "luck", "floors.verdicts: has 'luck'"),
        ("floors/unknown", "no idea", "floors: must have either verdicts or a reason"),
        ("fingerprint/color", "red", "unknown field fingerprint.color"),
        ("fingerprint/gpus/0/name", 3, "fingerprint.gpus[0].name must be a valid string, not 3"),
        ("fingerprint/packages", {"torch": "/home/me/torch"}, "fingerprint.packages.torch: contains a path"),
        ("fingerprint/source", {"hash": "x"}, "missing field fingerprint.source.commit"),
        ("device", "NVIDIA H200", "device: is 'NVIDIA H200', but the fingerprint says 'AMD Instinct MI250X/MI250'"),
        ("devices", 4, "devices: is 4, but the fingerprint has 8"),
        ("created", "yesterday", "created: is not a date"),
        ("schema", 2, "schema: is 2, but this version of Hyperion reads schema 1"),
        ("ceilings", [], "ceilings: contains no value"),
        ("extra", 1, "unknown field extra"),
    ],
)
def test_a_change_with_the_hashes_made_anew_is_still_refused_by_its_field(tmp_path, path, value, said):
    assert said in refusal(tmp_path, changed(path, value))


def test_a_value_beyond_the_data_sheet_is_refused_though_its_own_limit_allows_it(tmp_path):
    content = of_node()
    content["ceilings"][1] |= {"value": 3000.0, "ci_low": 2990.0, "ci_high": 3010.0, "limit": 3276.8}  # the module's
    assert "ceilings[1].limit: is 3276.8, but the data sheet has 1638.4" in refusal(tmp_path, content)
    content["ceilings"][1] |= {"limit": 1638.4}
    assert "beyond its limit" in refusal(tmp_path, content)


def test_a_row_that_stands_twice_is_refused(tmp_path):
    content = of_node()
    content["ceilings"].append(copy.deepcopy(content["ceilings"][1]))
    assert "ceilings[8]: repeats ceilings[1]" in refusal(tmp_path, content)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": 1, "schema": 1}', '{"schema": NaN}', "null", "\x00"])
def test_what_is_no_passport_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PassportError):
        verify_passport(tmp_path / "p.json")
    with pytest.raises(PassportError, match="cannot be read"):
        verify_passport(tmp_path / "none.json")


NUMBERS = st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False)
JUNK = st.none() | st.booleans() | st.text(max_size=3) | NUMBERS | st.sampled_from([[], {}, [{}], {"x": 1}])
GOOD = of_node()


def leaves(value, path=()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [leaf for key, item in items for leaf in leaves(item, (*path, key))]


PLACES = leaves(GOOD)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PLACES), JUNK)
def test_junk_anywhere_is_refused_in_words_or_kept(tmp_path, place, junk):
    content = copy.deepcopy(GOOD)
    holder = content
    for part in place[:-1]:
        holder = holder[part]
    holder[place[-1]] = junk
    try:
        verify_passport(file_of(tmp_path, content, rehashed=all(name in content for name in GOOD)))
    except PassportError as error:
        assert error.what


@given(st.text(max_size=30))
def test_the_hashes_depend_on_every_text(text):
    content = copy.deepcopy(GOOD)
    content["fingerprint"]["kernel"] = text
    assert (hashes_of(content) == hashes_of(GOOD)) == (text == GOOD["fingerprint"]["kernel"])


def test_no_path_passes_and_no_address_is_taken_for_one():
    for text in ("/home/me/x", "see /scratch/run1/a", "NCCL_TOPO_FILE=/opt/x", "~/.cache", "C:\\Users"):
        assert private_text({"a": [text]}, "p") == "p.a[0]"
        assert private_text({text: 1}, "p")
    for text in ("https://github.com/ROCm/docs/blob/home/data/mi250.md", "GB/s", "2·M·N·K / (t)", "AMD Instinct MI250X/MI250"):
        assert private_text({"a": text}, "p") == ""


@pytest.mark.slow
def test_this_machine_gets_a_passport_in_seconds(tmp_path):
    content = measure_passport(4.0, on_line=lambda line: None)
    write_passport(content, tmp_path / "new" / passport_name(content))
    [path] = (tmp_path / "new").iterdir()
    assert verify_passport(path) >= 1
    text = path.read_text()
    for private in (socket.gethostname(), str(Path.home()) + "/", f"/{getpass.getuser()}/"):
        assert private not in text
    assert content["fingerprint"] == json.loads(json.dumps(fingerprint(collect_facts())))
    reasons = [entry["value_reason"] for entry in content["ceilings"] if entry["value"] is None]
    assert reasons and all(reasons)
    said = not_measured(content)
    assert len(said) == len(set(reasons)) and any("the time limit of 4 s ended before it" in line for line in said)
    assert content["floors"]["unknown"].startswith("no floor is known for")


@pytest.mark.slow
def test_a_passport_never_replaces_another_one(hyperion, tmp_path):
    content = GOOD | {"device": "AMD Instinct MI250X"}
    for number in ("", "-2", "-3"):
        path = new_passport_path(content, tmp_path)
        assert path.name == passport_name(content).replace(".json", f"{number}.json")
        write_passport(content, path)
    before = path.read_bytes()
    with pytest.raises(HyperionError, match="already a file with this name"):
        write_passport(content | {"devices": 4}, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 3
    refused = hyperion("passport", "--output", str(path))
    assert refused.returncode == 2 and "already a file with this name" in refused.stderr and path.read_bytes() == before


@pytest.mark.parametrize("named", [True, False])
def test_a_passport_that_cannot_be_written_is_refused_before_the_measurement(named, tmp_path, monkeypatch):
    def measure(time_limit_s):
        raise AssertionError("measured")

    monkeypatch.setattr("hyperion.passport.measure_passport", measure)
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))
    options = ["--output", str(tmp_path / "new/own.json")] if named else []
    folder = tmp_path / ("new" if named else "results/passports")

    def refusal() -> str:
        result = CliRunner().invoke(app, ["passport", *options])
        assert isinstance(result.exception, HyperionError) and "--output FILE" in str(result.exception.next_step)
        return str(result.exception)

    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr("hyperion.errors.tempfile.TemporaryFile", read_only)
        assert f"Read-only file system; nothing was measured\n  where: {folder}" in refusal()
    folder.rmdir()
    folder.touch()
    assert f"cannot write the passport: File exists\n  where: {folder}" in refusal()
    folder.unlink()
    result = CliRunner().invoke(app, ["passport", *options])
    assert str(result.exception) == "measured" and list(folder.iterdir()) == []


def test_the_command_checks_files_and_names_what_is_wrong(hyperion, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(GOOD))
    bad.write_text(json.dumps(GOOD | {"devices": 4}))
    done = hyperion("passport", "--verify", str(good), str(bad))
    assert done.returncode == 1 and f"{good}: 7 values follow the rules" in done.stdout
    assert f"{bad}: hashes.whole" in done.stdout and "Traceback" not in done.stderr
    lone = hyperion("passport", "--verify")
    assert lone.returncode == 2 and "files and --verify must be given together" in lone.stderr


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_bus_bandwidth_is_limited_by_its_link_and_by_a_switch_that_adds(ranks, factor):
    device = detect(facts("H200"))
    reduced = Row(notebook="n", experiment="e", variant="all_reduce", metric="busbw_gb_s", value=None, params={"ranks": ranks})
    assert verify._known_limit(reduced, "row", device) == pytest.approx(factor * lookup(device)[0].link_limit_gb_s(ranks)[0])
