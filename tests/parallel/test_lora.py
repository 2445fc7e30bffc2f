"""LoRA trains what its formula counts and nothing else."""

import pytest
import torch
from torch import nn

from hyperion.errors import HyperionError
from hyperion.training.lora import add_lora, expected_lora_parameters, trainable_parameter_count
from tests.parallel.small import tiny_llama


def test_trainable_count_is_the_formula_and_the_base_stands_still():
    base = tiny_llama()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    tokens_BT = torch.arange(12).view(2, 6)
    expected = base(tokens_BT).logits
    model = add_lora(base, rank=4, alpha=8)
    # q and o: 32 x 32; k and v: 16 x 32 (two of four heads); two layers
    assert trainable_parameter_count(model) == expected_lora_parameters(model, 4) == 2 * 2 * 4 * (32 + 32 + 32 + 16)
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    torch.testing.assert_close(model(tokens_BT).logits, expected)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(input_ids=tokens_BT, labels=tokens_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(tokens_BT).logits - expected).abs().max() > 0.01
    after = {name.replace(".base_layer", ""): value for name, value in model.get_base_model().state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_adapters_of_a_16_bit_base_are_float32():
    model = add_lora(tiny_llama().bfloat16(), rank=2)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_any_module_with_linear_layers_will_do():
    model = add_lora(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), rank=2, targets=("0", "2"))
    assert trainable_parameter_count(model) == 2 * (6 + 5) + 2 * (5 + 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("query",)}, "no linear layer is named query"),
        ({"targets": ("q_proj", "w")}, "is named w"),
        ({"rank": 17}, "rank 17 does not fit the layer of 16 x 32"),
        ({"rank": 0}, "rank 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(HyperionError, match=message):
        add_lora(tiny_llama(), **options)
