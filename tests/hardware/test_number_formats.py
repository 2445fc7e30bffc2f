import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.errors import HyperionError
from hyperion.hardware import DTYPES, PATHS, canonical_dtype, detect, detect_cpu, fp8_format, gemm_path
from tests.hardware.machines import GPUS, facts

FP8_FORMAT = {
    "MI250X": None,
    "MI250": None,
    "MI210": None,
    "MI300X": "fp8_e4m3fnuz",
    "MI325X": "fp8_e4m3fnuz",
    "MI355X": "fp8_e4m3fn",
    "RX 7900 XTX": None,
    "RX 7800 XT": None,
    "RX 9070 XT": "fp8_e4m3fn",
    "A100-40": None,
    "A100-80": None,
    "H100 SXM": "fp8_e4m3fn",
    "H100 PCIe": "fp8_e4m3fn",
    "H200": "fp8_e4m3fn",
    "B200": "fp8_e4m3fn",
}
TF32 = {"MI300X", "MI325X", "A100-40", "A100-80", "H100 SXM", "H100 PCIe", "H200", "B200"}


@pytest.mark.parametrize("machine", GPUS)
def test_fp8_and_tf32_only_where_the_hardware_has_them(machine):
    device = detect(facts(machine))
    assert fp8_format(device) == FP8_FORMAT[machine]
    assert device.supports("fp8")[0] == (FP8_FORMAT[machine] is not None)
    assert device.supports("tf32")[0] == (machine in TF32)
    assert all(device.supports(dtype)[0] for dtype in ("fp64", "fp32", "fp16", "bf16", "int8"))


@pytest.mark.parametrize("machine", GPUS)
def test_support_agrees_with_the_data_sheet(machine):
    from hyperion.hardware import peak

    device = detect(facts(machine))
    for dtype in ("tf32", "fp16", "bf16", "fp8", "int8"):
        assert device.supports(dtype)[0] == (peak(device, gemm_path(dtype, device)).limit_tflops is not None)


@pytest.mark.parametrize("machine", [*GPUS, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_answer_has_a_reason_and_a_path(machine, dtype):
    device = detect(facts(machine))
    supported, reason = device.supports(dtype)
    assert isinstance(supported, bool) and reason
    assert gemm_path(dtype, device) in PATHS


def test_the_wrong_fp8_format_names_the_right_one():
    assert "float8_e4m3fnuz" in detect(facts("MI300X")).supports("float8_e4m3fn")[1]
    assert "float8_e4m3fn" in detect(facts("MI355X")).supports("float8_e4m3fnuz")[1]


def test_fp32_and_fp64_gemm_run_on_different_units():
    paths = {name: (gemm_path("fp32", detect(facts(name))), gemm_path("fp64", detect(facts(name)))) for name in GPUS}
    assert paths["MI250X"] == paths["MI355X"] == ("fp32_matrix", "fp64_matrix")
    assert paths["H200"] == paths["A100-80"] == paths["B200"] == ("fp32_vector", "fp64_matrix")
    assert paths["RX 9070 XT"] == ("fp32_vector", "fp64_vector")
    assert gemm_path("bfloat16", detect(facts("MI250X"))) == "bf16"
    assert gemm_path("float8_e4m3fnuz", detect(facts("MI300X"))) == "fp8"


def test_older_nvidia_gpus_fall_back_with_a_reason():
    import dataclasses

    volta = dataclasses.replace(detect(facts("A100-40")), arch="sm_70")
    assert volta.supports("fp16")[0] and volta.supports("bf16") == (
        True,
        "without tensor cores on sm_70 (they take bf16 from sm_80 on)",
    )
    assert not volta.supports("tf32")[0] and not volta.supports("fp8")[0] and not volta.supports("int8")[0]


def test_cpu_says_native_or_emulated():
    cpu = detect_cpu(facts())
    assert cpu.supports("bf16") == (True, "native (avx512_bf16)")
    assert cpu.supports("fp16") == (True, "emulated: converted to wider types first")
    assert not cpu.supports("tf32")[0] and not cpu.supports("fp8")[0]
    assert gemm_path("fp32", cpu) == "fp32_vector"


def test_torch_names_are_understood():
    assert canonical_dtype("torch.bfloat16") == "bf16"
    assert canonical_dtype("float8_e5m2fnuz") == "fp8_e5m2fnuz"


@given(st.text(max_size=20))
def test_any_other_name_is_refused_or_canonical(name):
    try:
        assert canonical_dtype(name) in DTYPES
    except HyperionError as error:
        assert error.next_step
