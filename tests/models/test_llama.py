"""Random Llamas by name: shapes, counts and FLOPs are the real ones, padding is never seen, a foreign tokenizer is refused."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.models import (
    LlamaLM,
    layout_of,
    llama_flops_per_token,
    llama_lora_parameter_count,
    llama_parameter_count,
    load_llama,
    parameter_count,
    random_llama_config,
    require_vocabulary,
)
from hyperion.training import add_lora, expected_lora_parameters
from hyperion.training.lora import ATTENTION

NAME, V = "random_llama_d64_l2", 300


@pytest.fixture
def model():
    torch.manual_seed(0)
    return load_llama(NAME, vocab_size=V)


def tokens(*shape):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


def test_the_large_one_has_tinyllamas_parameters():
    config = random_llama_config("random_llama_1b", 32_000)
    assert llama_parameter_count(config) == 1_100_048_384
    assert llama_lora_parameter_count(config, 16, ATTENTION) == 22 * 16 * (4096 + 2304 + 2304 + 4096)


def test_counts_are_the_models(model):
    assert llama_parameter_count(model.config) == parameter_count(model)
    assert llama_lora_parameter_count(model.config, 4, ATTENTION) == expected_lora_parameters(model, 4)
    tied = random_llama_config(NAME, V)
    tied.tie_word_embeddings = True
    assert llama_parameter_count(tied) == parameter_count(model) - V * 64


@pytest.mark.parametrize("rank", [0, 4], ids=["all parameters", "LoRA"])
def test_flops_are_those_that_torch_counts(model, rank):
    model.set_attn_implementation("eager")  # the CPU's fused attention is not counted
    lm = LlamaLM(add_lora(model, rank) if rank else model)
    loss = lambda: lm(tokens(3, 16), tokens(3, 16)).sum()  # noqa: E731
    with FlopCounterMode(display=False) as forward:
        loss()
    with FlopCounterMode(display=False) as both:
        loss().backward()
    expected = llama_flops_per_token(model.config, 16, rank, ATTENTION if rank else ())
    # Some versions of transformers compute the rotary angles by a product too: 2 H T / 2 FLOPs per batch, not in the formula.
    assert forward.get_total_flops() == pytest.approx(48 * expected.forward, rel=1e-4)
    assert both.get_total_flops() == pytest.approx(48 * expected.forward_backward, rel=1e-4)


def test_a_step_of_lora_costs_two_thirds_of_a_full_one():
    config = random_llama_config("random_llama_1b", 50257)
    lora, full = llama_flops_per_token(config, 40, 16, ATTENTION), llama_flops_per_token(config, 40)
    assert lora.forward_backward / full.forward_backward == pytest.approx(2 / 3, rel=0.01)


def test_padding_on_the_right_changes_no_token_before_it_and_costs_nothing(model):
    lm, short = LlamaLM(model), tokens(2, 6)
    padded = torch.cat((short, torch.full((2, 5), 7)), dim=1)
    torch.testing.assert_close(lm(padded)[:, :6], lm(short), rtol=1e-5, atol=1e-5)
    targets = torch.cat((tokens(2, 6), torch.full((2, 5), IGNORE_INDEX)), dim=1)
    nll = lm(padded, targets)
    assert nll.dtype == torch.float32 and (nll[:, 6:] == 0).all() and (nll[:, :6] > 0).all()
    expected = torch.nn.functional.cross_entropy(lm(short).flatten(0, 1), targets[:, :6].flatten(), reduction="sum")
    torch.testing.assert_close(nll.sum(), expected)


@pytest.mark.parametrize("rank", [0, 4], ids=["plain", "with adapters"])
def test_the_layout_names_decoder_layers_and_holds_every_parameter_once(model, rank):
    lm = LlamaLM(add_lora(model, rank) if rank else model)
    layout = layout_of(lm)
    assert [type(lm.get_submodule(name)).__name__ for name in layout.blocks] == ["LlamaDecoderLayer"] * 2
    held = [p for name in layout.stem + layout.blocks + layout.head for p in lm.get_submodule(name).parameters()]
    assert {id(p) for p in held} == {id(p) for p in lm.parameters()} and len(held) == len(list(lm.parameters()))


def test_sixteen_bit_weights_keep_the_angles_of_the_rotary_embedding_in_float32():
    model = load_llama(NAME, vocab_size=V, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_same_seed_gives_the_same_weights():
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(load_llama(NAME, vocab_size=V))
    for a, b in zip(*(m.parameters() for m in made), strict=True):
        assert torch.equal(a, b)


def test_a_tokenizer_of_another_model_is_refused(model):
    require_vocabulary(V, model)
    require_vocabulary(V - 10, model)  # rows beyond the tokenizer: padded to a round number
    with pytest.raises(HyperionError, match=f"largest id is 50256, but the model's embedding has {V} rows") as caught:
        require_vocabulary(50257, model)
    assert "tokenizer from the folder of the model" in caught.value.next_step
    with pytest.raises(HyperionError, match="it was trained with another tokenizer"):
        require_vocabulary(32_000, load_llama(NAME, vocab_size=50257, device="meta"))
    model.config.vocab_size = V + 1
    with pytest.raises(HyperionError, match=f"has {V} rows, but the configuration says {V + 1}"):
        require_vocabulary(V, model)


@pytest.mark.parametrize("name, size, message", [("random_llama_9b", 10, "no random Llama"), (NAME, None, "vocab_size is 0")])
def test_unknown_names_and_empty_vocabularies_are_refused(name, size, message):
    with pytest.raises(HyperionError, match=message):
        load_llama(name, vocab_size=size)
