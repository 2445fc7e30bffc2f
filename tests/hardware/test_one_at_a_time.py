import pytest

from hyperion.hardware import detect
from hyperion.hardware.facts import one_at_a_time
from tests.hardware.machines import facts


def test_each_of_several_gpus_is_shown_by_its_vendors_variable():
    assert one_at_a_time(detect(facts("H200")), 2, {}) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    amd = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert one_at_a_time(detect(facts("MI300X")), 2, {}) == [dict.fromkeys(amd, "0"), dict.fromkeys(amd, "1")]


@pytest.mark.parametrize("named", ["3,1", "GPU-5f,GPU-1c"])
def test_what_somebody_left_visible_is_shared_out_and_nothing_else(named):
    masks = one_at_a_time(detect(facts("H200")), 2, {"CUDA_VISIBLE_DEVICES": named})
    assert [mask["CUDA_VISIBLE_DEVICES"] for mask in masks] == named.split(",")


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_rocm_obeys_the_variable_of_cuda_as_well(variable):
    masks = one_at_a_time(detect(facts("MI300X")), 2, {variable: "2, 3"})
    assert [mask["HIP_VISIBLE_DEVICES"] for mask in masks] == ["2", "3"]


@pytest.mark.parametrize(
    ("named", "shared_out"),
    [("", "0,2,4,6"), ("0,2,4,6", "0,2,4,6"), ("1,2,3", "1,2"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-a,GPU-c")],
)
def test_of_the_two_dies_that_share_a_modules_power_only_one_works_at_a_time(named, shared_out):
    masks = one_at_a_time(detect(facts("MI250X")), len(named.split(",")) if named else 8, {"HIP_VISIBLE_DEVICES": named})
    assert [mask["HIP_VISIBLE_DEVICES"] for mask in masks] == shared_out.split(",")


@pytest.mark.parametrize(
    ("environment", "count", "shared_out"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,2"}, 2, "0,1"),  # HIP calls them 0 and 1, and they are in two modules
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, 2, "0"),
        ({"ROCR_VISIBLE_DEVICES": "0,2,3", "HIP_VISIBLE_DEVICES": "1,2"}, 2, "1"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3, "0,2"),
    ],
)
def test_dies_that_rocr_left_are_counted_by_their_modules(environment, count, shared_out):
    masks = one_at_a_time(detect(facts("MI250X")), count, environment)
    assert [mask["HIP_VISIBLE_DEVICES"] for mask in masks] == shared_out.split(",")


def test_a_cpu_has_nothing_to_share_out():
    assert one_at_a_time(detect(facts()), 0, {}) == []
