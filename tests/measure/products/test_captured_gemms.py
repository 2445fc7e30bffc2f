"""The products inside of a call: worked out by hand, held against PyTorch's own FLOP counts, weighed by measured rates."""

from functools import partial
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure.clock import timing
from hyperion.measure.products.dispatch import Product, count_operations, dispatched, shapes_only
from hyperion.measure.products.taf import BatchedGemm, CapturedGemms, TimedProduct, _refusal, gemms_of, measure_products, taf
from hyperion.models import TransformerConfig, TransformerLM, flops_per_image, flops_per_token, reference_model, resnet18
from hyperion.results import Estimate

CPU = detect_cpu()
ATEN = torch.ops.aten
# PyTorch has no formula for its own attention on CPUs; its functions for that on GPUs count the same products.
ON_CPUS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_shape=None, **__: sdpa_flop_count(q, k, v),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *_, out_shape=None, **__: sdpa_backward_flop_count(g, q, k, v)
    ),
}


def capture_gemms(function):
    return gemms_of(dispatched(function))


def counted_by_torch(function):
    with FlopCounterMode(display=False, custom_mapping=ON_CPUS) as counter:
        function()
    return counter.get_total_flops()


def product(m, n, k, dtype="fp32", *, kind="matmul", batch=1, lies="NN", traffic=None):
    least = batch * (m * k + k * n + m * n) * {"fp64": 8, "fp32": 4, "bf16": 2}[dtype]
    return Product(kind, batch, m, n, k, dtype, lies, least if traffic is None else traffic)


def language_model():
    model = TransformerLM(TransformerConfig(vocab_size=64, context=16, width=32, heads=2, layers=2))
    tokens = torch.randint(64, (3, 16))
    return lambda: F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())


def residual_net():
    model, images = resnet18(width=8), torch.randn(2, 3, 32, 32)
    return lambda: model(images).square().mean()


def reference(name):
    def make():
        model = reference_model(name)
        module, inputs = model.build(), torch.randn(2, *model.sample_shape)
        targets = model.targets(inputs, torch.Generator().manual_seed(0))
        return lambda: model.loss(module(inputs), targets)

    return make


SUBJECTS = {
    "language model": language_model,
    "resnet18": residual_net,
    "resnet50": reference("resnet50_w16_64px"),
    "vit": reference("vit_d192_l4_64px"),
    "encoder": reference("encoder_d128_h2_l2"),
}


@pytest.mark.parametrize(
    "subject, kernel",
    [(name, SDPBackend.FLASH_ATTENTION) for name in SUBJECTS]
    + [(name, SDPBackend.MATH) for name in SUBJECTS if not name.startswith("resnet")],
    ids=str,
)
def test_forward_and_backward_of_our_models_have_the_flops_that_torch_counts(subject, kernel):
    loss = SUBJECTS[subject]()
    with sdpa_kernel(kernel):
        forward, both = capture_gemms(loss), capture_gemms(lambda: loss().backward())
        assert forward.flops == counted_by_torch(loss) > 0
        assert both.flops == counted_by_torch(lambda: loss().backward()) > 2 * forward.flops
    assert not both.without_formula


def test_a_layer_and_its_gradients_by_hand():
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    captured = capture_gemms(lambda: layer(x).sum().backward())
    bias = 4 * 16
    assert captured.counts == {
        product(4, 16, 8, lies="NT", traffic=product(4, 16, 8).bytes + bias): 1,
        product(4, 8, 16, traffic=4 * (1 + 16 * 8 + 4 * 8)): 1,  # the sum's gradient is one number, repeated
        product(16, 8, 4, traffic=4 * (1 + 4 * 8 + 16 * 8)): 1,
    }
    assert captured.flops == 3 * 2 * 4 * 16 * 8
    assert captured.others["sum"] == 2  # of the output, and of the bias's gradient


@pytest.mark.parametrize("inference", [False, True])
def test_a_linear_layer_is_its_product_in_inference_mode_too(inference):
    weight, x = torch.randn(16, 8), torch.randn(2, 4, 8)
    with torch.inference_mode(inference):
        captured = capture_gemms(lambda: F.linear(x, weight))
    assert captured.counts == {product(8, 16, 8, lies="NT"): 1}


def test_batched_products_and_how_their_operands_lie():
    a, b = torch.randn(5, 7, 3, dtype=torch.bfloat16), torch.randn(5, 2, 3, dtype=torch.bfloat16)
    captured = capture_gemms(lambda: [torch.bmm(a, b.mT), torch.bmm(b, a.mT), torch.bmm(b, a.mT)])
    assert captured.counts == {product(7, 2, 3, "bf16", batch=5, lies="NT"): 1, product(2, 7, 3, "bf16", batch=5, lies="NT"): 2}
    (found,) = capture_gemms(lambda: torch.baddbmm(torch.zeros(5, 3, 2), a.float().mT, torch.randn(5, 7, 2))).counts
    assert (found.batch, found.m, found.n, found.k, found.transposes) == (5, 3, 2, 7, "TN")


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_is_the_product_over_its_patches(groups):
    image = torch.randn(2, 8, 9, 9, requires_grad=True)
    kernel = torch.randn(12, 8 // groups, 3, 3, requires_grad=True)
    sides = {(found.batch, found.m, found.n, found.k) for found in convolution_products(image, kernel, groups)}
    pixels, patch = 2 * 5 * 5, 8 // groups * 9
    assert sides == {
        (groups, *side) for side in ((pixels, 12 // groups, patch), (pixels, patch, 12 // groups), (12 // groups, patch, pixels))
    }
    flops = [found.flops for found in convolution_products(image, kernel, groups)]
    assert flops == [2 * pixels * 12 * patch] * 3


def convolution_products(image, kernel, groups):
    convolved = lambda: F.conv2d(image, kernel, stride=2, padding=1, groups=groups)  # noqa: E731
    captured = capture_gemms(lambda: convolved().square().sum().backward())
    assert captured.counts.keys() >= capture_gemms(convolved).counts.keys()
    if groups == 1:
        assert captured.flops == counted_by_torch(lambda: convolved().square().sum().backward())
    return list(captured.counts)


@pytest.mark.parametrize("shape", [(2, 6, 7), (1, 6, 5)])
def test_a_transposed_convolution_agrees_with_torch(shape):
    image = torch.randn(shape[0], 6, 4, shape[2], requires_grad=True)
    kernel = torch.randn(6, 5, 3, 3, requires_grad=True)
    call = lambda: F.conv_transpose2d(image, kernel, stride=2).square().sum().backward()  # noqa: E731
    assert capture_gemms(call).flops == counted_by_torch(call)


def test_attention_with_fewer_heads_of_keys_counts_each_head_of_queries():
    q, k, v = (torch.randn(2, heads, 16, 4, requires_grad=True) for heads in (8, 2, 2))
    captured = capture_gemms(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward())
    assert {found.kind for found in captured.counts} == {"attention"}
    assert sum(captured.counts.values()) == 2 + 5
    assert captured.flops == 7 * 2 * 16 * 16 * 16 * 4


def test_compiled_code_hides_no_product():
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    compiled = torch.compile(lambda: layer(x).relu())
    assert capture_gemms(compiled).counts == capture_gemms(lambda: layer(x)).counts != {}


def test_an_operator_without_a_formula_is_named():
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    with torch.inference_mode():
        fused = capture_gemms(lambda: layer(torch.randn(2, 4, 32)))
    assert fused.without_formula == {"_transformer_encoder_layer_fwd": 1} and fused.flops == 0
    assert "not counted: _transformer_encoder_layer_fwd" in str(fused)
    vector = capture_gemms(lambda: torch.mv(torch.randn(4, 4), torch.randn(4)).relu())
    assert vector.without_formula == {"mv": 1} and vector.others["relu"] == 1


def test_a_step_without_values_has_the_products_of_the_real_one():
    def captured(module, model, inputs):
        with torch.autocast("cpu", torch.bfloat16):
            loss = lambda: model.loss(module(inputs), torch.zeros(2, *model.sample_shape))  # noqa: E731
            return capture_gemms(lambda: loss().backward())

    model = reference_model("encoder_d128_h2_l2")
    real = captured(model.build(), model, torch.randn(2, *model.sample_shape))
    with torch.device("meta"):
        module = model.build()
    with shapes_only(module):
        assert captured(module, model, torch.empty(2, *model.sample_shape)) == real
    assert {found.dtype for found in real.counts} == {"bf16"}


def test_what_lies_on_a_device_is_not_taken_for_a_shape():
    with pytest.raises(HyperionError, match="not on meta"), shapes_only(torch.nn.Linear(2, 2)):
        pass


def test_shared_parameters_stay_shared_without_values():
    with torch.device("meta"):
        one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    two.weight = one.weight
    with shapes_only(one, two):
        assert two.weight is one.weight and two.bias is not one.bias


def test_traffic_is_what_is_read_and_written_and_a_view_moves_nothing():
    x = torch.zeros(4, 8)
    calls = dispatched(lambda: x.t().add_(1).expand(3, 8, 4))
    assert [(call.name, call.moves, call.bytes) for call in calls] == [
        ("t", False, 0),
        ("add_", True, 2 * 4 * 32),
        ("expand", False, 0),
    ]


def test_taf_is_the_harmonic_mean_weighted_by_flops():
    large, small = product(100, 100, 100), product(10, 10, 10)
    captured = CapturedGemms({large: 1, small: 1000}, {})
    known = {large: Estimate(4.0, 3.8, 4.2, 40), small: Estimate(1.0, 1.0, 1.0, 30)}
    found = taf(captured, known)
    assert found.tflops.value == pytest.approx(2 / (1 / 4 + 1 / 1)) and found.tflops.n == 30 and found.coverage == 1.0
    assert found.tflops.ci_low == pytest.approx(2 / (1 / 3.8 + 1)) and found.tflops.ci_high == pytest.approx(2 / (1 / 4.2 + 1))


def test_intervals_of_independent_rates_add_up_in_quadrature():
    a, b = product(100, 100, 100), product(100, 100, 101)
    known = {a: Estimate(1.0, 0.9, 1.1, 30), b: Estimate(1.0, 0.9, 1.1, 30)}
    found = taf(CapturedGemms({a: 1, b: 1}, {}), known.get).tflops
    late = (1 / 0.9 - 1) * sqrt(1 + 1.01**2)
    assert found.ci_low == pytest.approx(2.01 / (2.01 + late))


def test_taf_says_how_much_of_the_work_it_knows():
    a, b = product(100, 100, 100), product(50, 100, 100)
    found = taf(CapturedGemms({a: 1, b: 1}, {}), {a: Estimate(1.0, 0.9, 1.1, 30)})
    assert found.coverage == pytest.approx(2 / 3) and list(found.rates) == [a]
    assert found.shares == {a: pytest.approx(2 / 3)}
    with pytest.raises(HyperionError, match="none of 2 products"):
        taf(CapturedGemms({a: 1, b: 1}, {}), {})


def measured_taf(captured, time_limit_s):
    """Return the TAF of the measured products, and the reason for each product that was not measured."""
    measured = measure_products(captured, CPU, time_limit_s)
    rates = {key: result.tflops for key, result in measured.items() if isinstance(result, TimedProduct)}
    return taf(captured, rates), {key: result for key, result in measured.items() if isinstance(result, str)}


def test_the_products_of_a_layer_are_timed_here(monkeypatch):
    # Flushing a large cache thirty times a product would use the time up.
    monkeypatch.setattr(timing, "CacheFlush", partial(timing.CacheFlush, elements=8))
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 8, 32)
    captured = capture_gemms(lambda: layer(x, x, x, need_weights=False)[0].sum().backward())
    found, left_out = measured_taf(captured, time_limit_s=4.0)
    assert found.coverage == 1.0 and not left_out and found.rates.keys() == captured.counts.keys()
    assert min(rate.n for rate in found.rates.values()) >= 30
    slowest, fastest = (pick(rate.value for rate in found.rates.values()) for pick in (min, max))
    assert slowest <= found.tflops.value <= fastest


@pytest.mark.slow
@pytest.mark.long
def test_without_time_only_the_largest_product_is_timed():
    a, b = product(64, 64, 64), product(8, 8, 8)
    found, left_out = measured_taf(CapturedGemms({b: 1, a: 1}, {}), time_limit_s=0.0)
    assert list(found.rates) == [a] and left_out == {b: "the 0 s were over"}
    assert found.coverage == pytest.approx(a.flops / (a.flops + b.flops))


@pytest.mark.slow
@pytest.mark.long
def test_a_format_that_the_device_lacks_is_left_out_with_the_reason():
    a, b = product(64, 64, 64), Product("matmul", 1, 8, 8, 8, "tf32", "NN", 768)
    # However little time there is: what cannot be timed takes none, and no other product's turn.
    for counts in ({a: 1, b: 1}, {b: 10**6, a: 1}):
        found, left_out = measured_taf(CapturedGemms(counts, {}), time_limit_s=0.0)
        assert list(found.rates) == [a] and left_out[b].startswith("unsupported: TF32")
    assert measure_products(CapturedGemms({b: 1}, {}), CPU, time_limit_s=1.0)[b].startswith("unsupported: TF32")


def test_a_scaled_format_has_no_batched_product():
    device = SimpleNamespace(supports=lambda dtype: (True, ""))
    refusals = [_refusal(Product("matmul", batch, 16, 16, 16, "int8", "NN", 1536), device) for batch in (1, 2)]
    assert refusals == ["", "int8 has no batched product to time"]


def test_float64_operands_of_a_batch_use_all_of_their_bits():
    a_BMK = BatchedGemm(2, 32, 8, 32, "fp64", CPU).a_BMK
    assert (a_BMK.float().double() != a_BMK).float().mean() > 0.99


@pytest.mark.slow
def test_a_batch_is_verified_to_its_last_product():
    batch = BatchedGemm(3, 8, 8, 16, "fp32", CPU)
    assert batch.flops == 3 * 2 * 8 * 8 * 16
    assert batch.measure(time_limit_s=0.05)[1].passed

    class ForgetsTheLast(BatchedGemm):
        def __call__(self):
            return torch.bmm(self.a_BMK[:2], self.b_BKN[:2], out=self.c_BMN[:2])

    assert not ForgetsTheLast(3, 8, 8, 16, "fp32", CPU).measure(time_limit_s=0.05)[1].passed

    class RepeatsTheFirst(BatchedGemm):
        def __call__(self):
            return torch.bmm(self.a_BMK[[0, 0, 0]], self.b_BKN[[0, 0, 0]], out=self.c_BMN)

    assert not RepeatsTheFirst(3, 8, 8, 16, "fp32", CPU).measure(time_limit_s=0.05)[1].passed


@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_a_wrong_first_middle_or_last_product_of_a_batch_is_caught(wrong):
    class Wrong(BatchedGemm):
        def __call__(self):
            product = super().__call__()
            product[wrong] *= 2
            return product

    _, verification = Wrong(5, 8, 8, 8, "fp32", CPU).measure(cold=False, time_limit_s=0.02)
    assert not verification.passed


def test_a_linear_layer_and_an_activation_by_hand():
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    census = count_operations(lambda: torch.relu(layer(x)))
    assert census.operations == 2  # addmm and relu; the transposed weight is a view
    assert census.flops == {"fp32": 2 * 4 * 8 * 16} and census.weight_flops == census.total_flops
    assert census.product_bytes == 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert census.other_bytes == 4 * 2 * 4 * 16


def test_an_embedding_reads_its_rows_and_not_its_table():
    table, ids = torch.randn(1000, 8), torch.tensor([1, 2, 3])
    census = count_operations(lambda: torch.nn.functional.embedding(ids, table))
    assert census.other_bytes == 4 * 2 * 3 * 8 and census.total_flops == 0 and census.share_in("fp32") == 0


def test_the_residual_net_has_the_flops_it_says_without_a_device():
    with torch.device("meta"):
        net, images = resnet18(width=8).eval(), torch.empty(2, 3, 32, 32)
    assert count_operations(lambda: net(images)).total_flops == 2 * flops_per_image(width=8).forward


def test_products_with_weights_are_what_a_causal_mask_cannot_spare():
    config = TransformerConfig(vocab_size=64, context=16, width=32, heads=2, layers=2)
    with torch.device("meta"):
        model, tokens = TransformerLM(config).eval(), torch.zeros(3, 16, dtype=torch.int64)
    census = count_operations(lambda: model(tokens))
    longer, shorter = (flops_per_token(config, length).forward for length in (16, 8))
    assert census.total_flops == 3 * 16 * longer
    assert census.weight_flops == 3 * 16 * (2 * shorter - longer)  # attention grows with the length, nothing else does


@pytest.mark.parametrize("autocast, dtype", [(False, "fp32"), (True, "bf16")])
def test_the_dtype_is_that_in_which_products_were_done(autocast, dtype):
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        census = count_operations(lambda: layer(x))
    assert census.share_in(dtype) == 1.0


def test_an_autocast_region_that_misses_the_call_is_found():
    """The published mistake: bf16 was declared, and the timed call ran outside of the region."""
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert count_operations(lambda: layer(x)).share_in("bf16") == 0.0
