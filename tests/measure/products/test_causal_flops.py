"""Limits from FLOPs count half of a causal attention: counted whole, a kernel that skips the masked half could beat its limit."""

from types import SimpleNamespace

import pytest
import torch

from hyperion import measure
from hyperion.experiments.baselines import language_model
from hyperion.experiments.scaling import rank_steps
from hyperion.experiments.scaling.scaled_training import ScaledTraining
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerLM, named_config
from hyperion.processes import world
from hyperion.training import choose_precision
from hyperion.workloads.workloads import LanguageSizes, workload

CPU = detect_cpu()
MODEL, LENGTH, VOCABULARY, BATCH = "lm_d64_h4_l2", 32, 96, 2
ATTENTION = "scaled_dot_product"


def counted(forward) -> tuple[float, float]:
    """FLOPs of a forward pass a token: all of them, and those of attention, which PyTorch counts whole."""
    with torch.no_grad():
        answer = measure.flops(forward)
    attention = sum(flops for name, flops in answer.by_operator.items() if ATTENTION in name)
    assert 0 < attention < answer.total
    return answer.total / (BATCH * LENGTH), attention / (BATCH * LENGTH)


@pytest.fixture(scope="module")
def whole_and_attention():
    model = TransformerLM(named_config(MODEL, context=LENGTH, vocab_size=VOCABULARY)).eval()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return counted(lambda: model(tokens))


def test_the_limit_of_a_workload_counts_half_of_attention(whole_and_attention):
    whole, attention = whole_and_attention
    work = workload(LanguageSizes(model=MODEL, batch_size=BATCH, sequence_length=LENGTH, vocabulary=VOCABULARY))
    assert work.flops.forward == whole
    assert work.least_flops == 3 * (whole - attention / 2)
    assert work.block_flops == whole - attention / 2 - 2 * VOCABULARY * 64


def test_the_limit_of_the_language_baseline_counts_half_of_attention(whole_and_attention):
    whole, attention = whole_and_attention
    config = named_config(MODEL, context=LENGTH, vocab_size=VOCABULARY)
    assert language_model._least_flops(config, LENGTH) == 3 * (whole - attention / 2)


@pytest.mark.parametrize("model", [MODEL, "random_llama_d64_l2"])
def test_the_limit_of_what_is_scaled_counts_half_of_attention(monkeypatch, model, whole_and_attention):
    context, options = SimpleNamespace(seed=0, device=CPU), SimpleNamespace(learning_rate=1e-3)
    # The plan of ranks needs a process group; FLOPs do not depend on it.
    monkeypatch.setattr(rank_steps, "parallelize", lambda model, plan, here: model)
    scaled = ScaledTraining("w", model, "ddp", BATCH, LENGTH, VOCABULARY)
    _, least = rank_steps._engine(context, options, scaled, world(), "ddp", choose_precision(CPU, "fp32"))
    if model == MODEL:
        whole, attention = whole_and_attention
        whole *= 3
    else:
        whole = rank_steps.lora_model(model, VOCABULARY, LENGTH, CPU)[1].forward_backward
        attention = 4 * 2 * LENGTH * 64  # two products of 2 FLOPs for each of two layers, 64 wide
    assert least == whole - 3 * attention / 2
