"""Programs that really fail here: the rules about logs find the causes in what these programs print."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hyperion.doctor.rules import apply_rules
from hyperion.doctor.state import read_state
from tests.doctor.test_rules import HEALTHY

pytestmark = [pytest.mark.slow, pytest.mark.process]

# For each rule: a program that fails for its cause, and changes of the environment. {} is an empty folder.
PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "log_out_of_memory": ("import torch; torch.empty(1 << 50, dtype=torch.uint8)", {}),
    "log_port_in_use": (
        """
import socket, torch.distributed
with socket.socket() as busy:
    busy.bind(("127.0.0.1", 0))
    busy.listen()
    torch.distributed.TCPStore("127.0.0.1", busy.getsockname()[1], 1, is_master=True)
""",
        {},
    ),
    "log_rendezvous": (
        """
import datetime, socket, torch.distributed
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=datetime.timedelta(seconds=2))
""",
        {},
    ),
    "log_compiler_missing": (
        "import torch; torch.compile(lambda x: x.sin() + x.cos())(torch.ones(8))",
        {"CXX": "/absent/g++", "TORCHINDUCTOR_CACHE_DIR": "{}"},
    ),
    "log_damaged_file": (
        """
import io, torch
file = io.BytesIO()
torch.save({"w": torch.ones(999)}, file)
torch.load(io.BytesIO(file.getvalue()[:900]))
""",
        {},
    ),
    "log_no_space": ("open('/dev/full', 'w').write('x' * 100_000)", {}),
    "log_open_files": (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); files = [open('/dev/null') for _ in range(30)]",
        {},
    ),
    # On a CPU build of torch, this fails because of the build, and otherwise because all GPUs are hidden.
    "log_no_device": ("import torch; torch.ones(1, device='cuda')", {"CUDA_VISIBLE_DEVICES": "9", "HIP_VISIBLE_DEVICES": "9"}),
    "log_module_missing": ("import absent_package", {}),
    "log_data_workers": ("import os, torch; torch.utils.data.DataLoader([0], num_workers=8 * (os.cpu_count() or 1))", {}),
    "log_ninja": ("import torch.utils.cpp_extension as e; e.load_inline('x', 'int f();', functions=['f'])", {"PATH": "{}"}),
    "log_onnx_provider": (
        """
import onnx, onnxruntime
x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["ROCMExecutionProvider", "CPUExecutionProvider"])
""",
        {},
    ),
}


# Imports torch, then runs each program in a fork of itself, because the import takes longer than the programs. The answer is the
# output of each program.
FORKS = """
import json, os, sys, tempfile, traceback
import torch
texts = {}
for rule, (program, variables) in json.load(sys.stdin).items():
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.environ.update(variables)
            try:
                exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)
        output.seek(0)
        texts[rule] = output.read().decode(errors="replace")
print(json.dumps(texts))
"""


def found_in(log: str) -> set[str]:
    """Return the rules that find a cause in a log, on a machine that is healthy otherwise."""
    return {one.id for one in apply_rules(replace(HEALTHY, log=log)) if one.result in ("warn", "fail")}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    """Output of each program."""
    programs = {
        rule: (program, {name: value.format(tmp_path_factory.mktemp(rule)) for name, value in variables.items()})
        for rule, (program, variables) in PROGRAMS.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKS], input=json.dumps(programs), capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("rule", PROGRAMS)
def test_the_cause_of_a_program_that_fails_here_is_found(rule, outputs):
    if rule == "log_onnx_provider" and not (find_spec("onnx") and find_spec("onnxruntime")):
        pytest.skip("onnx and onnxruntime are optional and not installed")
    assert found_in(outputs[rule]) == {rule}, outputs[rule]


def write_wheel(folder: Path, name: str, version: str, *lines: str) -> None:
    """Write a wheel that contains nothing but its metadata."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        metadata = "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines))
        wheel.writestr(f"{info}/METADATA", metadata + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("rule", "wheels", "wanted"),
    [
        (
            "log_package_conflict",
            [("aa", "1", "Requires-Dist: cc==1"), ("bb", "1", "Requires-Dist: cc==2"), ("cc", "1"), ("cc", "2")],
            ["aa", "bb"],
        ),
        ("log_python_unsupported", [("old", "1", "Requires-Python: <3.9,>=3.8")], ["old-1-py3-none-any.whl"]),
    ],
)
def test_the_cause_of_an_installation_that_fails_here_is_found(rule, wheels, wanted, tmp_path):
    for wheel in wheels:
        write_wheel(tmp_path, *wheel)
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path), "--target", "target", *wanted]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode and found_in(done.stdout + done.stderr) == {rule}, done.stderr


def fitted(tmp_path: Path, text: str) -> str:
    (tmp_path / "work.py").write_text(text)
    command = [sys.executable, "-m", "hyperion", "doctor", "--fit", str(tmp_path / "work.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_the_batch_that_fits_into_a_real_limit_of_memory_is_found(tmp_path):
    # The process may allocate 1 GiB more than it has. Each sample needs 64 MiB.
    program = """
import psutil, resource, torch
torch.ones(1)
limit = psutil.Process().memory_info().vms + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
def step(batch):
    torch.ones(batch << 24)
"""
    largest = int(fitted(tmp_path, program).split("fits: ")[1].split()[0])
    assert 12 <= largest <= 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_batch_that_fits_into_the_memory_of_a_gpu_is_found(tmp_path):
    # The process may use 2 GiB of the GPU. Each sample needs 64 MiB.
    program = """
import torch
torch.cuda.set_per_process_memory_fraction((2 << 30) / torch.cuda.mem_get_info()[1])
def step(batch):
    torch.ones(batch << 24, device="cuda")
"""
    largest = int(fitted(tmp_path, program).split("fits: ")[1].split()[0])
    assert 30 <= largest <= 32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpus_of_this_machine_that_a_variable_hides_are_named():
    name = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    program = "from hyperion.doctor.rules import apply_rules; from hyperion.doctor.state import read_state\n"
    program += "print(*(one.id for one in apply_rules(read_state()) if one.result in ('warn', 'fail')))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | {name: "99"}, capture_output=True, text=True, timeout=120, check=True)
    assert "masked_gpu" in done.stdout.split()
    assert "masked_gpu" not in {one.id for one in apply_rules(read_state()) if one.result in ("warn", "fail")}
