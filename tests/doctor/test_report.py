"""The report of the doctor: its schema, its exit code, the isolation of its tests, and one real run with everything in it."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from typer.testing import CliRunner

from hyperion.cli import app
from hyperion.doctor.checks import CheckResult
from hyperion.doctor.components import Check, Component, components, run_components
from hyperion.doctor.report import LAYERS, LEVELS, Item, make_report, report_json, report_schema, report_table
from hyperion.doctor.rules import rules
from hyperion.doctor.state import State
from hyperion.errors import HyperionError
from hyperion.hardware import collect_facts
from hyperion.hardware.facts import TRITON_PACKAGES
from hyperion.install.plan import Build
from hyperion.processes.isolated import IsolatedError, IsolatedProcess
from tests.hardware.machines import facts, gpu
from tests.processes.waiting import wait_for

# Rules that are newer than docs/doctor-h100x2.json.
NEWER_RULES = {"harmful_variables"}
ITEM = Item("system", "python", "import", True, "3.12", "version", "ok", "Python 3.12", "", 0.1)


def fine() -> CheckResult:
    return CheckResult("fine", "ok", "as expected", version="1.0")


def absent() -> CheckResult:
    return CheckResult("absent", "absent", "not installed", found=False)


def broken() -> CheckResult:
    raise KeyError("libamd_smi.so")


def crash() -> CheckResult:
    raise IsolatedError("the process crashed")


class SameProcess(IsolatedProcess):
    """Run the tests in this process."""

    def start(self) -> None:
        pass

    def run(self, function):
        return function()


def test_a_failure_stops_no_other_test_and_every_level_has_an_item(monkeypatch):
    monkeypatch.setattr("hyperion.doctor.components.IsolatedProcess", SameProcess)
    optional = Component("model", "optional", {"import": Check("import m", absent), "correctness": Check("by value", fine)})
    tests = {"crash": crash, "broken": broken, "fine": fine}
    made = [optional, *(Component("framework", name, {"import": Check("a test", run)}) for name, run in tests.items())]
    items = run_components(made)
    assert [(item.component, item.level) for item in items] == [(one.name, level) for one in made for level in LEVELS]
    by_name = {item.component: item for item in items if item.level == "import"}
    assert (by_name["crash"].result, by_name["crash"].evidence) == ("fail", "the process crashed")
    assert by_name["broken"].result == "fail" and "KeyError: 'libamd_smi.so'" in by_name["broken"].evidence
    assert (by_name["fine"].result, by_name["fine"].version, by_name["fine"].tested) == ("ok", "1.0", "a test")
    untested = [item for item in items if item.component == "optional"]
    assert [(item.result, item.found) for item in untested] == [("absent", False), ("skip", False), ("skip", False)]
    assert all(item.evidence and not item.tested for item in untested)
    assert "the level import is 'absent'" in untested[1].evidence


@pytest.mark.parametrize("workers", [1, 2])
def test_what_depends_on_a_failure_is_skipped_and_names_it_and_the_rest_runs(monkeypatch, workers):
    monkeypatch.setattr("hyperion.doctor.components.IsolatedProcess", SameProcess)
    order = []

    def part(layer, name: str, *needs: str, level="import", run=fine) -> Component:
        return Component(layer, name, {level: Check("a test", lambda: (order.append(name), run())[1])}, {}, needs)

    made = [
        part("extension", "profiler", "torch"),
        part("communication", "nccl", "torch", "gpu"),
        part("communication", "mpi", "absent from the list"),
        part("model", "peft", "transformers"),
        part("model", "transformers", "torch"),
        part("framework", "torch", "driver", run=broken),
        part("system", "driver", level="floor", run=broken),
        part("hardware", "gpu"),
    ]
    items = run_components(made, workers)
    results = {item.component: item for item in items if item.level == ("floor" if item.component == "driver" else "import")}
    assert {name for name, item in results.items() if item.result == "skip"} == {"profiler", "nccl", "peft", "transformers"}
    for name in ("profiler", "nccl", "peft", "transformers"):
        assert (
            results[name].evidence == "not run, because torch (framework) failed at the level import" and not results[name].found
        )
    assert sorted(order) == ["driver", "gpu", "mpi", "torch"] and order.index("driver") < order.index("torch")
    assert [item.component for item in items] == [one.name for one in made for _ in LEVELS]


def test_a_component_starts_after_all_that_it_needs_have_ended(monkeypatch):
    monkeypatch.setattr("hyperion.doctor.components.IsolatedProcess", SameProcess)
    other_ended, ended = threading.Event(), []

    def slow() -> CheckResult:
        assert other_ended.wait(60)
        ended.append("torch")
        return fine()

    def other() -> CheckResult:
        ended.append("disk")
        other_ended.set()
        return fine()

    def dependent() -> CheckResult:
        ended.append("nccl")
        return fine()

    tests = {"torch": slow, "disk": other, "nccl": dependent}
    needs = {"nccl": ("torch", "disk")}
    made = [
        Component("framework", name, {"import": Check("a test", run)}, {}, needs.get(name, ())) for name, run in tests.items()
    ]
    run_components(made, workers=3)
    assert ended == ["disk", "torch", "nccl"]


@pytest.mark.process
@pytest.mark.slow
def test_ctrl_c_ends_the_running_test_and_starts_no_other(tmp_path):
    # A shell that started the tests in the background has made them ignore SIGINT.
    code = f"""
import functools, signal, sys
from hyperion.doctor.components import Check, Component, run_components
from tests.doctor.hanging import begin_and_hang, leave_a_file
signal.signal(signal.SIGINT, signal.default_int_handler)
tests = {{"first": begin_and_hang, "second": leave_a_file}}
checks = {{name: Check("a test", functools.partial(run, {str(tmp_path)!r})) for name, run in tests.items()}}
made = [Component("model", name, {{"import": check}}) for name, check in checks.items()]
try:
    run_components(made, workers=1)
except KeyboardInterrupt:
    sys.exit(130)
"""
    root = Path(__file__).parents[2]
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert wait_for(lambda: caller.poll() is not None or (tmp_path / "began").exists())
    os.killpg(caller.pid, signal.SIGINT)
    assert caller.communicate(timeout=180) == (None, "") and caller.returncode == 130
    assert [file.name for file in tmp_path.iterdir()] == ["began"]


def test_components_that_need_each_other_are_refused(monkeypatch):
    monkeypatch.setattr("hyperion.doctor.components.IsolatedProcess", SameProcess)
    made = [Component("model", one, {"import": Check("a test", fine)}, {}, (other,)) for one, other in ("ab", "ba")]
    with pytest.raises(ValueError, match="a, b"):
        run_components(made)


def test_every_need_of_a_component_is_a_component_of_the_same_or_an_earlier_layer():
    for machine in (facts(gpus=(gpu("H200"), gpu("H200"))), collect_facts()):
        made = components(machine)
        layer_of = {component.name: LAYERS.index(component.layer) for component in made}
        needs = {component.name: component.needs for component in made}
        assert all(layer_of[need] <= layer_of[name] for name in needs for need in needs[name])
        assert "PyTorch" in needs["attention"] and "python" in needs["PyTorch"]
    assert {"transformers", "PyTorch"} <= set(needs["peft"])


def test_versions_that_the_machine_reports_are_in_the_report(monkeypatch):
    monkeypatch.setattr("hyperion.doctor.components.IsolatedProcess", SameProcess)
    node = components(facts(gpus=(gpu("H200"),), torch="2.13.0", driver="nvidia 580.1", collectives="nccl 2.27.5"))
    versions = {component.name: component.version for component in node}
    assert versions["NCCL or RCCL"] == "nccl 2.27.5" and versions["attention"] == versions["PyTorch Profiler"] == "2.13.0"
    for name in ("driver and devices", "NVML"):
        (check,) = next(component for component in node if component.name == name).tests.values()
        assert list(check.run.keywords.values()) == ["nvidia 580.1"]
    quiet = [
        Component("model", "attention", {"correctness": Check("a test", lambda: CheckResult("x", "ok", "fine"))}, version="2")
    ]
    assert {item.version for item in run_components(quiet)} == {"2"}


def test_a_cpu_machine_has_neither_a_driver_nor_peer_copies(monkeypatch):
    monkeypatch.setattr("hyperion.doctor.components.IsolatedProcess", SameProcess)
    monkeypatch.setattr("hyperion.doctor.checks.installed_build", lambda: Build("2.13.0+cpu"))
    chosen = [one for one in components(facts()) if one.name in ("driver and devices", "peer copies")]
    assert [(item.found, item.result) for item in run_components(chosen)] == [(False, "skip")] * 6


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
    of_item = ({"layer": "cloud"}, {"result": "good"}, {"seconds": "fast"}, {"extra": 1}, {"seconds": -1}, {"evidence": ""})
    for change in (*of_item, {"result": "ok", "tested": ""}):
        wrong = json.loads(json.dumps(content))
        wrong["items"][0] |= change
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, report_schema())
    of_report = ({"exit_code": 99}, {"schema_version": 77}, {"seconds": -1}, {"items": []})
    for change in (*of_report, {"summary": {"ok": -3}}, {"summary": {"banana": 3}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(json.dumps(content)) | change, report_schema())
    del content["rules"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(json.dumps(content)), report_schema())


def test_the_stored_report_of_two_gpus_follows_the_schema():
    file = Path(__file__).parents[2] / "docs" / "doctor-h100x2.json"
    content = json.loads(file.read_text("utf-8"))
    jsonschema.validate(content, report_schema())
    floors = [item for item in content["items"] if item["level"] == "floor" and item["result"] != "skip"]
    assert [(item["component"][:6], item["result"]) for item in floors] == [("cuda:0", "ok"), ("cuda:1", "ok")]
    assert content["exit_code"] == 0 and content["seconds"] < 60


def test_the_stored_report_of_two_gpus_lacks_only_the_rules_that_are_newer():
    """The report is evidence of another machine. A new rule has no result there until a new report is made on such a machine."""
    file = Path(__file__).parents[2] / "docs" / "doctor-h100x2.json"
    stored = {rule["id"] for rule in json.loads(file.read_text("utf-8"))["rules"]}
    current = {rule.id for rule in rules()}
    assert stored - current == set(), "the stored report has results of rules that no longer exist"
    assert current - stored == NEWER_RULES, "the rules without a result in the stored report are not those of the list"


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


@pytest.mark.parametrize("package", TRITON_PACKAGES)
def test_triton_is_found_in_each_of_the_packages_that_torch_requires(package, monkeypatch):
    monkeypatch.setattr("hyperion.doctor.probes.package_version", lambda name: "3.7.1" if name == package else None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    test = next(one for one in components(facts()) if one.name == "Triton").tests["import"].run
    assert (test().status, test().version) == ("ok", "3.7.1")
    monkeypatch.setattr("hyperion.hardware.facts.importlib.metadata.version", lambda name: "3.7.1")
    assert package in collect_facts().packages


def test_a_package_without_a_test_of_results_says_so():
    untested = {c.name for c in components(collect_facts()) if "imported only" in c.untested.get("correctness", "")}
    assert untested == {"MIGraphX", "Megatron-LM", "vLLM", "DeepSpeed", "Flash Attention", "Weights & Biases"}


def test_the_table_has_one_line_for_each_component():
    table = report_table(make_report([ITEM, replace(ITEM, level="correctness"), replace(ITEM, level="floor")], [], 1.0))
    assert table.row_count == 1


@pytest.mark.process
@pytest.mark.slow
def test_the_components_of_this_machine_are_exercised_and_the_report_follows_its_schema(monkeypatch, tmp_path):
    # Other tests start the kernel and the ranks. One worker, so that torch is imported once.
    chosen = [one for one in components(collect_facts()) if one.name not in ("notebook kernel", "gloo", "NCCL or RCCL")]
    items = run_components(chosen, workers=1)
    monkeypatch.setattr("hyperion.doctor.components.check_components", lambda *options: items)
    (tmp_path / "train.log").write_text("RuntimeError: The server socket has failed to listen: EADDRINUSE\n")
    done = CliRunner().invoke(app, ["doctor", "--json", "--log", str(tmp_path / "train.log")])
    report = json.loads(done.stdout)
    jsonschema.validate(report, report_schema())
    assert done.exit_code == report["exit_code"]
    results = {(item["component"], item["level"]): item for item in report["items"]}
    assert len(results) == len(report["items"]) == len(chosen) * len(LEVELS)
    for name in ("PyTorch", "torchvision", "transformers", "peft", "attention", "PyTorch Profiler"):
        assert results[name, "correctness"]["result"] == "ok", results[name, "correctness"]
    assert [rule["id"] for rule in report["rules"]] == [rule.id for rule in rules()]
    found = {rule["id"]: rule["result"] for rule in report["rules"]}
    assert (found["log_port_in_use"], found["log_killed"]) == ("warn", "ok")


def test_the_command_prints_findings_with_remedies_and_one_line_for_skipped_tests(monkeypatch):
    levels = [ITEM, *(replace(ITEM, level=level, result="skip", tested="", evidence="no test") for level in LEVELS[1:])]
    failed = [replace(item, component="driver", result="fail", evidence="too old", remedy="update it") for item in levels[:1]]
    made = [*levels, *failed, *(replace(item, component="driver") for item in levels[1:])]
    monkeypatch.setattr("hyperion.doctor.components.check_components", lambda *options: made)
    monkeypatch.setattr("hyperion.doctor.rules.apply_rules", lambda state: [])
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1 and "driver (import): too old\n       next:  update it" in done.output
    assert "driver (correctness), driver (floor)" in done.output and "6 items and 0 rules" in done.output


@pytest.mark.parametrize(
    "option", [["--numerics"], ["--floors"], ["--harness"], ["--comparison"], ["--preflight", "megatron"], ["--fit", "step.py"]]
)
def test_a_log_that_an_option_does_not_read_is_refused(option):
    done = CliRunner().invoke(app, ["doctor", *option, "--log", "train.log"])
    assert isinstance(done.exception, HyperionError)
    assert option[0] in done.exception.what and f"without {option[0]}" in str(done.exception.next_step)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json", "--fit", "step.py"], "--fit prints no JSON"),
        (["--json", "--harness"], "--harness prints no JSON"),
        (["--numerics", "--floors"], "--numerics and --floors are given together"),
        (["--preflight", "training", "--json", "--fit", "step.py"], "--preflight and --fit are given together"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, says):
    done = CliRunner().invoke(app, ["doctor", *options])
    assert isinstance(done.exception, HyperionError) and done.exception.what == says


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("def step(batch):\n    raise ValueError('mine')\n", ":2", "ValueError: mine"),
        ("\n\nimport no_such_module\n", ":3", "ModuleNotFoundError"),
        ("def step(:\n", "", "SyntaxError"),
        ("import sys\ndef step(batch):\n    sys.exit(0)\n", ":3", "SystemExit: 0"),
    ],
)
def test_a_program_that_fails_for_another_reason_than_memory_is_named_with_its_line(tmp_path, text, line, says):
    (tmp_path / "step.py").write_text(text)
    done = CliRunner().invoke(app, ["doctor", "--fit", str(tmp_path / "step.py")])
    assert isinstance(done.exception, HyperionError) and says in done.exception.what
    assert str(done.exception.where) == f"{tmp_path / 'step.py'}{line}"


def test_preflight_and_fit_end_with_their_exit_codes(monkeypatch, tmp_path):
    monkeypatch.setattr("hyperion.doctor.state.read_state", lambda: State(memory_gib=4.0))
    done = CliRunner().invoke(app, ["doctor", "--preflight", "inference", "--json"])
    needs = {need["what"]: need for need in json.loads(done.stdout)}
    assert done.exit_code == 1 and needs["host memory"]["result"] == "fail" and needs["disk of the results"]["result"] == "skip"
    assert "host memory: found 4.2 GiB, needed 8 GiB" in CliRunner().invoke(app, ["doctor", "--preflight", "inference"]).output
    (tmp_path / "step.py").write_text("def step(batch):\n    if batch > 6: raise MemoryError\n")
    done = CliRunner().invoke(app, ["doctor", "--fit", str(tmp_path / "step.py")])
    assert done.exit_code == 0 and "the largest batch that fits: 6 (" in done.output
    (tmp_path / "step.py").write_text("def step(batch):\n    pass\n")
    done = CliRunner().invoke(app, ["doctor", "--fit", str(tmp_path / "step.py")])
    assert "the largest batch that fits: 65536 or more, which were not tried" in done.output


def test_without_a_gpu_its_libraries_are_skipped_and_said_to_need_one():
    names = {component.name: component for component in components(replace(collect_facts(), gpus=()))}
    for name in ("NCCL or RCCL", "NVML or ROCm SMI"):
        items = run_components([names[name]])
        assert [(item.result, item.found) for item in items] == [("skip", False)] * len(LEVELS)
        assert all("needs a GPU" in item.evidence for item in items)
    assert {"gloo", "CPU telemetry"} <= set(names)
