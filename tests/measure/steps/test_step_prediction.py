"""Predicted step times: by hand on toy numbers, on really captured steps, and against steps that an H200 did."""

import math
from functools import cache
from statistics import median

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.measure.products.dispatch import Call, Product, TensorShape, products_of, shapes_only
from hyperion.measure.steps.step_prediction import (
    CompiledHost,
    MemoryStream,
    ProductRates,
    StepCeilings,
    predict_step,
    training_calls,
)
from hyperion.models import reference_model
from hyperion.workloads.reference_steps import update_of


def matmul(m, n, k, batch=1, dtype="fp32", itemsize=4):
    return Product("matmul", batch, m, n, k, dtype, "NT", itemsize * batch * (m * k + k * n + m * n))


def call(name, inputs, outputs, moves=True, **arguments):
    return Call(name, arguments, inputs, outputs, moves)


def vector(elements):
    return TensorShape((elements,), (1,), "fp32", 4, "cpu")


def matrix(rows, columns):
    return TensorShape((rows, columns), (columns, 1), "fp32", 4, "cpu")


def test_a_measured_product_is_predicted_at_its_own_rate():
    rates = ProductRates.fit([(1024, 1024, 1024, 100.0), (4096, 4096, 4096, 700.0)], units=132)
    assert rates.tflops(matmul(1024, 1024, 1024)) == pytest.approx(100.0)
    assert rates.tflops(matmul(4096, 4096, 4096)) == pytest.approx(700.0)


def test_between_measured_lengths_of_k_the_rate_is_interpolated_over_their_logarithm():
    rates = ProductRates.fit([(256, 256, 64, 10.0), (256, 256, 1024, 40.0)], units=1)
    assert rates.tflops(matmul(256, 256, 256)) == pytest.approx(20.0)
    assert rates.tflops(matmul(256, 256, 8)) == pytest.approx(10.0)
    assert rates.tflops(matmul(256, 256, 10**6)) == pytest.approx(40.0)


def test_idle_units_slow_a_product_down_unless_its_batch_or_its_split_k_fills_them():
    rates = ProductRates.fit([(640, 640, 512, 100.0)], units=100)
    assert rates.tflops(matmul(64, 64, 512)) == pytest.approx(1.0)
    assert rates.tflops(matmul(64, 64, 512, batch=100)) == pytest.approx(100.0)
    assert rates.tflops(matmul(64, 64, 512 * 64)) == pytest.approx(64.0)
    assert rates.tflops(matmul(64, 64, 1023)) == pytest.approx(1.0)  # half of it is shorter than what was measured


def test_no_rates_are_no_rates():
    with pytest.raises(HyperionError, match="no measured rate"):
        ProductRates.fit([], units=1)


def test_a_stream_is_a_latency_and_a_bandwidth():
    stream = MemoryStream.fit([(size, size / (5e-6 + size / 2e12) / 1e9) for size in (1e6, 1e7, 1e9)])
    assert stream.latency_s == pytest.approx(5e-6) and stream.bandwidth_gb_s == pytest.approx(2000.0)
    with pytest.raises(HyperionError, match="the number of measured sizes is 1, but"):
        MemoryStream.fit([(1e6, 100.0), (1e6, 101.0)])


@pytest.mark.filterwarnings("error")
def test_times_that_do_not_grow_give_an_infinite_bandwidth():
    stream = MemoryStream.fit([(size, size / 5e-6 / 1e9) for size in (1e6, 1e7, 1e8)])
    assert stream.latency_s == pytest.approx(5e-6) and stream.bandwidth_gb_s == math.inf


def toy_ceilings(**changes):
    rates = ProductRates.fit([(64, 64, 64, 1.0)], units=1)
    given = {"products": {"fp32": rates}, "memory": MemoryStream(100.0, 2e-6), "operator_time_s": 1e-5, "overlapped": True}
    return StepCeilings(**given | changes)


TOY = (
    call("mm", (matrix(640, 640), matrix(640, 640)), (matrix(640, 640),), self=matrix(640, 640), mat2=matrix(640, 640)),
    call("t", (matrix(640, 640),), (matrix(640, 640),), moves=False),
    call("relu", (vector(250_000),), (vector(250_000),)),
    call("_fused_adamw_", (vector(1_000_000),), (vector(250_000),)),
)


def test_a_step_by_hand():
    found = predict_step(TOY, toy_ceilings())
    assert found.products_s == pytest.approx(2 * 640**3 / 1e12)
    assert found.memory_s == pytest.approx(2e6 / 100e9) and found.optimizer_s == pytest.approx(5e6 / 100e9)
    assert found.latency_s == pytest.approx(2 * 2e-6)  # of relu and update: a product's rate holds its own
    assert found.host_s == pytest.approx(3 * 1e-5) and found.operators == 3  # the view costs no launch
    assert found.total_s == found.device_s == pytest.approx(sum((524.288e-6, 20e-6, 50e-6, 4e-6)))
    assert "0.5243 GFLOP" in found.basis and "the device's time decides" in found.basis


def test_compiled_code_moves_what_its_products_move_and_launches_two_kernels_for_each():
    relus = (TOY[0], TOY[2], TOY[2], TOY[2], TOY[3])
    found = predict_step(relus, toy_ceilings(), CompiledHost(4e-6))
    assert found.memory_s == pytest.approx(3 * 4 * 640**2 / 100e9)
    assert found.memory_s < predict_step(relus, toy_ceilings()).memory_s == pytest.approx(6e6 / 100e9)
    assert found.host_s == pytest.approx(2 * 4e-6 + 1e-5) and found.latency_s == pytest.approx(2 * 2e-6)
    one = predict_step(TOY, toy_ceilings(), CompiledHost(4e-6))  # fused code moves no more than eager code
    assert one.memory_s == pytest.approx(2e6 / 100e9) and "fused operators between them" in one.basis


def test_each_compiled_block_is_entered_and_pays_for_it():
    entered = predict_step(TOY, toy_ceilings(), CompiledHost(4e-6, blocks=3, entry_time_s=1e-3))
    assert entered.host_s == pytest.approx(2 * 4e-6 + 3e-3 + 1e-5) and "3 blocks entered for 1e+03 us" in entered.basis
    assert entered.total_s == entered.host_s, "and so the host decides"


def test_a_step_costs_the_host_something_once_whether_compiled_or_not():
    once = toy_ceilings(step_overhead_s=1e-2)
    for compiled in (None, CompiledHost(4e-6)):
        found, without = (predict_step(TOY, ceilings, compiled) for ceilings in (once, toy_ceilings()))
        assert found.host_s == pytest.approx(without.host_s + 1e-2) and "1e+04 us once" in found.basis
        assert "once" not in without.basis


def test_convolutions_and_batch_norms_have_a_cost_of_their_own():
    names = ("native_batch_norm", "relu", "native_batch_norm_backward")
    calls = [call(name, (vector(1000),), (vector(1000),)) for name in names]
    found = predict_step(calls, toy_ceilings(convolution_time_s=7e-5))
    assert found.host_s == pytest.approx(2 * 7e-5 + 1e-5) and "2 convolutions and batch norms of 70 us" in found.basis
    assert predict_step(calls, toy_ceilings()).host_s == pytest.approx(3e-5)


def test_the_slower_of_host_and_device_decides_and_on_a_cpu_they_add_up():
    waiting = predict_step(TOY, toy_ceilings(operator_time_s=1e-3))
    assert waiting.total_s == waiting.host_s == pytest.approx(3e-3) and "the host's time decides" in waiting.basis
    alone = predict_step(TOY, toy_ceilings(overlapped=False))
    assert alone.latency_s == 0.0 and alone.total_s == pytest.approx(alone.products_s + 70e-6 + 3e-5)


def test_a_product_that_moves_more_than_it_computes_is_bound_by_memory():
    thin = call("mm", (matrix(10_000, 1), matrix(1, 64)), (matrix(10_000, 64),), self=matrix(10_000, 1), mat2=matrix(1, 64))
    found = predict_step([thin], toy_ceilings(memory=MemoryStream(1.0, 0.0)))
    assert found.products_s == pytest.approx(4 * (10_000 + 64 + 640_000) / 1e9)


def test_a_dtype_without_rates_and_a_step_without_work_are_refused():
    with pytest.raises(HyperionError, match="no measured rate of fp32"):
        predict_step(TOY, toy_ceilings(products={}))
    with pytest.raises(HyperionError, match="the step runs no operator that reads or writes memory"):
        predict_step(lambda: None, toy_ceilings())


@pytest.mark.parametrize("fused, arrays", [(True, 4 + 3), (False, None)])
def test_a_fused_update_reads_and_writes_what_the_formula_of_adamw_says(fused, arrays):
    weights = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([weights], lr=1e-3, fused=fused, foreach=not fused)
    weights.grad = torch.ones(1000)
    optimizer.step()
    found = predict_step(optimizer.step, toy_ceilings(memory=MemoryStream(1.0, 0.0)))
    if fused:
        assert found.optimizer_s == pytest.approx(arrays * 4000 / 1e9, rel=1e-2)  # and a step counter
    else:
        assert found.optimizer_s > 7 * 4000 / 1e9  # operator by operator


@cache
def captured(name, batch, dtype):
    """A reference model's training step, dispatched without being computed: what chapter 1.2 times."""
    model = reference_model(name)
    with torch.device("meta"):
        module = model.build()
    layout = torch.channels_last if len(model.sample_shape) == 3 else torch.preserve_format
    if layout is torch.channels_last:
        module.to(memory_format=layout)
    with shapes_only(module):
        inputs = torch.empty(batch, *model.sample_shape).contiguous(memory_format=layout)
        targets = model.targets(inputs, torch.Generator())

        def loss():
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                return model.loss(module(inputs), targets)

        return training_calls(loss, update_of(model).make(module))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50_w16_64px", "vit_d192_l4_64px", "encoder_d128_h2_l2"])
def test_a_captured_step_has_the_flops_of_its_model_and_moves_its_weights(name):
    model, calls = reference_model(name), captured(name, 2, "fp32")
    products = [product for one in calls for product in products_of(one) or ()]
    # Attention works its scores out anew in the backward, which the model's count by convention leaves out.
    scores = sum(p.flops for p in products if p.kind == "attention") / 7
    assert sum(p.flops for p in products) == pytest.approx(2 * model.flops.forward_backward + scores, rel=1e-3)
    found = predict_step(calls, toy_ceilings())
    traffic = update_of(model).traffic_bytes * model.parameter_count
    assert found.optimizer_s == pytest.approx(traffic / 100e9, rel=0.02)


# Measured on an H200 (results/reference/h200x4, November 2026): TFLOPS of square products by size, warm caches.
H200_TFLOPS = {
    "fp32": {1024: 34.4, 2048: 48.5, 4096: 50.4, 8192: 50.8},
    "bf16": {1024: 237.1, 2048: 635.4, 4096: 704.7, 8192: 692.7},
}
# GB/s of copy (8 bytes an element) and add (12) by millions of elements.
H200_COPY = {1: 919, 10: 3311, 20: 3782, 50: 4057, 100: 4154, 200: 4210, 500: 4271}
H200_ADD = {1: 1537, 10: 4032, 20: 4313, 50: 4357, 100: 4375, 200: 4394, 500: 4401}
# Eager inference of two models there, of 69 operators in 1.093 ms and of 54 in 1.202 ms: 19 us each in the mean.
H200_OPERATOR_S = (1.093e-3 / 69 + 1.202e-3 / 54) / 2
H200_STEPS_S = {
    ("resnet50", "fp32"): 41.93e-3,
    ("resnet50", "bf16"): 13.42e-3,
    ("vit_b_16", "fp32"): 95.30e-3,
    ("vit_b_16", "bf16"): 17.83e-3,
    ("encoder_d512_h8_l6", "fp32"): 6.80e-3,
    ("encoder_d512_h8_l6", "bf16"): 7.64e-3,
}


@pytest.mark.slow
def test_steps_of_an_h200_are_foretold_from_its_ceilings_within_a_fifth_in_the_median():
    streams = [(e * 8e6, gb_s) for e, gb_s in H200_COPY.items()] + [(e * 12e6, gb_s) for e, gb_s in H200_ADD.items()]
    rates = {
        dtype: ProductRates.fit([(size, size, size, tflops) for size, tflops in points.items()], units=132)
        for dtype, points in H200_TFLOPS.items()
    }
    ceilings = StepCeilings(rates, MemoryStream.fit(streams), H200_OPERATOR_S, overlapped=True)
    errors = [
        predict_step(captured(name, 32, dtype), ceilings).total_s / time_s - 1 for (name, dtype), time_s in H200_STEPS_S.items()
    ]
    assert median(abs(error) for error in errors) <= 0.20 and max(abs(error) for error in errors) <= 0.45


def test_a_fused_norm_is_no_update():
    calls = [call(name, (vector(1000),), (vector(1000),)) for name in ("_fused_rms_norm", "_fused_adamw_")]
    found = predict_step(calls, toy_ceilings())
    assert found.memory_s == found.optimizer_s == pytest.approx(8000 / 100e9)
