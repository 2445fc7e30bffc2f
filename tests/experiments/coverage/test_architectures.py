"""Architectures in tiny form: right models pass over seeds, and planted faults are found."""

from dataclasses import replace

import pytest
import torch

from hyperion.chapter import load_profile
from hyperion.experiments.coverage import architecture_checks, architectures
from hyperion.experiments.coverage.architecture_checks import TinyModel, check_derivatives, check_generation, check_gradients
from hyperion.experiments.coverage.architecture_configs import ARCHITECTURES
from hyperion.experiments.coverage.claims import architecture_claims
from hyperion.experiments.coverage.figures import family_table, steps_of
from tests.chapter.toy import perform, toy_context

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba", "t5"])
def test_right_models_pass_over_seeds(name):
    for seed in range(3):
        tiny = TinyModel.build(name, CPU, seed)
        assert max(check_derivatives(tiny, seed, 2).values()) <= 1
        found = check_generation(tiny, 4, seed, 2)
        assert found.wrong == 0 and found.ratio <= 1 and found.need_context > 0
        assert found.tokens == 8 and not check_gradients(tiny).bad


def test_the_reference_stays_in_float64():
    with architecture_checks.float64_arithmetic():
        x = torch.full((3,), 1 / 3, dtype=torch.float64).to(torch.float32)
        assert x.dtype == torch.float64 and x[0] == 1 / 3 and torch.ones(2).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32 and torch.ones(2, dtype=torch.float64).float().dtype == torch.float32


def test_a_model_that_is_slightly_wrong_is_found():
    tiny = TinyModel.build("llama", CPU, 0)
    attention = tiny.model.model.layers[0].self_attn
    attention.scaling *= 1.01
    ratios = check_derivatives(tiny, 0, 2)
    assert ratios["forward"] > 1 and ratios["backward"] > 1


def test_a_mask_that_sees_one_position_ahead_is_found(monkeypatch):
    tiny = TinyModel.build("gpt2", CPU, 0)
    attend = torch.nn.functional.scaled_dot_product_attention

    def ahead(query, key, value, attn_mask=None, is_causal=False, **options):
        if query.dtype == torch.float64 or query.shape[2] == 1:
            return attend(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
        return attend(query, key, value, attn_mask=mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ahead)
    assert check_derivatives(tiny, 0, 2)["forward"] > 1


def test_a_generation_that_ignores_the_cache_is_found(monkeypatch):
    tiny = TinyModel.build("llama", CPU, 0)
    prepare = tiny.model.prepare_inputs_for_generation

    def forgetful(input_ids, **options):
        given = prepare(input_ids, **options)
        if given["input_ids"].shape[1] == 1:  # a step after the first one: only the last token is left
            given["past_key_values"] = type(given["past_key_values"])(config=tiny.model.config)
            given["attention_mask"] = None
        return given

    monkeypatch.setattr(tiny.model, "prepare_inputs_for_generation", forgetful)
    found = check_generation(tiny, 4, 0, 2)
    assert found.wrong > 0 and found.ratio > 1


def test_gradients_that_are_missing_or_not_finite_are_named():
    tiny = TinyModel.build("dinov2", CPU, 0)
    assert check_gradients(tiny).missing == {"dinov2.embeddings.mask_token": "its module runs without it"}
    tiny = TinyModel.build("llama", CPU, 0)
    tiny.model.unused = torch.nn.Linear(2, 2)
    tiny.model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    tiny.model.model.embed_tokens.weight.requires_grad_(False)
    found = check_gradients(tiny)
    assert found.bad == ["model.norm.weight"] and found.missing["unused.weight"] == "its module is not called"
    assert found.missing["model.embed_tokens.weight"] == "does not require a gradient"


def test_rows_count_what_passes_and_name_what_fails(tmp_path, monkeypatch):
    llama = ARCHITECTURES["llama"]
    broken = replace(llama, sizes=llama.sizes | {"num_attention_heads": 3, "num_key_value_heads": 2})
    monkeypatch.setitem(ARCHITECTURES, "llama", broken)
    sizes = {"names": ["llama", "bert", "resnet"], "new_tokens": 2, "probes": 1}
    rows = perform(toy_context("architectures", sizes, tmp_path), tmp_path).rows
    total = {row.params["what"]: row.value for row in rows if row.variant == architectures.ALL}
    assert total == {architectures.PASSED: 2, "fail in a step": 1}
    steps = {(line["architecture"], line["step"]): line["result"] for line in steps_of(rows)}
    assert steps["bert", "generate"].startswith(architectures.NO_GENERATION)
    assert any(result.startswith("failed") for (name, _), result in steps.items() if name == "llama")
    assert [line["pass"] for line in family_table(rows).to_dict("records")] == ["0 of 1", "1 of 1", "1 of 1"]
    claims = architecture_claims(rows)
    assert claims[0][1].startswith("llama") and claims[-1] == (False, "2 architectures pass")


@pytest.mark.slow
def test_every_architecture_can_be_built_and_most_can_generate():
    built = {name: TinyModel.build(name, CPU, 0).model for name in ARCHITECTURES}
    assert len(built) >= 20 and all(0 < sum(p.numel() for p in model.parameters()) < 100_000 for model in built.values())
    assert sum(model.can_generate() for model in built.values()) >= 20
    families = {one.family for one in ARCHITECTURES.values()}
    assert families >= {"decoder", "encoder", "encoder-decoder", "mixture of experts", "state space", "vision", "audio"}


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_the_sizes_of_the_profiles_are_valid(profile):
    options = architectures.ArchitecturesOptions.parse(load_profile(profile).sizes("architectures"), "architectures")
    chosen = options.names or tuple(ARCHITECTURES)
    assert len(set(chosen)) == len(chosen) >= 20 and options.new_tokens > 1
    assert {ARCHITECTURES[name].family for name in chosen} == {one.family for one in ARCHITECTURES.values()}
    assert profile == "smoke" or set(chosen) == set(ARCHITECTURES)
