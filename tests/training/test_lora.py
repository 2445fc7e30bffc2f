"""LoRA trains what its formula counts; adapters saved, loaded and merged compute the same, and others are refused untouched."""

import json
import pickle
import shutil

import pytest
import torch
from torch import nn

from hyperion.checkpoints import CheckpointError
from hyperion.errors import HyperionError
from hyperion.models import LlamaLM, load_llama
from hyperion.training import frozen_sha256, load_adapter, save_adapter
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
        ({"rank": 17}, "rank 17 is not possible for a layer of shape 16 x 32"),
        ({"rank": 0}, "rank 0"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(HyperionError, match=message):
        add_lora(tiny_llama(), **options)


TOKENS = torch.arange(12).view(2, 6)


def adapted(seed: int = 0, **options) -> LlamaLM:
    """A small Llama with adapters that do something."""
    torch.set_num_threads(1)
    model = LlamaLM(add_lora(tiny_llama(seed), **{"rank": 4, "alpha": 8} | options))
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.fixture
def trained() -> LlamaLM:
    return adapted()


@pytest.fixture
def saved(trained, tmp_path):
    return save_adapter(tmp_path / "adapters", 7, trained, frozen_sha256(trained))


def test_saved_loaded_and_merged_compute_the_same(trained, saved):
    fresh = LlamaLM(add_lora(tiny_llama(), rank=4, alpha=8))
    assert not torch.equal(fresh(TOKENS), trained(TOKENS))
    load_adapter(fresh, saved, frozen_sha256(fresh))
    assert torch.equal(fresh(TOKENS), trained(TOKENS))
    merged = fresh.lm.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, trained(TOKENS), rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())


def test_peft_itself_reads_the_folder_and_the_base_is_not_in_it(trained, saved):
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(tiny_llama(), saved)
    assert torch.equal(theirs(input_ids=TOKENS).logits, trained(TOKENS))
    assert saved.name == "step-00000007"
    adapters = sum(p.numel() * 4 for p in trained.parameters() if p.requires_grad)
    assert adapters < (saved / "adapter_model.safetensors").stat().st_size < 2 * adapters


def test_the_hash_is_the_bases_with_or_without_adapters_and_sees_one_bit(trained):
    base = tiny_llama()
    assert frozen_sha256(base) == frozen_sha256(LlamaLM(base)) == frozen_sha256(trained)
    with torch.no_grad():
        base.model.norm.weight[0] += 2**-20
    assert frozen_sha256(base) != frozen_sha256(trained)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rank": 2}, "has r 4, but the model's adapters have 2"),
        ({"alpha": 16}, "has lora_alpha 8, but the model's adapters have 16"),
        ({"targets": ("q_proj", "v_proj")}, "has target_modules"),
    ],
)
def test_an_adapter_of_another_rank_scale_or_layers_is_refused(saved, options, message):
    other = adapted(**options)
    before = other(TOKENS)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(other, saved)
    assert caught.value.next_step.startswith("call add_lora") and torch.equal(other(TOKENS), before)


def test_an_adapter_of_another_shape_or_base_is_refused(saved, tmp_path):
    wide = LlamaLM(add_lora(load_llama("random_llama_d64_l2", vocab_size=64), rank=4, alpha=8))
    with pytest.raises(CheckpointError, match="trained on a model of another shape"):
        load_adapter(wide, saved)
    other = adapted(seed=1)
    load_adapter(other, saved)
    with pytest.raises(CheckpointError, match="was trained on weights with sha256"):
        load_adapter(other, saved, frozen_sha256(other))
    with pytest.raises(CheckpointError, match="no adapters"):
        save_adapter(tmp_path / "none", 1, tiny_llama(), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 100), "instead of|cut off"),
        (lambda f: [(f / "manifest.json").unlink(), (f / "adapter_model.safetensors").write_bytes(b"x" * 100)], "holds no"),
        (
            lambda f: [
                (f / "manifest.json").unlink(),
                (f / "adapter_model.safetensors").unlink(),
                (f / "adapter_model.bin").write_bytes(pickle.dumps({})),
            ],
            "adapter_model.bin is a pickle",
        ),
        (lambda f: [(f / "manifest.json").unlink(), (f / "adapter_config.json").write_text("[]")], "not a JSON object"),
        (
            lambda f: [(f / "manifest.json").unlink(), (f / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA"}))],
            "has peft_type LOHA",
        ),
    ],
    ids=["edited", "garbage without manifest", "pickle", "no config", "another method"],
)
def test_damage_and_pickles_are_refused(saved, spoil, message):
    spoil(saved)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(LlamaLM(add_lora(tiny_llama(), rank=4, alpha=8)), saved)


def test_a_folder_of_pefts_own_needs_no_manifest(trained, tmp_path):
    trained.lm.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    fresh = LlamaLM(add_lora(tiny_llama(), rank=4, alpha=8))
    load_adapter(fresh, tmp_path / "theirs")
    assert torch.equal(fresh(TOKENS), trained(TOKENS))
    shutil.rmtree(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="adapter_config.json cannot be read"):
        load_adapter(fresh, tmp_path / "theirs")
