"""Folders of Llama weights: loaded when whole; every fault is named before a weight is read. And the hub, stood in for."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hyperion.data.store.folders import MARK
from hyperion.errors import HyperionError
from hyperion.models import load_llama, local_llama
from hyperion.models.llama import INDEX, verify_llama_folder

pytestmark = pytest.mark.usefixtures("data_home")


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
        (only_pickles, r"pickles \(pytorch_model.bin\)"),
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
