"""The estimate of a step's memory against what allocators really handed out: a CPU's here, an H200's as it was measured there."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure.memory_use.tensor_memory import ACTIVATIONS, GRADIENTS, allocated_peak, bytes_of, state_of
from hyperion.models import TransformerConfig, transformer
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.training import LanguageEngine
from hyperion.training.memory_estimate import (
    BLOCK_BYTES,
    _KernelBytes,
    estimate_memory,
    fewest_checkpointed,
    language_activations,
    largest_batch,
)
from hyperion.workloads.workloads import ImageSizes, LanguageSizes, random_batch, workload

CPU = detect_cpu()
H200 = replace(CPU, kind="cuda", arch="sm_90", name="NVIDIA H200")
RATE = {"learning_rate": 1e-3, "warmup_steps": 1}
GIB = 2**30


pytestmark = pytest.mark.usefixtures("one_thread")


def language(batch_size=4, sequence_length=32, model="lm_d64_h4_l2", vocabulary=512):
    return workload(
        LanguageSizes(model=model, sequence_length=sequence_length, batch_size=batch_size, vocabulary=vocabulary, **RATE)
    )


def images(batch_size=8, width=8):
    return workload(ImageSizes(width=width, batch_size=batch_size, **RATE))


def make(work, dtype, device):
    return work.engine(dtype, device, 0), random_batch(work, device, 0)


def measured(engine, batch) -> int:
    engine.train_step(batch)
    standing = bytes_of([*(t for tensors in state_of(engine.model, engine.optimizer).values() for t in tensors), *batch])
    return allocated_peak(CPU, lambda: engine.train_step(batch), standing)


EXACT, NEARLY = 1e-3, 0.05  # a CPU's matrix products need memory of their own
CELLS = {"lm fp32": (language(), "fp32"), "lm bf16": (language(), "bf16"), "lm fp16": (language(), "fp16")}


@pytest.mark.slow
@pytest.mark.parametrize("work, dtype", CELLS.values(), ids=CELLS)
def test_the_estimate_is_what_the_cpus_allocator_hands_out(work, dtype):
    made = functools.partial(make, work, dtype)
    assert estimate_memory(made, CPU).peak_bytes == pytest.approx(measured(*made(CPU)), rel=EXACT)


def test_a_frozen_parameter_has_no_gradient():
    def make_frozen(device):
        engine, batch = make(language(), "fp32", device)
        for parameter in engine.model.parameters():
            parameter.requires_grad_(False)
        trained = [parameter.requires_grad_(True) for parameter in list(engine.model.parameters())[-2:]]
        optimizer = torch.optim.AdamW(trained, fused=True)
        return LanguageEngine(engine.model, optimizer, engine.schedule, engine.precision, device), batch

    assert estimate_memory(make_frozen, CPU).peak_bytes == pytest.approx(measured(*make_frozen(CPU)), rel=EXACT)


def largest_workspace(model, images, dtype) -> int:
    """Bytes that this CPU's convolutions allocate beyond their results: an AVX2 CPU needs more than one with AVX-512."""
    shapes, hooks = [], []
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            hooks.append(module.register_forward_hook(lambda conv, given, result: shapes.append((conv, given[0], result))))
    with torch.no_grad(), torch.autocast("cpu", dtype):
        model(images)
    for hook in hooks:
        hook.remove()

    def workspace(conv, given, result):
        weight = conv.weight.detach().to(dtype)
        arguments = (torch.ones_like(result), given.to(dtype), weight, None, conv.stride, conv.padding, conv.dilation)
        gradients = []

        def backward():
            gradients.extend(torch.ops.aten.convolution_backward(*arguments, False, [0, 0], 1, [True, True, False]))

        peak = allocated_peak(CPU, backward)
        return peak - bytes_of([tensor for tensor in gradients if tensor is not None])

    return max(workspace(*shape) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size, width", [(8, 8), (32, 16)])
def test_of_convolutions_the_estimate_lacks_only_their_workspace(batch_size, width):
    made = functools.partial(make, images(batch_size, width), "bf16")
    engine, batch = made(CPU)
    workspace = largest_workspace(engine.model, batch[0], torch.bfloat16)
    lacking = measured(engine, batch) - estimate_memory(made, CPU).peak_bytes
    assert 0 <= lacking <= workspace


@pytest.mark.slow
def test_a_loss_in_chunks_is_foretold_as_it_runs(monkeypatch):
    def in_pieces(device):
        engine, batch = make(language(batch_size=8), "fp32", device)
        engine.model.loss_chunk_tokens = 64
        return engine, batch

    whole = estimate_memory(functools.partial(make, language(batch_size=8), "fp32"), CPU).peak_bytes
    monkeypatch.setattr(transformer, "LOSS_CHUNK_TOKENS", 64)
    in_chunks = estimate_memory(in_pieces, CPU).peak_bytes
    assert in_chunks < 0.85 * whole
    assert in_chunks == pytest.approx(measured(*in_pieces(CPU)), rel=0.02)


@pytest.mark.slow
def test_the_estimate_follows_a_loop_that_keeps_what_it_need_not():
    def hoarding(device):
        engine, batch = make(language(), "fp32", device)
        summed, kept = engine.summed_loss, []
        engine.summed_loss = lambda batch: kept.append(torch.ones(10**6, device="cpu")) or summed(batch)
        return engine, batch

    plain = estimate_memory(functools.partial(make, language(), "fp32"), CPU).peak_bytes
    assert estimate_memory(hoarding, CPU).peak_bytes - plain == 4 * 10**6  # of this step; that of the first was there before


@pytest.mark.slow
def test_what_an_h200_measured_is_foretold_without_one():
    """ResNet-18 in bf16, batch 512, torch 2.11: the tensors of the fullest moment, and max_memory_allocated."""
    estimate = estimate_memory(functools.partial(make, images(512, 64), "bf16"), H200)
    assert estimate.history.peak_bytes / GIB == pytest.approx(1.2457344, rel=1e-3)
    assert estimate.peak_bytes / GIB == pytest.approx(1.3128963, rel=0.1)
    assert estimate.phase == "backward"
    assert all(life.size % BLOCK_BYTES == 0 for life in estimate.history.lives)


def test_parts_are_those_of_the_model():
    work = language()
    estimate = estimate_memory(functools.partial(make, work, "fp32"), CPU)
    weights = 4 * work.parameters
    assert estimate.parts["parameters"] == estimate.parts[GRADIENTS] == weights
    assert estimate.parts["optimizer state"] == pytest.approx(2 * weights, rel=1e-3)  # and a counter for each parameter
    assert estimate.parts[ACTIVATIONS] == pytest.approx(work.activations(False).saved(), rel=0.02)
    assert sum(estimate.history.at(estimate.history.fullest()).values()) == estimate.peak_bytes


@pytest.mark.parametrize(("sixteen_bit", "each", "copies"), [(False, 4, 0), (True, 2, 2)])
def test_the_head_saves_its_inputs_its_logits_and_in_16_bits_a_copy_of_its_weight(sixteen_bit, each, copies):
    B, T, D, V = 2, 8, 16, 64
    config = TransformerConfig(vocab_size=V, context=T, width=D, heads=2, layers=2)
    head = language_activations(config, B, T, sixteen_bit).head
    assert head == 2 * each * B * T * D + 4 * B * T * V + copies * V * D


def test_the_backward_pass_of_flash_attention_needs_float32_gradients_of_the_queries_and_one_value_each():
    operator = SimpleNamespace(_schema=SimpleNamespace(name="aten::_scaled_dot_product_flash_attention_backward"))
    query = torch.empty(2, 3, 5, 8)
    assert _KernelBytes(None)(operator, (query, query)) == 4 * 2 * 3 * 5 * 8 + 4 * 2 * 3 * 5


@pytest.mark.parametrize("memory", [99, 100, 109, 110, 1234, 5000, 10**6])
@pytest.mark.parametrize("curved", [0, 0.02, -0.009])
def test_the_largest_batch_that_fits(memory, curved):
    asked = []

    def peak(batch):
        asked.append(batch)
        return 90 + 10 * batch + curved * batch**2

    best = largest_batch(peak, memory, at_most=500)
    assert len(asked) <= 12
    assert best == max((batch for batch in range(1, 501) if peak(batch) <= memory), default=0)


@pytest.mark.parametrize("memory", [50, 61, 99, 100, 105])
def test_the_fewest_checkpointed_blocks_that_fit(memory):
    def peak(checkpointed):
        return 100 - 4 * checkpointed

    fewest = fewest_checkpointed(peak, 12, memory + 2)
    assert fewest == min(number for number in range(13) if peak(number) <= memory + 2)
    with pytest.raises(HyperionError, match="with all 12 blocks checkpointed"):
        fewest_checkpointed(peak, 12, 51)


def laid_out(plan, device):
    work = language(8, 128, vocabulary=64)
    lay_out = functools.partial(parallelize, plan=plan, world=replace(world(), device=device))
    return work.engine("bf16", device, 0, lay_out), random_batch(work, device, 0)


def product_workspace(model, tokens, dtype) -> int:
    """Bytes that the largest weight gradient needs beyond its result: a CPU with AMX copies both operands to another layout."""

    def workspace(layer):
        gradient, x = (torch.ones(tokens, features, dtype=dtype) for features in (layer.out_features, layer.in_features))
        results = []
        peak = allocated_peak(CPU, lambda: results.append(gradient.mT @ x))
        return peak - bytes_of(results)

    return max(workspace(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear))


@pytest.mark.slow
def test_policies_are_foretold_as_they_run():
    peaks = []
    for policy in ("none", "selective", "every block"):
        made = functools.partial(laid_out, ParallelPlan(checkpointing=policy))
        peaks.append(estimate_memory(made, CPU).peak_bytes)
        engine, batch = made(CPU)
        lacking = measured(engine, batch) - peaks[-1]
        workspace = product_workspace(engine.model, batch[0].numel(), torch.bfloat16)
        assert -NEARLY * peaks[-1] <= lacking <= max(NEARLY * peaks[-1], workspace)
    assert peaks[0] > peaks[1] > peaks[2]
