"""The Transformer is causal, is GPT-2, and cannot see what it has to predict."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hyperion.models.transformer as transformer
from hyperion.errors import HyperionError
from hyperion.models import TransformerConfig, TransformerLM, flops_per_token, named_config, parameter_count

SMALL = TransformerConfig(vocab_size=23, context=16, width=16, heads=4, layers=2)


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


def without_mask(monkeypatch):
    """Let every position see the whole sequence, as the toy model of many a tutorial does."""
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v))


def largest_change_before(model, inputs_BT, position):
    """Largest change of a logit before `position` when the token there is another one."""
    other_BT = inputs_BT.clone()
    other_BT[:, position] = (other_BT[:, position] + 1) % model.config.vocab_size
    with torch.no_grad():
        return (model(inputs_BT) - model(other_BT))[:, :position].abs().max().item()


@settings(max_examples=40, deadline=None)
@given(position=st.integers(1, 15), seed=st.integers(0, 1000), layers=st.integers(1, 3))
def test_a_later_token_changes_no_earlier_logit(position, seed, layers):
    torch.manual_seed(seed)
    model = TransformerLM(TransformerConfig(23, 16, 16, 4, layers))
    inputs_BT = torch.randint(0, 23, (2, 16))
    assert largest_change_before(model, inputs_BT, position) <= 1e-6


def test_the_causality_check_catches_a_missing_mask(monkeypatch):
    without_mask(monkeypatch)
    model = TransformerLM(SMALL)
    assert largest_change_before(model, torch.randint(0, 23, (2, 16)), 8) > 1e-6


def held_out_on_random_tokens(steps=250, V=16, T=12, B=64):
    """Mean loss and its standard error on unseen tokens after training on fresh independent uniform tokens each step."""
    model = TransformerLM(TransformerConfig(V, T, 32, 2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = torch.randint(0, V, (B, T + 1))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens = torch.randint(0, V, (2000, T + 1))
    with torch.no_grad():
        nll = model(tokens[:, :-1], tokens[:, 1:]).double()
    return nll.mean().item(), nll.std().item() / math.sqrt(nll.numel()), math.log(V)


@pytest.mark.slow
def test_no_leakage_on_independent_tokens():
    loss, standard_error, floor = held_out_on_random_tokens()
    assert loss >= floor - 4 * standard_error
    assert loss < floor + 0.1  # it did learn the uniform distribution, so the check had its chance to fail


@pytest.mark.slow
def test_the_leakage_check_catches_a_missing_mask(monkeypatch):
    without_mask(monkeypatch)
    loss, standard_error, floor = held_out_on_random_tokens()
    assert loss < floor - 4 * standard_error


def test_positions_matter():
    model = TransformerLM(SMALL)
    same_BT = torch.full((1, 16), 3)
    logits_TV = model(same_BT)[0]
    assert not torch.allclose(logits_TV[0], logits_TV[1])


def test_the_head_is_the_token_embedding():
    model = TransformerLM(SMALL)
    assert [name for name, p in model.named_parameters() if p.shape[0] == 23] == ["token_embedding.weight"]
    before_BTV = model(torch.tensor([[1, 2]]))
    with torch.no_grad():
        model.token_embedding.weight[22] += 1.0
    assert not torch.equal(before_BTV[..., 22], model(torch.tensor([[1, 2]]))[..., 22])


@pytest.mark.parametrize(
    "name, count", [("lm_d128_h4_l2", 6_846_080), ("gpt2_124m", 124_439_808), ("lm_d2048_h16_l18", 1_011_476_480)]
)
def test_parameter_counts(name, count):
    with torch.device("meta"):
        model = TransformerLM(named_config(name))
    assert parameter_count(model) == named_config(name).parameter_count == count


def test_gradients_are_finite_and_reach_every_parameter():
    model = TransformerLM(SMALL)
    tokens = torch.randint(0, 23, (4, 17))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, p in model.named_parameters():
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


def test_initial_loss_is_that_of_a_uniform_guess():
    tokens = torch.randint(0, 23, (64, 17))
    loss = TransformerLM(SMALL).loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(23), abs=0.02)


def test_float32_loss_and_gradient_agree_with_float64():
    model = TransformerLM(SMALL)
    exact = copy.deepcopy(model).double()
    tokens = torch.randint(0, 23, (4, 17))
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    logits_MV = exact(tokens[:, :-1]).flatten(0, 1)
    reference = F.cross_entropy(logits_MV, tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    loss.backward()
    reference.backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-3, atol=1e-6)


def test_ignored_targets_do_not_count():
    model = TransformerLM(SMALL)
    inputs_BT, targets_BT = torch.randint(0, 23, (2, 2, 16))
    targets_BT[:, :10] = -100
    nll_BT = model(inputs_BT, targets_BT)
    assert (nll_BT[:, :10] == 0).all()
    assert model.loss(inputs_BT, targets_BT).item() == pytest.approx(nll_BT[:, 10:].mean().item())


def test_chunks_change_neither_loss_nor_gradient(monkeypatch):
    model = TransformerLM(SMALL)
    tokens = torch.randint(0, 23, (4, 17))
    whole = model.loss(tokens[:, :-1], tokens[:, 1:])
    whole_grad = torch.autograd.grad(whole, list(model.parameters()))
    monkeypatch.setattr(transformer, "LOSS_CHUNK_TOKENS", 10)
    chunked = model.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(torch.autograd.grad(chunked, list(model.parameters())), whole_grad)


def test_flops_agree_with_torch():
    config = TransformerConfig(vocab_size=101, context=32, width=64, heads=4, layers=3)
    with torch.device("meta"):
        model = TransformerLM(config)
        tokens = torch.zeros(2, 33, dtype=torch.int64)
    for T in (32, 8):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss = model(tokens[:, :T], tokens[:, 1 : T + 1]).sum()
            forward = counter.get_total_flops()
            loss.backward()
        flops = flops_per_token(config, T)
        assert forward == flops.forward * 2 * T
        assert counter.get_total_flops() == flops.forward_backward * 2 * T


def test_agrees_with_transformers_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=23, n_positions=16, n_embd=16, n_head=4, n_layer=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ).eval()
    ours = TransformerLM(SMALL)
    source, state = theirs.transformer.state_dict(), {}
    state["token_embedding.weight"], state["position_embedding.weight"] = source["wte.weight"], source["wpe.weight"]
    state |= {f"final_norm.{part}": source[f"ln_f.{part}"] for part in ("weight", "bias")}
    for i in range(2):
        for part in ("weight", "bias"):
            fused = source[f"h.{i}.attn.c_attn.{part}"].chunk(3, dim=-1)  # GPT-2 keeps q, k, v in one matrix
            layers = dict(zip(("query", "key", "value"), fused, strict=True))
            layers["output"] = source[f"h.{i}.attn.c_proj.{part}"]
            state |= {f"blocks.{i}.attention.{name}.{part}": tensor.t() for name, tensor in layers.items()}
            state[f"blocks.{i}.attention_norm.{part}"] = source[f"h.{i}.ln_1.{part}"]
            state[f"blocks.{i}.mlp_norm.{part}"] = source[f"h.{i}.ln_2.{part}"]
            state[f"blocks.{i}.mlp.up.{part}"] = source[f"h.{i}.mlp.c_fc.{part}"].t()
            state[f"blocks.{i}.mlp.down.{part}"] = source[f"h.{i}.mlp.c_proj.{part}"].t()
    ours.load_state_dict(state)
    tokens = torch.randint(0, 23, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_bad_configurations_are_refused_with_a_next_step():
    with pytest.raises(HyperionError, match="not a multiple of heads"):
        TransformerConfig(vocab_size=5, context=4, width=10, heads=4, layers=1)
    with pytest.raises(HyperionError, match="layers is 0"):
        TransformerConfig(vocab_size=5, context=4, width=8, heads=4, layers=0)
    with pytest.raises(HyperionError, match="dropout is 1"):
        replace(SMALL, dropout=1.0)
    with pytest.raises(HyperionError, match="gpt2_124m"):
        named_config("gpt5")
    with pytest.raises(HyperionError, match="longer than the model's context"):
        TransformerLM(SMALL)(torch.zeros(1, 17, dtype=torch.int64))


class _Drawn(TorchDispatchMode):
    """Shares of zeros in the masks that are drawn, by their sizes."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func._schema.name == "aten::bernoulli_":
            self.masks.append((tuple(out.shape), float((out == 0).float().mean())))
        return out


def test_dropout_stands_at_the_embedding_and_at_each_branch_and_in_training_alone():
    plain, tokens = TransformerLM(SMALL), torch.randint(0, 23, (64, 17))
    dropping = TransformerLM(replace(SMALL, dropout=0.3))
    dropping.load_state_dict(plain.state_dict())
    pair = tokens[:, :-1], tokens[:, 1:]
    with _Drawn() as drawn, torch.no_grad():
        before = torch.get_rng_state()
        expected = plain(*pair)
        assert torch.equal(expected, dropping.eval()(*pair))
        assert torch.equal(before, torch.get_rng_state()) and not drawn.masks, "nothing is drawn where nothing drops"
        changed = dropping.train()(*pair)
    assert not torch.equal(changed, expected)
    assert [shape for shape, _ in drawn.masks] == [(64, 16, 16)] * (1 + 2 * SMALL.layers)
    assert all(share == pytest.approx(0.3, abs=0.02) for _, share in drawn.masks)


@pytest.mark.slow
def test_compiled_it_is_the_same_function_with_the_same_gradients():
    """Compiled, query, key and value are one product, and GELU is written with an exponential."""
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(vocab_size=97, context=16, width=32, heads=4, layers=2)).double()
    tokens = torch.randint(97, (2, 2, 16))
    losses, gradients = [], []
    for loss_of in (model.loss, torch.compile(model.loss, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        losses.append(loss_of(*tokens))
        losses[-1].backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-15)
