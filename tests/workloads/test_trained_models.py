"""Small trained models: they learned something, a stored one reproduces its loss, and a damaged one is trained again."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from hyperion.data import DataError
from hyperion.errors import HyperionError
from hyperion.workloads import trained_models
from hyperion.workloads.trained_models import (
    CLASSIFIERS,
    HELD_OUT,
    LANGUAGE_MODELS,
    WEIGHTS,
    read_trained_model,
    trained_classifier,
    trained_language_model,
)
from tests.chapter.toy import toy_context

pytestmark = pytest.mark.slow

TRAIN = {"llama_toy": trained_language_model, "resnet18_toy": trained_classifier}
NAMES = pytest.mark.parametrize("name", TRAIN)


@pytest.fixture(scope="module")
def home(toy_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(toy_models, folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(folder / "data"))
        yield folder


@pytest.fixture
def copied(home, tmp_path, monkeypatch):
    """The data folder of the module, in which a test may damage files."""
    shutil.copytree(home / "data", tmp_path / "data")
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    return toy_context("toy", {}, tmp_path)


@pytest.fixture(scope="module")
def trained(home):
    torch.set_num_threads(1)
    context = toy_context("toy", {}, home)
    return {name: function(context, name) for name, function in TRAIN.items()}, context.device


@NAMES
def test_training_lowers_the_loss_below_a_model_without_context(trained, name):
    model = trained[0][name]
    assert model.loss < model.facts["baseline_loss"] - 0.1
    assert model.source == "synthetic"


@NAMES
def test_a_model_that_is_read_again_reproduces_its_loss_and_its_accuracy(trained, name):
    models, device = trained
    again = read_trained_model(models[name].folder)
    scores = again.score(again.load(device), device)
    assert scores.loss == pytest.approx(again.loss, rel=1e-6)
    assert scores.accuracy == again.facts["accuracy"]
    # Batches of another size give the same scores in the same order.
    other = again.score(again.load(device), device, batch_size=3)
    np.testing.assert_allclose(other.losses, scores.losses, rtol=1e-4, atol=1e-5)


def test_each_held_out_token_is_scored_once(trained):
    models, device = trained
    model = models["llama_toy"]
    assert len(model.score(model.load(device), device).losses) == 512


def test_scores_do_not_depend_on_the_number_of_tokens_that_are_scored_at_once(trained, monkeypatch):
    models, device = trained
    model = models["llama_toy"]
    whole = model.score(model.load(device), device)
    monkeypatch.setattr(trained_models, "_SCORED_AT_ONCE", 7)
    parts = model.score(model.load(device), device)
    assert np.array_equal(parts.losses, whole.losses) and np.array_equal(parts.correct, whole.correct)


def test_transformers_loads_the_language_model_and_its_tokenizer(trained):
    from transformers import AutoTokenizer, LlamaForCausalLM

    models, device = trained
    model = models["llama_toy"]
    theirs, ids = LlamaForCausalLM.from_pretrained(model.folder), model.held_out(device)[0][:2]
    assert torch.equal(theirs(input_ids=ids).logits, model.load(device)(ids))
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    text = " ".join(model.tokenizer().decode(ids[0]).split())
    assert tokenizer(text)["input_ids"] == model.tokenizer().encode([text])[0].tolist()
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == model.tokenizer().eos_id


def test_the_second_call_does_not_train_again(trained, home):
    before = trained[0]["llama_toy"]
    stamp = (before.folder / WEIGHTS).stat().st_mtime_ns
    again = trained_language_model(toy_context("toy", {}, home), "llama_toy")
    assert again == before and (again.folder / WEIGHTS).stat().st_mtime_ns == stamp
    assert not list(before.folder.parent.glob(".*.part"))


@pytest.mark.parametrize("file", [WEIGHTS, HELD_OUT, "config.json"])
def test_a_damaged_model_is_refused_moved_away_and_trained_again(trained, copied, capsys, file):
    first = trained_classifier(copied, "resnet18_toy")
    path = first.folder / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError):
        read_trained_model(first.folder)
    again = trained_classifier(copied, "resnet18_toy")
    assert again.loss == first.loss and "is damaged and is trained again" in capsys.readouterr().out
    moved = next((first.folder.parent / "quarantine").iterdir())
    assert json.loads((moved / "REASON.json").read_text())["was"] == first.folder.name


def test_another_seed_is_another_model(trained, copied):
    from dataclasses import replace

    other = trained_classifier(replace(copied, seed=1), "resnet18_toy")
    assert other.folder.name != trained[0]["resnet18_toy"].folder.name


def test_an_unknown_name_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(HyperionError, match="no trained model is named 'gpt5'") as error:
        trained_language_model(toy_context("toy", {}, tmp_path), "gpt5")
    assert "llama_toy" in str(error.value)


STORED = {"llama_d128_l2": trained_language_model, "resnet18_w8": trained_classifier}


@pytest.mark.parametrize("name", STORED)
def test_weights_of_the_library_are_those_of_its_recipe(name):
    recipe = (LANGUAGE_MODELS | CLASSIFIERS)[name].model_dump()
    made_from = json.loads(trained_models._metadata(name)["made_from"])
    assert made_from["recipe"] == json.loads(json.dumps(recipe)) and made_from["seed"] == 0


@pytest.mark.parametrize("name", STORED)
def test_weights_of_the_library_replace_a_training_on_their_own_data_only(name, mirror, tmp_path, monkeypatch):
    def read_once(module, function: str) -> None:
        """Let the first call read the data, which takes long. The source "synthetic" gives them another hash."""
        read, found = getattr(module, function), []

        def again(context, *arguments):
            if not found:
                found.append(read(context, *arguments))
            if context.data_source == "synthetic":
                monkeypatch.setattr(type(found[0][0]), "sha256", "0" * 64)
            return found[0]

        monkeypatch.setattr(module, function, again)

    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(trained_models, "train", lambda *arguments, **options: pytest.fail("trained"))
    read_once(trained_models, "_streams")
    read_once(trained_models.datasets, "images")
    context = replace(toy_context("toy", {}, tmp_path), data_source="mirror")
    model = STORED[name](context, name)
    assert model.facts["trained"].startswith("before, on ") and model.source == "mirror"
    assert model.loss < model.facts["baseline_loss"] - 0.1
    with pytest.raises(pytest.fail.Exception, match="trained"):
        STORED[name](replace(context, seed=1), name)
    with pytest.raises(pytest.fail.Exception, match="trained"):
        STORED[name](replace(context, data_source="synthetic"), name)
