"""The commands and the scripts as a user runs them: options, exit codes, and files."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from hyperion.cli import main
from hyperion.commands.frameworks import app
from hyperion.engines import STACKS
from hyperion.errors import HyperionError
from hyperion.frameworks import capabilities
from hyperion.frameworks import config as configs
from hyperion.frameworks.config import GPU_COUNTS, MEGATRON_DEEPSPEED, OUTPUT, PRIMUS
from hyperion.frameworks.progress import EVENTS, read_events
from hyperion.frameworks.result import read_result, write_result
from hyperion.locks import file_lock
from tests.frameworks.results import result

FOLDER = Path(__file__).resolve().parents[2] / "phase2_development/frameworks"
CODES = ("nemo", "tran", "deep", "fsdp", "mgds", "prim")
PYTHON = ("train_all_fsdp.py", "train_all_mgds.py", "compare.py")
LOGS = Path(__file__).parent / "logs"
pytestmark = pytest.mark.slow
VARIABLES = ("FRAMEWORKS", OUTPUT, PRIMUS, MEGATRON_DEEPSPEED, *GPU_COUNTS.values())


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))


def command(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def script(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    interpreter = ["bash"] if name.endswith(".sh") else [sys.executable]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": sys.executable}
    words = [*interpreter, str(FOLDER / name), *arguments]
    return subprocess.run(words, env=environment | variables, cwd="/", capture_output=True, text=True, timeout=300)


def test_a_dry_run_writes_nothing_and_states_the_plan(tmp_path):
    out = tmp_path / "out"
    done = command("run", "--platform", "amd", "--model", "tiny", "--steps", "3", "--dry-run", "--json", "--output-dir", str(out))
    plans = json.loads(done.output)
    assert done.exit_code == 0 and len(plans) == 12 and not out.exists()
    assert {plan["framework"] for plan in plans} == set(CODES) and {plan["work"]["steps"] for plan in plans} == {3}


def test_frameworks_and_its_precedence(monkeypatch):
    monkeypatch.setenv("FRAMEWORKS", "transformers,fsdp")
    arguments = ("run", "--model", "llama", "--model", "tiny", "--dry-run", "--json")
    assert [plan["framework"] for plan in json.loads(command(*arguments).output)] == ["tran", "fsdp"]
    assert [plan["framework"] for plan in json.loads(command(*arguments, "--frameworks", "deepspeed").output)] == ["deep"]
    monkeypatch.setenv("FRAMEWORKS", "foo")
    with pytest.raises(HyperionError, match="'foo'"):
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_an_unknown_preset_and_too_many_steps_are_refused():
    with pytest.raises(HyperionError, match="there is no preset 'fastest'") as error:
        CliRunner().invoke(app, ["run", "--preset", "fastest", "--dry-run"], catch_exceptions=False)
    assert error.value.where == "--preset" and "balanced" in (error.value.next_step or "")
    assert command("run", "--dry-run", "--steps", "1000001").exit_code == 2


def test_list_names_the_combinations_and_why_one_is_unavailable():
    done = command("run", "--list", "--frameworks", "tran,prim", "--model", "tiny")
    assert done.exit_code == 0 and "train_cpu_tran_qwen_tiny.json" in done.output.replace("nvd", "cpu")
    assert "prim: unavailable: " in done.output


def test_the_command_of_a_framework_that_needs_no_folder_is_shown_without_one():
    assert "nemo llama runs: " in command("run", "--frameworks", "nemo", "--model", "llama", "--dry-run").output


def test_a_full_model_without_a_gpu_is_unavailable(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = command("run", "--platform", "amd", "--frameworks", "tran", "--model", "llama", "--output-dir", str(tmp_path / "out"))
    assert done.exit_code == 3 and "needs a GPU of platform amd" in done.output and not (tmp_path / "out").exists()


def test_compare_writes_the_files_that_the_configuration_names(tmp_path):
    write_result(result(), tmp_path)
    write_result(result(1.0, framework="deep"), tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text("comparison: {plot: p.png, report: r.md, dpi: 60}")
    done = command("compare", "--results-dir", str(tmp_path), "--config", str(config))
    assert done.exit_code == 0, done.output
    assert "amd tran llama is 2.0" in done.output and (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "![Throughput, losses, learning rates and step times](p.png)" in (tmp_path / "r.md").read_text()
    done = command("compare", "--results-dir", str(tmp_path), "--frameworks", "deepspeed", "--output", str(tmp_path / "b/c.png"))
    assert "FRAMEWORKS=" not in command("compare", "--help").output  # it selects what is trained, not what is compared
    assert done.exit_code == 0 and (tmp_path / "b/c.png").is_file() and (tmp_path / "b/comparison_report.md").is_file()
    for name in ("c.pdf", "comparison_report.md"):  # the report would replace a picture of this name
        done = command("compare", "--results-dir", str(tmp_path), "--output", str(tmp_path / name))
        assert isinstance(done.exception, HyperionError) and "does not end in .png" in str(done.exception)


def test_compare_shows_the_price_of_tokens_only_if_the_user_states_prices(tmp_path):
    write_result(result(), tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text("comparison: {price_per_gpu_hour: {amd: 2.0}, price_source: a quote}")
    for arguments, said in ((["--config", str(config)], "amd 2 (a quote)."), (["--price", "amd=4"], "amd 4 (--price).")):
        done = command("compare", "--results-dir", str(tmp_path), *arguments)
        assert done.exit_code == 0 and "price of 1M" in done.output and said in done.output
        assert said in (tmp_path / "comparison_report.md").read_text()
    done = command("compare", "--results-dir", str(tmp_path))
    assert done.exit_code == 0 and "price of" not in done.output + (tmp_path / "comparison_report.md").read_text()


def test_extract_validate_and_migrate(tmp_path):
    options = ["--framework", "prim", "--platform", "amd", "--model", "llama", "--num-gpus", "8", "--sequence-length", "2048"]
    done = command("extract", str(LOGS / "primus.log"), *options, "--output-dir", str(tmp_path))
    assert done.exit_code == 2 and "--micro-batch-size" in done.output and not list(tmp_path.iterdir())
    options += ["--micro-batch-size", "2"]
    done = command("extract", str(LOGS / "primus.log"), *options, "--output-dir", str(tmp_path))
    unstated = read_result(tmp_path / "train_amd_prim_llama_unknown_unknown.json")
    assert done.exit_code == 0 and (unstated.dataset, unstated.precision) == ("unknown", "unknown")
    options += ["--dataset", "mock", "--precision", "bf16"]
    done = command("extract", str(LOGS / "primus.log"), *options, "--output-dir", str(tmp_path))
    file = tmp_path / "train_amd_prim_llama_mock.json"
    assert done.exit_code == 0 and file.is_file()
    assert command("extract", str(LOGS / "primus.log"), *options, "--output-dir", str(tmp_path)).exit_code == 0
    written = file.read_bytes()
    done = command("extract", str(LOGS / "primus.log"), *options, "--strategy", "other", "--output-dir", str(tmp_path))
    assert done.exit_code and "exists with other content" in str(done.exception)
    assert file.read_bytes() == written
    assert command("validate", str(file)).exit_code == 0
    content = json.loads(file.read_text())
    content["loss_values"].pop()
    file.write_text(json.dumps(content))
    done = command("validate", str(file))
    assert done.exit_code == 1 and "loss_values has 2 values" in done.output
    old = tmp_path / "train_amd_tran_qwen.json"
    content = json.loads((LOGS.parent / "older.json").read_text())
    old.write_text(json.dumps(content))
    done = command("validate", "--migrate", str(old), "--set", "precision=bf16", "--output-dir", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    assert command("validate", *map(str, (tmp_path / "new").glob("*.json"))).exit_code == 0
    done = command("validate", "--migrate", str(old), "--set", "dataset=x/../../pwned", "--output-dir", str(tmp_path / "new"))
    assert done.exit_code == 1 and "dataset must consist of" in done.output and not list(tmp_path.rglob("*pwned*"))
    done = command("validate", str(file), "--set", "precision=bf16")
    assert "do nothing without --migrate" in str(done.exception)
    with pytest.raises(HyperionError, match="sets nothing"):
        CliRunner().invoke(app, ["validate", "--migrate", str(old), "--set", "color=red"], catch_exceptions=False)


def test_the_docker_line(monkeypatch, tmp_path):
    monkeypatch.setenv("FRAMEWORKS", "tran,deep")
    done = command("docker", "--dry-run", "--steps", "3", "--model", "tiny")
    assert done.exit_code == 0 and done.output.startswith("docker run --rm ")
    assert "--device=/dev/kfd" in done.output and "--env=FRAMEWORKS=tran,deep" in done.output
    assert done.output.endswith("rocm/primus:v25.11 bash phase2_development/frameworks/train_amd.sh --steps 3 --model tiny\n")
    config = tmp_path / "config.yaml"
    config.write_text(f"paths: {{output_dir: {tmp_path}/out}}")
    monkeypatch.setenv(PRIMUS, str(tmp_path))
    monkeypatch.setenv("HSA_ENABLE_SDMA", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    words = command("docker", "--dry-run", "--config", str(config), "--steps", "3").output.split()
    expected = [f"--env={PRIMUS}={tmp_path}", f"--env={OUTPUT}={tmp_path}/out", "--env=HSA_ENABLE_SDMA=0"]
    expected += [f"--volume={tmp_path}:{tmp_path}", f"--volume={tmp_path}/out:{tmp_path}/out", f"--volume={config}:{config}:ro"]
    assert {*expected, "--env=HIP_VISIBLE_DEVICES=1"} <= set(words) and words[-3:] == [f"--config={config}", "--steps", "3"]
    with pytest.raises(HyperionError, match="--output-dir cannot be passed"):
        CliRunner().invoke(app, ["docker", "--dry-run", "--output-dir=/out"], catch_exceptions=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HyperionError, match="docker is not installed"):
        CliRunner().invoke(app, ["docker"], catch_exceptions=False)


def test_the_capability_matrix_has_no_adjectives(tmp_path):
    write_result(result(), tmp_path)
    done = command("capabilities", "--results-dir", str(tmp_path))
    assert done.exit_code == 0, done.output
    table = {line.split("│")[1].strip(): line for line in done.output.splitlines() if line.startswith("│")}
    cells = [cell.strip() for cell in table["tran"].split("│")[1:-1]]
    assert cells[:4] == ["tran", "yes", "amd, nvd", "ran"] and cells[-2:] == ["32,785 (amd", "100.00"]
    assert "llama)" in done.output  # the next line of the cell
    assert {cell.strip() for cell in table["prim"].split("│")[4:8]} <= {"?", "-"}


def test_a_capability_ran_only_if_a_result_shows_it(tmp_path, monkeypatch):
    monkeypatch.setattr(capabilities, "_probe", lambda python, sources, wanted: dict.fromkeys(wanted, True))

    def cells_of(code: str) -> dict[str, str]:
        headings, rows = capabilities.capability_rows(configs.Config(), tmp_path)
        (row,) = [row for row in rows if row[0] == code]
        return dict(zip(headings, row, strict=True))

    assert cells_of("fsdp") | {"data parallel": "yes", "sharded state": "yes", "tensor parallel": "-"} == cells_of("fsdp")
    one_rank: dict = {"num_gpus": 1, "gradient_accumulation_steps": 64, "parallel_strategy": "hyperion fsdp2"}
    file = write_result(result(framework="fsdp", **one_rank), tmp_path)
    assert cells_of("fsdp")["sharded state"] == "yes"  # one rank divides nothing
    write_result(result(framework="fsdp", parallel_strategy="hyperion fsdp2"), tmp_path, file)
    assert {name for name, cell in cells_of("fsdp").items() if cell == "ran"} == {"data parallel", "sharded state"}
    divided = result(framework="mgds")
    division = replace(divided.parallelism_config, tensor_model_parallel_size=2, data_parallel_size=2)
    division = replace(division, pipeline_model_parallel_size=2, gradient_accumulation_steps=32)
    training = replace(divided.training_config, gradient_accumulation_steps=32)
    write_result(replace(divided, parallelism_config=division, training_config=training), tmp_path)
    ran = {name for name, cell in cells_of("mgds").items() if cell == "ran"}
    assert ran == {"data parallel", "tensor parallel", "pipeline parallel"}  # also if the framework is no longer installed


def documented() -> list[str]:
    single = [f"train_amd_{code}_{model}.sh" for code in CODES for model in ("llama", "qwen")]
    return ["train_amd.sh", "train_nvd.sh", "train_docker_amd.sh", *single, *PYTHON]


def test_the_folder_has_the_documented_files_and_their_scripts_have_no_logic():
    assert {path.name for path in FOLDER.iterdir()} - {"__pycache__"} == {*documented(), "config.yaml", "common.sh"}
    for name in documented():
        code = re.sub(r'"""[^"]*"""|#.*', "", (FOLDER / name).read_text())
        assert not re.search(r"\b(if|for|while|case|export|def)\b(?! __name__)", code), name
        assert name.endswith(".py") or os.access(FOLDER / name, os.X_OK)


# In place of Python: it prints its search path and its arguments, one a line.
RECORDER = """#!/bin/sh
[ "$1" = -c ] || printf '%s\\n' "$PYTHONPATH" "$@"
"""


@pytest.fixture
def called(tmp_path, monkeypatch, capsys):
    """A function that runs a script up to its call of Python, which it does in this process: (exit code, output, errors)."""
    recorder = tmp_path / "recorder"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)

    def call(name: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            if name.endswith(".py"):
                patch.setattr(sys, "path", sys.path[:])
                patch.setattr(sys, "argv", [str(FOLDER / name), *arguments])
                with pytest.raises(SystemExit) as end:
                    runpy.run_path(str(FOLDER / name), run_name="__main__")
                return end.value.code, *capsys.readouterr()
            done = script(name, *arguments, PYTHON=str(recorder))
            path, *words = done.stdout.splitlines()
            assert done.returncode == 0 and path == f"{FOLDER}/../.." and words[:2] == ["-m", "hyperion"], done
            patch.setattr(sys, "argv", ["hyperion", *words[2:]])
            return main(), *capsys.readouterr()

    return call


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in documented() if name != "compare.py"])
def test_each_script_states_its_plan_and_trains_nothing(name, called, tmp_path, monkeypatch):
    used = []
    read = configs.load_config
    monkeypatch.setattr(configs, "load_config", lambda path, *rest: used.append(path) or read(path, *rest))
    code, output, errors = called(
        name, *["--steps", "3", "--model", "tiny", "--dry-run"], CONFIG_OUTPUT_DIR=str(tmp_path / "out")
    )
    assert code == 0 and used == [FOLDER / "config.yaml"], errors
    assert not (tmp_path / "out").exists()
    if match := re.fullmatch(r"train_amd_(\w+)_(\w+)\.sh", name):
        assert match[1] in output and f"{match[2]}_tiny" in output
        assert not any(f" {code} " in output for code in CODES if code != match[1])


@pytest.mark.process
@pytest.mark.parametrize("code", ["nemo", "prim", "mgds"])
def test_the_script_of_an_unavailable_framework_ends_with_code_3_and_no_file(code, called, tmp_path):
    ended, output, _ = called(f"train_amd_{code}_llama.sh", CONFIG_OUTPUT_DIR=str(tmp_path / "out"))
    assert ended == 3 and "next step" in output and not (tmp_path / "out").exists()


@pytest.mark.process
def test_errors_of_scripts_name_the_place(called, tmp_path):
    code, _, errors = called("train_amd.sh", "--dry-run", PRIMUS_PATH=str(tmp_path / "absent"))
    assert code == 2 and "is not a folder" in errors and "PRIMUS_PATH" in errors
    code, _, errors = called("train_nvd.sh", FRAMEWORKS="tran,megatronn")
    assert code == 2 and "'megatronn'" in errors and "tran, deep, fsdp, nemo, prim, mgds" in errors
    code, _, errors = called("compare.py", "--results-dir", str(tmp_path))
    assert code == 2 and "no file train_*.json" in errors
    code, _, errors = called("train_all_fsdp.py", "lama", "--dry-run")
    assert code == 2 and "'lama'" in errors


@pytest.mark.process
def test_scripts_pass_on_the_exit_code_and_the_error(tmp_path):
    done = script("train_amd_prim_llama.sh", PRIMUS_PATH=str(tmp_path / "absent"))
    assert done.returncode == 2 and "is not a folder" in done.stderr
    done = script("compare.py", "--results-dir", str(tmp_path))
    assert done.returncode == 2 and "no file train_*.json" in done.stderr
    done = script("train_amd_prim_llama.sh", PYTHON="/bin/false")
    assert done.returncode == 2 and "lacks the packages of Hyperion" in done.stderr and "make setup" in done.stderr
    done = script("train_amd_prim_llama.sh", PYTHON=str(tmp_path / "absent"))
    assert done.returncode == 2 and f"PYTHON={tmp_path / 'absent'} is no program" in done.stderr


@pytest.mark.book
@pytest.mark.process
def test_train_amd_then_compare(called, tmp_path):
    variables = {"FRAMEWORKS": "fsdp2", "CONFIG_OUTPUT_DIR": str(tmp_path)}  # test_run.py trains with several
    code, output, errors = called("train_amd.sh", "--steps", "3", "--model", "llama", "--model", "tiny", **variables)
    assert code == 0, output + errors
    events = read_events(tmp_path / EVENTS)
    assert {event.event for event in events} == {"started", "progress", "trained"} and "step 1/3, loss " in output
    (file,) = tmp_path.glob("*.json")
    trained = read_result(file)
    assert file.name == "train_cpu_fsdp_llama_tiny.json" and trained.training_config.num_gpus == 2
    assert trained.loss_values[2] < trained.loss_values[0] and not list(tmp_path.glob(".work*"))
    write_result(replace(trained, framework="tran"), tmp_path)
    code, output, _ = called("compare.py", CONFIG_OUTPUT_DIR=str(tmp_path))
    assert code == 0 and "not ranked" in output and (tmp_path / "compare.png").is_file()


@pytest.mark.process
@pytest.mark.long
def test_a_framework_that_is_killed_midway_is_named_and_repeated_alone_and_the_results_are_compared(mirror, tmp_path):
    """On two ranks and real text: FSDP2 is killed, the Trainer and DeepSpeed finish, and a second call repeats FSDP2 only."""
    arguments = ("--model", "llama", "--model", "tiny", "--steps", "60", "--precision", "fp32")
    variables = {"FRAMEWORKS": "fsdp,tran,deepspeed", OUTPUT: str(tmp_path), "PYTHON": sys.executable}
    absent = STACKS["deepspeed zero-3"].why_absent()
    words = ["bash", str(FOLDER / "train_amd.sh"), *arguments]
    with subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        kill_a_rank_after_its_first_step(run.pid, tmp_path / EVENTS)
        output = run.communicate(timeout=300)[0]
    assert run.returncode == 1 and "1 of 3 combinations failed: fsdp llama_tiny" in output, output
    finished = {"tran"} if absent else {"tran", "deep"}
    assert {read_result(file).framework for file in tmp_path.glob("*.json")} == finished
    events = [(event.framework, event.event) for event in read_events(tmp_path / EVENTS) if event.event != "progress"]
    rest = [("deep", "unavailable")] if absent else [("deep", "started"), ("deep", "trained")]
    assert events == [("fsdp", "started"), ("fsdp", "failed"), ("tran", "started"), ("tran", "trained"), *rest]
    assert "SIGKILL" in next(event.reason for event in read_events(tmp_path / EVENTS) if event.event == "failed")

    done = script("train_amd.sh", *arguments, **variables)
    assert done.returncode == 0 and "no combination failed" in done.stdout, done.stdout + done.stderr
    again = [(event.framework, event.event) for event in read_events(tmp_path / EVENTS) if event.event != "progress"]
    assert again[len(events) :][:3] == [("fsdp", "started"), ("fsdp", "trained"), ("tran", "finished before")]
    results = {(one := read_result(file)).framework: one for file in tmp_path.glob("*.json")}
    assert set(results) == {"fsdp", *finished}
    for one in results.values():  # real packed tokens, on which the loss falls, in steps of 16 rows from two ranks
        assert one.dataset == "wikitext-2" and one.loss_values[-1] < one.loss_values[0] - 0.5
        assert (one.training_config.num_gpus, one.training_config.gradient_accumulation_steps) == (2, 4)
        assert one.loss_values == pytest.approx(results["fsdp"].loss_values, abs=1e-4)
        assert one.performance_metrics.tokens_per_second == pytest.approx(16 * 32 * 30 / sum(one.timed_s))
    done = script("compare.py", CONFIG_OUTPUT_DIR=str(tmp_path))
    assert done.returncode == 0 and len(re.findall(r"as fast as|tie:", done.stdout)) == len(results) - 1, done.stdout


def wait_for_the_first_step(events: Path) -> None:
    end_s = time.monotonic() + 120
    while not (events.is_file() and '"progress"' in events.read_text()):
        assert time.monotonic() < end_s, "no step was reported"
        time.sleep(0.05)


def kill_a_rank_after_its_first_step(runner: int, events: Path) -> None:
    """Send SIGKILL to a rank of the framework that a runner trains."""
    wait_for_the_first_step(events)
    children = psutil.Process(runner).children(recursive=True)
    ranks = [child for child in children if child.environ().get("LOCAL_RANK")]
    ranks[-1].kill()


@pytest.mark.process
@pytest.mark.long
def test_sigterm_ends_the_runner_and_not_only_the_framework_that_trains(tmp_path):
    """A batch system sends it. A folder that a killed runner left is removed, and one that another runner uses is not."""
    (tmp_path / ".work-of-a-dead-runner").mkdir()
    os.utime(tmp_path / ".work-of-a-dead-runner", (0, 0))
    (tmp_path / ".work-in-use").mkdir()
    words = [
        "bash",
        str(FOLDER / "train_amd.sh"),
        "--model",
        "llama",
        "--model",
        "qwen",
        "--model",
        "tiny",
        "--steps",
        "2000",
        "--dataset",
        "synthetic",
    ]
    variables = {"FRAMEWORKS": "tran", OUTPUT: str(tmp_path), "PYTHON": sys.executable}
    with (
        file_lock(tmp_path / ".work-in-use" / "lock"),
        subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run,
    ):
        wait_for_the_first_step(tmp_path / EVENTS)
        run.send_signal(signal.SIGTERM)
        output = run.communicate(timeout=60)[0]
    assert run.returncode == 143 and "stopped by SIGTERM: 2 of 2 combinations have no outcome" in output, output
    last = read_events(tmp_path / EVENTS)[-1]
    assert (last.framework, last.event, last.reason) == ("tran", "failed", "interrupted by SIGTERM")
    assert [path.name for path in tmp_path.glob(".work-*")] == [".work-in-use"] and not list(tmp_path.glob("*.json"))
