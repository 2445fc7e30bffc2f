"""Random Llamas by name: shapes, counts and FLOPs are the real ones, padding is never seen, a foreign tokenizer is refused."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from hyperion.data.packing import IGNORE_INDEX
from hyperion.data.store.folders import MARK
from hyperion.errors import HyperionError
from hyperion.models import (
    LlamaLM,
    layout_of,
    llama_flops_per_token,
    llama_lora_parameter_count,
    llama_parameter_count,
    load_llama,
    local_llama,
    parameter_count,
    random_llama_config,
    require_vocabulary,
)
from hyperion.models.llama import INDEX, verify_llama_folder
from hyperion.training import add_lora, expected_lora_parameters
from hyperion.training.lora import ATTENTION

pytestmark = pytest.mark.usefixtures("data_home")

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
def test_losses_and_gradients_are_those_of_transformers(model, rank):
    own = add_lora(model, rank) if rank else model
    if rank:  # B is zero at first, so A has no gradient
        torch.nn.init.normal_(next(p for name, p in own.named_parameters() if "lora_B" in name))
    reference, inputs, targets = copy.deepcopy(own), tokens(2, 9), tokens(2, 9)
    targets[0, :3] = IGNORE_INDEX
    names = list(reference.state_dict())
    lm = LlamaLM(own)
    assert [name.removeprefix("lm.") for name in lm.state_dict()] == names
    assert not [module for module in lm.modules() if type(module).__name__ == "LlamaRMSNorm"]
    logits = reference(input_ids=inputs, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 9)
    nll = lm(inputs, targets)
    # Both sum in float32, in another order at most: an error of a few units in the last place of the largest term.
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-6)
    nll.mean().backward()
    expected.mean().backward()
    for (name, one), other in zip(lm.named_parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert (one.grad - other.grad).norm() <= 1e-5 * other.grad.norm(), name


def test_a_head_without_a_floating_point_weight_is_called(model):
    lm = LlamaLM(model)
    expected = lm(tokens(2, 9), tokens(2, 9))

    class Wrapped(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x)

    model.lm_head = Wrapped(model.lm_head)
    torch.testing.assert_close(lm(tokens(2, 9), tokens(2, 9)), expected)


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
    with pytest.raises(HyperionError, match="this model has another tokenizer"):
        require_vocabulary(32_000, load_llama(NAME, vocab_size=50257, device="meta"))
    model.config.vocab_size = V + 1
    with pytest.raises(HyperionError, match=f"has {V} rows, but the configuration says {V + 1}"):
        require_vocabulary(V, model)


@pytest.mark.parametrize("name, size, message", [("random_llama_9b", 10, "no random Llama"), (NAME, None, "vocab_size is 0")])
def test_unknown_names_and_empty_vocabularies_are_refused(name, size, message):
    with pytest.raises(HyperionError, match=message):
        load_llama(name, vocab_size=size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small Llama as transformers saves it, in several shards."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("saved") / "small-llama"
    load_llama("random_llama_d64_l2", vocab_size=300).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "small-llama")


@pytest.fixture
def data_home(tmp_path, monkeypatch):
    """An empty cache, no mirror, no hub."""
    monkeypatch.delenv("HYPERION_DATA_MIRROR", raising=False)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "data"


def test_a_whole_folder_is_loaded_with_every_value(folder):
    torch.manual_seed(3)
    made = load_llama("random_llama_d64_l2", vocab_size=300)
    for (name, mine), theirs in zip(load_llama(folder).state_dict().items(), made.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert load_llama(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_a_tensor(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, path, {"format": "pt"})


def only_pickles(folder):
    for path in folder.glob("*safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def cut(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-40])


def remove_a_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (remove_a_shard, r"the shard model-0000\d-of-0000\d.safetensors is missing"),
        (cut, "is truncated or not in safetensors format"),
        (drop_a_tensor, "lacks the tensor .* that model.safetensors.index.json lists"),
        (lambda f: edit(f / INDEX, weight_map={}), "no file contains the tensor model.embed_tokens.weight"),
        (lambda f: edit(f / INDEX, weight_map=[]), "has no weight_map"),
        (only_pickles, r"pickle files \(pytorch_model.bin\)"),
        (lambda f: [path.unlink() for path in f.glob("*safetensors*")], "neither model.safetensors nor"),
        (lambda f: edit(f / INDEX, weight_map={"lm_head.weight": "../elsewhere.safetensors"}), "leaves its folder"),
        (lambda f: edit(f / INDEX, weight_map={"lm_head.weight": 3}), "names no file"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json cannot be read: .*nested too deeply"),
        (lambda f: edit(f / "config.json", model_type="mistral"), "type 'mistral', not 'llama'"),
        (lambda f: edit(f / "config.json", vocab_size=299), r"shape \[300, 64\], but config.json requires \[299, 64\]"),
        (lambda f: edit(f / "config.json", quantization_config={}), "quantised"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
    ],
    ids=[
        "missing shard",
        "cut shard",
        "tensor not in its shard",
        "tensor not in the index",
        "no map",
        "pickles",
        "nothing",
        "name outside",
        "name that is a number",
        "deep JSON",
        "another model",
        "another vocabulary",
        "quantised",
        "no JSON",
        "no object",
    ],
)
def test_each_fault_of_a_folder_is_named(folder, spoil, message):
    spoil(folder)
    with pytest.raises(HyperionError, match=message) as caught:
        load_llama(folder)
    assert caught.value.where and caught.value.next_step


def test_one_file_and_tied_embeddings_are_enough(tmp_path):
    model = load_llama("random_llama_d64_l2", vocab_size=300)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    verify_llama_folder(tmp_path / "tied")
    assert load_llama(tmp_path / "tied").lm_head.weight.shape == (300, 64)


def test_names_that_are_nothing_and_a_silent_network_fail_at_once(tmp_path):
    with pytest.raises(HyperionError, match="is not a folder, a random configuration, or an id"):
        load_llama(tmp_path / "absent")
    with pytest.raises(HyperionError, match="no network"):
        load_llama("organisation/model")


def test_the_hub_is_asked_once_and_what_came_is_verified(saved, tmp_path, serve, monkeypatch, data_home):
    site = tmp_path / "site"
    shutil.copytree(saved, site / "org/small/resolve/main")
    names = [path.name for path in saved.iterdir()] + ["pytorch_model.bin", "original/consolidated.safetensors"]
    (site / "api/models/org").mkdir(parents=True)
    listing = site / "api/models/org/small"
    listing.write_text(json.dumps({"siblings": [{"rfilename": name} for name in names]}))
    monkeypatch.setenv("HF_ENDPOINT", serve(site))
    model = load_llama("org/small")
    fetched = {path.name for path in (data_home / "raw/hub/org--small").iterdir()} - {MARK}
    assert fetched == {path.name for path in saved.iterdir()}
    shutil.rmtree(site)
    assert torch.equal(load_llama("org/small").lm_head.weight, model.lm_head.weight)
    with pytest.raises(HyperionError, match="the hub refuses to serve org/other: HTTP Error 404"):
        load_llama("org/other")


def test_a_folder_of_ones_own_is_found_in_the_mirror_and_in_the_cache(data_home, tmp_path, monkeypatch):
    assert local_llama("auto") is None
    (data_home / "raw/llama").mkdir(parents=True)
    assert local_llama("auto") == local_llama("cache") == data_home / "raw/llama"
    assert local_llama("synthetic") is None and local_llama("mirror") is None
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path))
    (tmp_path / "llama").mkdir()
    assert local_llama("auto") == tmp_path / "llama"
