"""Tolerances that are derived from the rounding of inputs: right kernels pass over seeds, wrong ones do not."""

import math

import pytest
import torch

from hyperion.experiments.coverage.layers import LAYERS, SquaredReLU, layer_case, round_trip
from hyperion.experiments.coverage.rounding import Case, errors_over_tolerance, forward_backward

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def a_case(function, dtype=torch.float32, seed=0, shapes=((7, 33),)):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return Case(function, tuple(tensors), {})


RIGHT = {
    "softmax": (lambda x: torch.softmax(x, -1), ((7, 33),)),
    "sum": (lambda x: x.sum(-1), ((7, 1025),)),
    "matmul": (torch.matmul, ((16, 65), (65, 8))),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (33,)), ((7, 33),)),
    "sort": (lambda x: torch.sort(x, -1), ((7, 33),)),
    "argmax": (lambda x: x.argmax(-1), ((7, 33),)),
    "gelu": (torch.nn.functional.gelu, ((7, 33),)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_operators_pass_over_seeds(name, dtype):
    function, shapes = RIGHT[name]
    for seed in range(5):
        ratios = errors_over_tolerance(a_case(function, dtype, seed, shapes), dtype, seed, 4)
        assert all(ratio <= 1 for ratio in ratios.values()), (seed, ratios)


def planted(function, fault):
    """The function in float64, and a faulty one in every smaller format."""
    return lambda *args: (function if args[0].dtype == torch.float64 else fault)(*args)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.0001), (torch.bfloat16, 1.2), (torch.float16, 1.03)])
def test_an_operator_that_is_slightly_wrong_is_found(dtype, factor):
    function = planted(lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x * factor, -1))
    ratios = errors_over_tolerance(a_case(function, dtype), dtype, 0, 4)
    assert ratios["forward"] > 1 and ratios["backward"] > 1


def test_a_single_wrong_element_is_found():
    def fault(x):
        y = torch.exp(x)
        return torch.where(torch.arange(y.numel()).view_as(y) == 40, y * 1.001, y)

    assert errors_over_tolerance(a_case(planted(torch.exp, fault)), torch.float32, 0, 4)["forward"] > 1


def test_a_product_in_tf32_is_found():
    def fault(a, b):
        return ((a.view(torch.int32) & -8192).view(torch.float32)) @ b

    case = a_case(planted(torch.matmul, fault), shapes=((16, 65), (65, 8)))
    case = Case(case.function, tuple(one.detach() for one in case.args), {})
    assert errors_over_tolerance(case, torch.float32, 0, 4)["forward"] > 1


class Halved(torch.autograd.Function):
    """tanh, with the gradient of another slope."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * (1 - torch.tanh(ctx.saved_tensors[0]))


def test_a_wrong_gradient_is_found_and_the_forward_pass_is_not_blamed():
    ratios = errors_over_tolerance(a_case(planted(torch.tanh, Halved.apply)), torch.float32, 0, 4)
    assert ratios["forward"] <= 1 < ratios["backward"]


def test_a_missing_gradient_and_wrong_shapes_and_nan_are_found():
    missing = planted(lambda x: x * x.sum(), lambda x: x * x.sum().detach())
    assert errors_over_tolerance(a_case(missing), torch.float32, 0, 4)["backward"] > 1
    transposed = planted(torch.exp, lambda x: torch.exp(x).mT)
    assert errors_over_tolerance(a_case(transposed), torch.float32, 0, 2)["forward"] == math.inf
    unwritten = planted(torch.exp, lambda x: torch.exp(x).masked_fill(x == x.max(), math.nan))
    assert errors_over_tolerance(a_case(unwritten), torch.float32, 0, 2)["forward"] == math.inf


def test_a_wrong_index_is_found_and_a_tie_is_not():
    shifted = planted(lambda x: x.argmax(-1), lambda x: (x.argmax(-1) + 1) % x.shape[-1])
    assert errors_over_tolerance(a_case(shifted), torch.float32, 0, 4)["forward"] == math.inf
    tied = Case(planted(lambda x: x.argmax(-1), lambda x: 1 - x.argmax(-1)), (torch.tensor([1.0, 1.0]),), {})
    assert errors_over_tolerance(tied, torch.float32, 0, 8)["forward"] == 0


def test_numbers_beyond_the_format_are_infinite_and_their_gradient_is_not_compared():
    case = Case(torch.exp, (torch.tensor([1.0, 20.0], dtype=torch.float16, requires_grad=True),), {})
    assert set(errors_over_tolerance(case, torch.float16, 0, 4)) == {"forward"}
    capped = Case(planted(torch.exp, lambda x: torch.exp(x).clamp(max=6e4)), case.args, {})
    assert errors_over_tolerance(capped, torch.float16, 0, 4)["forward"] > 1


def test_sums_in_the_storage_format_are_wrong_unless_the_case_expects_them():
    def in_storage(x):
        total = x[:, 0]
        for column in x.unbind(1)[1:]:
            total = total + column
        return total

    tensor = torch.rand(4, 500).bfloat16() + 1
    function = planted(lambda x: x.sum(1), in_storage)
    assert errors_over_tolerance(Case(function, (tensor,), {}), torch.bfloat16, 0, 4)["forward"] > 1
    assert errors_over_tolerance(Case(function, (tensor,), {}, in_storage=True), torch.bfloat16, 0, 4)["forward"] <= 1


@pytest.mark.parametrize("name", LAYERS)
def test_layers_pass_and_their_state_dicts_survive(name):
    for dtype in DTYPES:
        ratios = errors_over_tolerance(layer_case(name, CPU, dtype, 3), dtype, 3, 4)
        assert set(ratios) == {"forward", "backward"} and max(ratios.values()) <= 1, (dtype, ratios)
    tensors, differing = round_trip(name, CPU, 0)
    assert tensors > 0 and differing == 0


def test_a_wrong_custom_gradient_is_found(monkeypatch):
    right = SquaredReLU.backward

    def wrong(ctx, *grads):
        return right(ctx, *grads) * (1.0 if grads[0].dtype == torch.float64 else 1.001)

    monkeypatch.setattr(SquaredReLU, "backward", staticmethod(wrong))
    ratios = errors_over_tolerance(layer_case("custom: ScaledMLP", CPU, torch.float32, 0), torch.float32, 0, 4)
    assert ratios["forward"] <= 1 < ratios["backward"]


def test_a_state_dict_that_lost_a_tensor_is_found(monkeypatch):
    load = torch.load

    def lossy(*args, **options):
        state = load(*args, **options)
        return state | {"scale": state["scale"].half().float()}

    monkeypatch.setattr(torch, "load", lossy)
    assert round_trip("custom: ScaledMLP", CPU, 0)[1] > 0


def test_the_gradients_of_a_call_without_inputs_are_empty():
    outputs, gradients, cotangents = forward_backward(torch.ones, [3], torch.utils._pytree.tree_flatten(((3,), {}))[1], None, 0)
    assert outputs[0].shape == (3,) and gradients == cotangents == []
