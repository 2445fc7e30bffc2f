"""The checks of machine and installation: software, torch and its device, storage, and what `hyperion doctor` makes of them."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hyperion.data.store.folders import DataUnavailable
from hyperion.doctor import checks
from hyperion.errors import HyperionError
from hyperion.install.machine import DetectedAccelerator
from hyperion.install.plan import Build


@pytest.mark.parametrize(("version", "status"), [((3, 11, 0), "ok"), ((3, 14, 1), "ok"), ((3, 10, 13), "fail")])
def test_python(version, status):
    result = checks.check_python(version)
    assert (result.id, result.status) == ("python", status)
    assert bool(result.remedy) == (status != "ok")


def test_this_torchvision_imports():
    result = checks.check_torchvision()
    assert result.status == "ok" and result.evidence.startswith("torchvision ")


def test_a_broken_torchvision_is_reported_with_its_cause():
    def load():
        raise HyperionError("torchvision cannot be imported: undefined symbol", next_step="make setup")

    result = checks.check_torchvision(load)
    assert (result.status, result.remedy) == ("fail", "make setup") and "undefined symbol" in result.evidence


@pytest.mark.process
def test_a_real_kernel_starts_in_this_interpreter():
    result = checks.check_notebook_kernel()
    assert (result.status, result.evidence) == ("ok", f"a kernel started in {sys.executable}")


def test_a_kernel_of_another_python_is_a_failure():
    result = checks.check_notebook_kernel(lambda: "/usr/bin/python3")
    assert result.status == "fail" and "kernelspec" in result.remedy


def test_a_kernel_that_does_not_start_is_a_failure():
    def start():
        raise ModuleNotFoundError("No module named 'ipykernel'")

    result = checks.check_notebook_kernel(start)
    assert result.status == "fail" and "ipykernel" in result.evidence and result.remedy


def test_a_plain_module_counts_as_torchvision():
    assert checks.check_torchvision(lambda: SimpleNamespace(__version__="0.28.0")).status == "ok"


CPU, CUDA, ROCM = Build("2.13.0+cpu"), Build("2.13.0", cuda="13.0"), Build("2.13.0+rocm7.2", hip="7.2.1")
NO_GPU = DetectedAccelerator("cpu", "no AMD or NVIDIA GPU with a driver")
AMD = DetectedAccelerator("rocm", "8 AMD GPU(s), gfx90a", rocm_version=(7, 2))


@pytest.mark.parametrize(
    ("build", "machine", "override", "status"),
    [
        (CPU, NO_GPU, "", "ok"),
        (ROCM, AMD, "", "ok"),
        (CPU, AMD, "", "fail"),
        (CUDA, AMD, "", "fail"),
        (CPU, AMD, "cpu", "ok"),
        (CPU, DetectedAccelerator("cpu", "no GPU", note="an AMD display without a driver"), "", "warn"),
        (ROCM, DetectedAccelerator("rocm", "gfx90a", problem="may not be opened", remedy="join render"), "", "fail"),
    ],
)
def test_the_build_against_the_machine(build, machine, override, status):
    result = checks.check_torch_build(build, machine, override)
    assert result.status == status and bool(result.remedy) == (status != "ok")
    if status == "fail":
        assert machine.evidence in result.evidence


def test_a_cpu_build_has_no_accelerator_to_check():
    result = checks.check_accelerator(CPU)
    assert (result.status, result.found, result.version) == ("skip", False, "")
    result = checks.check_accelerator(CPU, driver="nvidia 580.1")
    assert (result.status, result.found, result.version) == ("skip", True, "nvidia 580.1")


def test_visible_devices_are_named():
    result = checks.check_accelerator(ROCM, lambda: ["AMD Instinct MI250X"] * 8, {}, "amdgpu 6.14")
    assert (result.status, result.evidence) == ("ok", "8 visible: AMD Instinct MI250X")
    assert (result.found, result.version) == (True, "amdgpu 6.14")


def test_masked_devices_are_blamed_on_the_mask():
    result = checks.check_accelerator(ROCM, list, {"HIP_VISIBLE_DEVICES": "9", "HOME": "/root"})
    assert result.status == "fail" and "unset HIP_VISIBLE_DEVICES" in result.remedy


@pytest.mark.parametrize(
    ("build", "variables", "masks"),
    [
        (CUDA, {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2"}, "CUDA"),
        (ROCM, {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2"}, "ROCR HIP"),
        (ROCM, {"CUDA_VISIBLE_DEVICES": "0", "GPU_DEVICE_ORDINAL": "1"}, "CUDA"),
        (CPU, {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, ""),
    ],
)
def test_masks_are_the_variables_that_the_runtime_of_the_build_reads(build, variables, masks):
    names = [f"{name}_VISIBLE_DEVICES" for name in masks.split()]
    assert checks.device_masks(build, variables) == {name: variables[name] for name in names}


@pytest.mark.parametrize("masks", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_torchs_own_words_are_kept(masks):
    def names():
        raise RuntimeError("The NVIDIA driver on your system is too old")

    result = checks.check_accelerator(CUDA, names, masks)
    assert result.status == "fail" and "too old" in result.evidence and result.remedy.startswith("update the GPU driver")


def test_this_device_copies_and_computes_right():
    result = checks.check_arithmetic()
    assert result.status == "ok" and "copied to the device and back" in result.evidence


def test_a_copy_that_drops_a_bit_is_caught():
    def copy(tensor, target):
        moved = tensor.clone()
        if moved.dtype == torch.uint8:
            moved[777] ^= 1
        return moved

    calls = iter([copy, lambda tensor, target: tensor])
    result = checks.check_arithmetic("cpu", lambda tensor, target: next(calls)(tensor, target))
    assert result.status == "fail" and "1 of 1048576 bytes" in result.evidence


@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: a @ b * 1.001,
        lambda a, b: a.bfloat16().float() @ b.bfloat16().float(),
        lambda a, b: a @ b * float("nan"),
        lambda a, b: a @ b.T,
    ],
)
def test_a_wrong_or_imprecise_product_is_caught(multiply):
    result = checks.check_arithmetic("cpu", multiply=multiply)
    assert result.status == "fail" and "relative error" in result.evidence and result.remedy


def no_mirror():
    raise DataUnavailable("no mirror: HYPERION_DATA_MIRROR is not set")


def test_a_filled_mirror_is_found(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path))
    result = checks.check_data_source()
    assert (result.status, result.evidence) == ("fail", f"the mirror {tmp_path} holds no data set")
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "instructions.json").write_text("[]")
    result = checks.check_data_source()
    assert (result.status, result.evidence) == ("ok", f"mirror {tmp_path} holds wikitext-2, instructions")


@pytest.mark.parametrize("made", [True, False])
def test_an_empty_or_missing_mirror_that_was_named_is_a_failure(tmp_path, monkeypatch, made):
    named = tmp_path / "mirror"
    if made:
        named.mkdir()
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(named))
    result = checks.check_data_source()
    assert result.status == "fail" and "HYPERION_DATA_MIRROR" in result.remedy


def test_staged_data_are_found(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / ".cifar-10.part").mkdir()
    result = checks.check_data_source(no_mirror, tmp_path)
    assert result.status == "ok" and result.evidence.endswith("holds wikitext-2")


def test_no_data_is_a_warning_with_the_ways_to_get_some(tmp_path):
    result = checks.check_data_source(no_mirror, tmp_path / "absent")
    assert result.status == "warn" and "make fetch" in result.remedy


def test_a_results_folder_yet_to_be_made_is_fine(tmp_path):
    assert checks.check_results_folder(tmp_path / "a/b").status == "ok"
    assert not (tmp_path / "a").exists(), "the check leaves nothing behind"


def test_a_file_in_the_place_of_the_results_folder_is_a_failure(tmp_path):
    (tmp_path / "results").write_text("")
    result = checks.check_results_folder(tmp_path / "results")
    assert result.status == "fail" and "is not a folder" in result.evidence and "HYPERION_RESULTS" in result.remedy


def test_a_results_folder_that_refuses_writing_is_a_failure():
    result = checks.check_results_folder(checks.Path("/proc/self"))  # refuses root as well
    assert result.status == "fail" and result.remedy


@pytest.mark.parametrize(("free_gb", "status"), [(100.0, "ok"), (3.0, "warn"), (0.2, "fail")])
def test_disk_space(tmp_path, free_gb, status):
    result = checks.check_disk_space(tmp_path, free_gb)
    assert result.status == status and f"{free_gb:.1f} GB free" in result.evidence


def test_disk_space_is_read_for_a_folder_yet_to_be_made(tmp_path):
    assert "GB free" in checks.check_disk_space(tmp_path / "later").evidence


def test_caches_below_a_writable_home_are_fine(tmp_path):
    assert checks.check_caches({}, tmp_path).status == "ok"


def test_a_cache_that_cannot_be_written_is_named_with_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    result = checks.check_caches({"TRITON_CACHE_DIR": str(tmp_path / "file")}, tmp_path)
    assert result.status == "fail" and "TRITON_CACHE_DIR" in result.evidence
    assert "export TRITON_CACHE_DIR=" in result.remedy and "HF_HOME" not in result.remedy
