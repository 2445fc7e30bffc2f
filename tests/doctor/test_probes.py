"""Each probe finds a planted fault, and says why it tested nothing."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.doctor import probes
from hyperion.doctor.probes import package_version
from hyperion.engines.environments import environment_folder
from hyperion.hardware import Telemetry, detect_cpu


def wrong_bytes(tensor: torch.Tensor, target: str) -> torch.Tensor:
    return tensor if target == "cuda:0" else tensor.roll(1)


def mpi(lines: str, code: int = 0):
    return partial(
        probes.probe_mpi, lambda name: "/usr/bin/mpirun", lambda *_, **__: subprocess.CompletedProcess([], code, lines, "")
    )


def doubled_gradients(q, k, v, is_causal):
    output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return 2 * output - output.detach()


def torchvision(flips: bool):
    def normalize(image, mean, std):
        return (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    functional = SimpleNamespace(horizontal_flip=lambda image: image.flip(-1) if flips else image, normalize=normalize)
    return partial(probes.probe_torchvision, lambda: functional)


# For each probe: a call that must fail, and the same call without the fault.
CASES = {
    "training": (
        partial(probes.probe_training, optimizer=lambda weights, lr: torch.optim.SGD(weights, lr=1.01 * lr)),
        probes.probe_training,
    ),
    "attention": (
        partial(probes.probe_attention, attention=lambda q, k, v, is_causal: F.scaled_dot_product_attention(q, k, v)),
        probes.probe_attention,
    ),
    "gradients of attention": (partial(probes.probe_attention, attention=doubled_gradients), probes.probe_attention),
    "torchvision": (torchvision(flips=False), torchvision(flips=True)),
    "product without a number": (
        partial(probes.probe_product, "jax", lambda a, b: a @ b * np.float32("nan")),
        partial(probes.probe_product, "jax", lambda a, b: a @ b * np.float32(1 + 3e-4)),  # the error of TF32
    ),
    "product": (
        partial(probes.probe_product, "jax", lambda a, b: a @ b + np.float32(0.01)),
        partial(probes.probe_product, "jax", lambda a, b: a @ b),
    ),
    "peers": (partial(probes.probe_peers, 3, wrong_bytes), partial(probes.probe_peers, 3, lambda tensor, target: tensor)),
    "telemetry": (
        partial(probes.probe_telemetry, detect_cpu(), lambda device: Telemetry(power_w=1e6)),
        partial(probes.probe_telemetry, detect_cpu(), lambda device: Telemetry(power_w=300.0)),
    ),
    "mpi": (mpi("mpi 1 Open MPI\nmpi 1 Open MPI\n"), mpi("mpi 2 Open MPI\nmpi 2 Open MPI\n")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found_and_the_clean_twin_passes(name, monkeypatch):
    monkeypatch.setattr(probes, "package_version", lambda package: "4.0")
    faulty, clean = (call() for call in CASES[name])
    assert faulty.status == "fail" and faulty.evidence and faulty.remedy
    assert clean.status == "ok", clean.evidence


class OnDevice(np.ndarray):
    device = "gpu:0"


def test_a_product_names_the_device_that_computed_it():
    """On a machine with a GPU, a build for CPUs passes the product, too."""
    result = probes.probe_product("jax", lambda a, b: (a @ b).view(OnDevice))
    assert result.status == "ok" and "on gpu:0 against float64" in result.evidence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_the_product_of_an_installed_framework(name):
    pytest.importorskip(name, reason=f"{name} is optional and not installed")
    result = probes.probe_product(name)
    assert result.status == "ok" and "unknown device" not in result.evidence, result.evidence


@pytest.mark.process
@pytest.mark.slow
def test_two_ranks_compare_every_value(standing_ranks, monkeypatch):
    monkeypatch.setattr(probes, "run_ranks", standing_ranks.run)
    result = probes.probe_collectives(2, "gloo")
    assert result.status == "ok", result.evidence


def test_gpus_copy_in_both_directions():
    assert probes.probe_peers(3, lambda tensor, target: tensor).evidence.startswith("6 directions")


def test_a_rank_with_wrong_values_is_named(monkeypatch):
    right = {"right": True, "backend": "gloo"}
    monkeypatch.setattr(probes, "run_ranks", lambda job, on_line: [right, right | {"right": False}])
    result = probes.probe_collectives(2, "gloo")
    assert result.status == "fail" and "on rank 1" in result.evidence
    result = probes.probe_collectives(2, "nccl")  # both ranks used gloo
    assert result.status == "fail" and "on rank 0, 1" in result.evidence


def test_a_product_that_the_trace_lacks_is_missed(monkeypatch):
    assert probes.probe_profiler().status == "ok"
    empty = '{"traceEvents": []}'
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(path).write_text(empty))
    result = probes.probe_profiler()
    assert result.status == "fail" and "3 in the table, 0 in the trace" in result.evidence


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return F.one_hot(tokens, 32).float()


def model_of(logits):
    return lambda tokens: SimpleNamespace(logits=logits(tokens))


@pytest.mark.parametrize(
    ("logits", "status"),
    [
        (lambda tokens: one_hot(tokens).cumsum(1), "ok"),
        (lambda tokens: one_hot(tokens) + one_hot(tokens).sum(1, keepdim=True), "fail"),  # sees later tokens
        (lambda tokens: torch.ones(*tokens.shape, 32), "fail"),  # sees no token
    ],
)
def test_a_language_model_must_see_the_last_token_and_no_later_one(monkeypatch, logits, status):
    monkeypatch.setattr(probes, "_tiny_llama", lambda: model_of(logits))
    assert probes.probe_transformers().status == status


@pytest.mark.parametrize(("adapter", "merged", "status"), [(0.5, 0.5, "ok"), (0.5, 0.4, "fail"), (0.0, 0.0, "fail")])
def test_an_adapter_must_change_the_logits_and_merging_must_not(monkeypatch, adapter, merged, status):
    def adapted(base, config):
        model = model_of(lambda tokens: one_hot(tokens) + adapter)
        model.merge_and_unload = lambda: model_of(lambda tokens: one_hot(tokens) + merged)
        return model

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(LoraConfig=lambda **_: None, get_peft_model=adapted))
    monkeypatch.setattr(probes, "_tiny_llama", lambda: model_of(one_hot))
    assert probes.probe_peft().status == status


@pytest.mark.parametrize(
    ("bytes_each", "factor", "status"), [(0.5, 1.09, "ok"), (1, 1.09, "fail"), (0.5, 1.001, "fail"), (0.5, 1.2, "fail")]
)
def test_numbers_in_nf4_take_half_a_byte_and_have_its_error(monkeypatch, bytes_each, factor, status):
    functional = SimpleNamespace(
        quantize_4bit=lambda x, **_: (torch.zeros(int(bytes_each * x.numel()), dtype=torch.uint8), x),
        dequantize_4bit=lambda packed, x: factor * x,
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(functional=functional))
    assert probes.probe_bitsandbytes().status == status


def test_what_is_missing_is_skipped_or_absent_with_its_reason():
    assert probes.probe_peers(1).evidence == "1 GPUs: there is no pair"
    absent = probes.probe_mpi(lambda name: None)
    assert (absent.status, absent.found) == ("absent", False) and "mpirun" in absent.evidence
    silent = probes.probe_telemetry(detect_cpu(), lambda device: Telemetry(unreadable={"power_w": "no right"}))
    assert silent.status == "skip" and "no right" in silent.evidence
    assert probes.probe_triton(detect_cpu()).status == "skip"


class Communicator:
    """Rank 0 of 2 of an MPI whose operations return the right values, except for one."""

    rank, size = 0, 2

    def __init__(self, wrong: str):
        right = {"allreduce": 3, "bcast": [7], "scatter": 0, "gather": [0, 10], "reduce": 6}
        for name, value in right.items():
            result = [value] if name == wrong else value
            setattr(self, name, lambda *_, result=result, **__: result)


@pytest.mark.parametrize("wrong", ["", "allreduce", "bcast", "scatter", "gather", "reduce"])
def test_the_program_under_mpirun_finds_a_wrong_value_of_each_operation(wrong, monkeypatch, capsys):
    library = SimpleNamespace(COMM_WORLD=Communicator(wrong), PROD="product", Get_library_version=lambda: "Open MPI v5, other")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=library))
    with pytest.raises(AssertionError) if wrong else nullcontext():
        exec(probes._MPI_PROGRAM, {})
    assert capsys.readouterr().out == ("" if wrong else "mpi 2 Open MPI v5\n")


def test_a_framework_is_imported_in_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path))
    calls = []

    def call(code: int):
        def run(command, **options):
            calls.append(command)
            return subprocess.CompletedProcess(command, code, "", "Traceback\nImportError: libcudart.so.12")

        return run

    absent = probes.probe_environment("megatron-core", "megatron.core", call(0))
    assert (absent.status, absent.found, calls) == ("absent", False, [])
    assert "hyperion frameworks install megatron-core" in absent.evidence
    folder = environment_folder("megatron-core")
    folder.mkdir(parents=True)
    (folder / "hyperion-framework.json").write_text('{"versions": {"megatron-core": "0.16.1"}}')
    fine = probes.probe_environment("megatron-core", "megatron.core", call(0))
    assert (fine.status, fine.version, fine.found) == ("ok", "0.16.1", True)
    assert calls == [[str(folder / "bin/python"), "-c", "import megatron.core"]]
    broken = probes.probe_environment("megatron-core", "megatron.core", call(1))
    assert broken.status == "fail" and broken.evidence.endswith("ImportError: libcudart.so.12") and str(folder) in broken.remedy


def test_an_optional_package_is_absent_a_required_one_fails_and_a_broken_one_is_not_ok(tmp_path, monkeypatch):
    assert probes.probe_import("nope", ("nope",), required=False).status == "absent"
    assert probes.probe_import("nope", ("nope",), required=True).status == "fail"
    (tmp_path / "brokenpackage.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probes, "package_version", lambda package: "0.1")
    broken = probes.probe_import("brokenpackage", ("brokenpackage",), required=False)
    assert (broken.status, broken.version) == ("fail", "0.1") and "OSError: libcudart" in broken.evidence
    assert "brokenpackage" not in sys.modules and package_version("nope") is None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs here")
def test_the_gpus_of_this_machine_copy_to_each_other_without_errors():
    result = probes.probe_peers(torch.cuda.device_count())
    assert result.status == "ok" and "all bytes equal" in result.evidence
