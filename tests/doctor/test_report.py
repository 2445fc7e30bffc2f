"""The report of the doctor: its schema, its exit code, the isolation of its tests, and one real run with everything in it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from hyperion.doctor.checks import CheckResult
from hyperion.doctor.components import Check, Component, components, run_components
from hyperion.doctor.report import LAYERS, LEVELS, Item, make_report, report_json, report_schema, report_table
from hyperion.doctor.rules import rules
from hyperion.errors import HyperionError
from hyperion.hardware import collect_facts
from tests.hardware.machines import facts, gpu

ITEM = Item("system", "python", "import", True, "3.12", "version", "ok", "Python 3.12", "", 0.1)


def fine() -> CheckResult:
    return CheckResult("fine", "ok", f"process {os.getpid()}", version="1.0")


def absent() -> CheckResult:
    return CheckResult("absent", "absent", "not installed", found=False)


def broken() -> CheckResult:
    raise KeyError("libamd_smi.so")


def crash() -> CheckResult:
    os.write(2, b"the last words")
    os.kill(os.getpid(), signal.SIGKILL)
    return fine()


def hang() -> CheckResult:
    time.sleep(600)
    return fine()


@pytest.mark.process
@pytest.mark.slow
def test_a_crash_a_hang_and_an_exception_stop_no_other_test_and_every_level_has_an_item():
    optional = Component("model", "optional", {"import": Check("import m", absent), "correctness": Check("by value", fine)})
    tests = {"crash": crash, "broken": broken, "fine": fine, "hang": hang}
    made = [optional, *(Component("framework", name, {"import": Check("a test", run)}) for name, run in tests.items())]
    items = run_components(made, workers=1, timeout_s=10)
    assert len(items) == len(LEVELS) * len(made)
    by_name = {item.component: item for item in items if item.level == "import"}
    assert by_name["crash"].result == "fail" and "the last words" in by_name["crash"].evidence
    assert by_name["broken"].result == "fail" and "KeyError: 'libamd_smi.so'" in by_name["broken"].evidence
    assert (
        by_name["fine"].result == "ok" and str(os.getpid()) not in by_name["fine"].evidence and by_name["fine"].version == "1.0"
    )
    assert by_name["hang"].result == "fail" and "within 10 s" in by_name["hang"].evidence and by_name["hang"].seconds >= 10
    untested = [item for item in items if item.component == "optional"]
    assert [(item.result, item.found) for item in untested] == [("absent", False), ("skip", False), ("skip", False)]
    assert all(item.evidence and not item.tested for item in untested)
    assert "the level import is 'absent'" in untested[1].evidence


def forever(file: str) -> CheckResult:
    Path(file).write_text(str(os.getpid()))
    return hang()


@pytest.mark.process
@pytest.mark.slow
def test_no_worker_outlives_a_doctor_that_was_killed(tmp_path):
    code = (
        "from functools import partial\nfrom hyperion.doctor.components import *\nfrom tests.doctor.test_report import forever\n"
        f"run_components([Component('model', 'm', {{'import': Check('t', partial(forever, {str(tmp_path / 'pid')!r}))}})], 1)"
    )
    doctor = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert doctor.poll() is None
        time.sleep(0.1)
    doctor.kill()
    doctor.wait()
    worker = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while worker.exists() and worker.read_text().rpartition(") ")[2][0] != "Z":  # the test times out if the worker stays
        time.sleep(0.1)


@pytest.mark.parametrize("changes", [{"tested": ""}, {"evidence": ""}, {"result": "fail"}, {"result": "warn"}])
def test_an_item_without_test_evidence_or_remedy_is_refused(changes):
    with pytest.raises(ValueError, match="python at level import"):
        replace(ITEM, **changes)


def test_the_exit_code_is_that_of_the_worst_item():
    assert make_report([ITEM], [], 1.0).exit_code == 0
    failed = replace(ITEM, result="fail", remedy="mend it")
    report = make_report([ITEM, failed, replace(ITEM, layer="hardware")], [], 1.0)
    assert report.exit_code == 1 and report.summary == {"ok": 2, "fail": 1}
    assert [item.layer for item in report.items] == ["hardware", "system", "system"]


def test_the_schema_refuses_another_layer_a_missing_and_an_unknown_field():
    content = report_json(make_report([ITEM], [], 1.0))
    jsonschema.validate(json.loads(json.dumps(content)), report_schema())
    for change in ({"layer": "cloud"}, {"result": "good"}, {"seconds": "fast"}, {"extra": 1}):
        wrong = json.loads(json.dumps(content))
        wrong["items"][0] |= change
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, report_schema())
    del content["rules"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(json.dumps(content)), report_schema())


def test_a_report_that_breaks_the_schema_is_not_printed():
    report = make_report([replace(ITEM, seconds=float("nan"))], [], 1.0)
    with pytest.raises(HyperionError, match="seconds"):
        report_json(report)


def test_every_device_is_tested_and_every_layer_has_components():
    node = components(facts(gpus=tuple(gpu("MI250X") for _ in range(3))), numerics=True, floors=True)
    devices = [component for component in node if component.name.startswith("cuda:")]
    assert [component.name[:6] for component in devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert all(set(component.tests) == set(LEVELS) for component in devices)
    assert {component.layer for component in node} == set(LAYERS)
    names = {component.name for component in node}
    documented = "PyTorch, ONNX Runtime, MIGraphX, Megatron-LM, Flash Attention, NCCL or RCCL, MPI, Triton, bitsandbytes, vLLM"
    assert {*documented.split(", "), "ROCm SMI", "PyTorch Profiler", "Weights & Biases"} <= names
    assert any(component.name == "gloo" for component in components(collect_facts()))


def test_a_package_without_a_test_of_results_says_so():
    untested = {c.name for c in components(collect_facts()) if "imported only" in c.untested.get("correctness", "")}
    assert untested == {"MIGraphX", "Megatron-LM", "vLLM", "DeepSpeed", "Flash Attention", "Weights & Biases"}


def test_the_table_has_one_line_for_each_component():
    table = report_table(make_report([ITEM, replace(ITEM, level="correctness"), replace(ITEM, level="floor")], [], 1.0))
    assert table.row_count == 1


@pytest.mark.process
@pytest.mark.slow
def test_the_whole_report_of_this_machine_follows_its_schema(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("RuntimeError: The server socket has failed to listen: EADDRINUSE\n")
    # Half a minute on two idle cores; tests of other files use the cores too.
    command = [sys.executable, "-m", "hyperion", "doctor", "--json", "--log", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    report = json.loads(done.stdout)
    jsonschema.validate(report, report_schema())
    assert done.returncode == report["exit_code"]
    items = {(item["component"], item["level"]): item for item in report["items"]}
    assert len(items) == len(report["items"]) and len(report["items"]) % len(LEVELS) == 0
    for name in ("PyTorch", "transformers", "peft", "attention", "gloo", "PyTorch Profiler"):
        assert items[name, "correctness"]["result"] == "ok", items[name, "correctness"]
    assert [rule["id"] for rule in report["rules"]] == [rule.id for rule in rules()]
    results = {rule["id"]: rule for rule in report["rules"]}
    assert results["log_port_in_use"]["result"] == "warn" and results["log_killed"]["result"] == "ok"
