"""Provide small trained models for the chapters on inference and serving: a Llama (WikiText-2) and a ResNet-18 (CIFAR-10).

These chapters need trained models, because a change of the number format has a meaningful effect on the loss only if the weights
are not random. Each model is trained with the loop of chapter 2.2 and stored once per machine in data/processed/ in Hugging
Face's layout: config.json and model.safetensors and, for the language model, its tokenizer files.
`LlamaForCausalLM.from_pretrained(folder)` loads it. The folder also contains the held-out data on which variants of the model are
scored, so a worker process needs only its path.

The library contains the trained weights of the two models of the profile `smoke`, in the folder trained/. Training these models
takes a minute on two idle cores, and several minutes on busy ones. The weights are used only with the recipe, the seed and the
data with which they were trained. `python -m hyperion.commands.regenerate trained-models` trains them again.

The small language model has a byte-level BPE of 2,048 entries, trained on the train split. With GPT-2's 50,257 tokens, the
embedding would have most of the parameters and take most of the time, although no number format of these chapters changes the
embedding. No text is lost, because every byte has a token. A perplexity per token depends on the tokenizer: compare it only
between variants of one model, and with the loss of a unigram model on the same tokens.

Shape suffixes: W windows, T tokens of a window, N images, C channels, Y rows, X columns, V vocabulary, K classes.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyperion.chapter.context import Context, Table
from hyperion.chapter.profiles import load_profile
from hyperion.data import IGNORE_INDEX, DataError, TextCorpus, Tokenizer, load_wikitext2, read_tokenizer, unigram_baseline
from hyperion.data.batches import LanguageBatches, evaluation_windows
from hyperion.data.images.imageset import CLASS_COUNT
from hyperion.data.prepare.catalog import data_identity
from hyperion.data.prepare.verify import DataFinding, quarantine
from hyperion.data.store.folders import FILE_NAME, processed_root, read_manifest, staged, write_manifest
from hyperion.data.text.tokenizer import GPT2_VOCABULARY, train_tokenizer
from hyperion.dependencies import reached_source_hash
from hyperion.errors import HyperionError, not_none
from hyperion.hardware import Device
from hyperion.measure.memory_use.allocation import release_memory
from hyperion.models import LlamaLM, LlamaShape, parameter_count, resnet18
from hyperion.training import LanguageEngine, TrainingPlan, WarmupCosine, adamw, choose_precision, seed_everything, train
from hyperion.workloads import datasets
from hyperion.workloads.recipes import Recipe, set_up

LANGUAGE, CLASSIFIER = "language", "classifier"
WEIGHTS, HELD_OUT, CONFIG = "model.safetensors", "held_out.safetensors", "config.json"
_REMEDY = "run the experiment again: it trains the model again"
_WEIGHTS_OF_THE_LIBRARY = Path(__file__).with_name("trained")
_SCORED_AT_ONCE = 2048  # tokens or images
_CALIBRATION = 64  # number of windows or images of the train split with which activations are calibrated
# Chat template, because the transformers server refuses a tokenizer without one. The model was not trained on dialogues, so the
# template adds no role markers.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class LanguageRecipe(Table):
    """Recipe for training a Llama on WikiText-2.

    Args:
        vocabulary: number of entries of a byte-level BPE trained on the train split. None uses GPT-2's tokenizer.
        width, layers, heads, key_value_heads, mlp_width: dimensions of the model. The embedding and the head share their weights.
        context: maximum number of positions that the model accepts.
        sequence_length, batch_size: tokens per sequence, and sequences per step.
        steps: number of optimizer steps.
        initial_deviation: standard deviation of the initial weights. The default is that of transformers.
        learning_rate: peak learning rate, reached after a warm-up over a tenth of the steps.
        weight_decay: weight decay of AdamW.
        held_out_tokens: number of test-split tokens on which variants are scored. None uses all.
    """

    vocabulary: int | None = None
    width: int
    layers: int
    heads: int
    key_value_heads: int
    mlp_width: int
    context: int = 2048
    sequence_length: int
    batch_size: int
    steps: int
    initial_deviation: float = 0.02
    learning_rate: float
    weight_decay: float = 0.1
    held_out_tokens: int | None = None

    @property
    def shape(self) -> LlamaShape:
        """Shape of the model. On a small text, the tokenizer and the embedding have fewer entries than `vocabulary`."""
        sizes = self.width, self.layers, self.heads, self.key_value_heads, self.mlp_width
        return LlamaShape(*sizes, self.vocabulary or GPT2_VOCABULARY, tie_word_embeddings=True)


class ClassifierRecipe(Table):
    """Recipe for training a ResNet-18 on CIFAR-10.

    Args:
        width: channels of the first stage.
        batch_size: images per step.
        steps: number of optimizer steps.
        learning_rate: peak learning rate, reached after a warm-up over a fifth of the steps.
        weight_decay: weight decay of SGD.
        held_out_images: number of test images on which variants are scored. None uses all.
    """

    width: int
    batch_size: int
    steps: int
    learning_rate: float
    weight_decay: float = 5e-4
    held_out_images: int | None = None


# Recipes by the name that an experiment gives in its options. The toy models train in seconds and are for tests.
LANGUAGE_MODELS = {
    "llama_toy": LanguageRecipe(
        vocabulary=640,
        width=64,
        layers=2,
        heads=2,
        key_value_heads=1,
        mlp_width=128,
        context=256,
        sequence_length=32,
        batch_size=16,
        steps=200,
        initial_deviation=0.125,
        learning_rate=5e-3,
        held_out_tokens=512,
    ),
    "llama_d128_l2": LanguageRecipe(
        vocabulary=2048,
        width=128,
        layers=2,
        heads=2,
        key_value_heads=1,
        mlp_width=384,
        sequence_length=128,
        batch_size=8,
        steps=150,
        learning_rate=4e-3,
        held_out_tokens=16384,
    ),
    "llama_d512_l8": LanguageRecipe(
        width=512,
        layers=8,
        heads=8,
        key_value_heads=4,
        mlp_width=1408,
        sequence_length=512,
        batch_size=32,
        steps=600,
        learning_rate=1e-3,
        held_out_tokens=131072,
    ),
}
CLASSIFIERS = {
    "resnet18_toy": ClassifierRecipe(width=8, batch_size=32, steps=30, learning_rate=0.05, held_out_images=100),
    "resnet18_w8": ClassifierRecipe(width=8, batch_size=64, steps=150, learning_rate=0.1, held_out_images=1000),
    "resnet18": ClassifierRecipe(width=64, batch_size=512, steps=900, learning_rate=0.4),
}


@dataclass(frozen=True)
class Scores:
    """Scores of a model on held-out data. Each array has one entry per token or image, in a fixed order.

    Attributes:
        losses: negative log-likelihoods in nats, float64 [n].
        correct: whether the most probable token or class is the right one, bool [n].
    """

    losses: np.ndarray
    correct: np.ndarray

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood in nats."""
        return math.fsum(self.losses) / len(self.losses)

    @property
    def perplexity(self) -> float:
        """Perplexity per token, exp(loss)."""
        return math.exp(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of tokens or images for which the most probable token or class is the right one."""
        return float(self.correct.mean())


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in a folder. Use `trained_language_model`, `trained_classifier` or `read_trained_model` to create it.

    Attributes:
        kind: "language" or "classifier".
        name: name of the recipe.
        folder: folder with the weights.
        source: name of the data source.
        facts: the recipe, the seed, and the training results: `loss` and `accuracy` on the held-out data, `baseline_loss` (of a
            unigram model on the same tokens, or of equal probabilities for all classes), `parameters`, and `trained`, which
            states where the weights come from.
    """

    kind: str
    name: str
    folder: Path
    source: str
    facts: dict[str, Any]

    @property
    def loss(self) -> float:
        """Held-out loss in nats, computed after training."""
        return self.facts["loss"]

    @property
    def weight_bytes(self) -> int:
        """Size of the weight file in bytes."""
        return (self.folder / WEIGHTS).stat().st_size

    def load(self, device: Device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model in evaluation mode, as a module that maps inputs to logits.

        For a language model it is a `LlamaLM` that maps ids [W, T] to logits [W, T, V] and whose attribute `lm` is transformers'
        LlamaForCausalLM. For a classifier it is a `ResNet18` that maps images [N, 3, 32, 32] to logits [N, K].
        """
        if self.kind == LANGUAGE:
            from transformers import LlamaForCausalLM

            model: nn.Module = LlamaLM(LlamaForCausalLM.from_pretrained(self.folder, dtype=dtype))
        else:
            config = json.loads((self.folder / CONFIG).read_text())
            model = resnet18(config["num_classes"], config["width"])
            model.load_state_dict(load_file(self.folder / WEIGHTS))
            model.to(dtype)
        return model.to(device.torch_device).eval().requires_grad_(False)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of a language model."""
        return read_tokenizer(self.folder)

    def held_out(self, device: Device) -> tuple[Tensor, Tensor]:
        """Return the held-out data of the test split on the device.

        For a language model: int64 ids [W, T] and int64 targets [W, T], in which IGNORE_INDEX marks tokens that an earlier window
        scores. For a classifier: normalised float32 images [N, 3, 32, 32] and int64 classes [N].
        """
        tensors = load_file(self.folder / HELD_OUT)
        return self._inputs(tensors["inputs"], device), tensors["targets"].long().to(device.torch_device)

    def calibration(self, device: Device) -> Tensor:
        """Return 64 inputs of the train split on the device, for calibrating activations."""
        return self._inputs(load_file(self.folder / HELD_OUT)["calibration"], device)

    def score(
        self, logits_of: Callable[[Tensor], Tensor], device: Device, batch_size: int = 64, records: int | None = None
    ) -> Scores:
        """Score a variant of the model on the held-out data.

        Args:
            logits_of: module or function that maps inputs, as returned by `held_out`, to logits.
            device: device of the inputs.
            batch_size: windows or images per call. The last batch may be smaller.
            records: number of windows or images to score, starting with the first. If None, all are scored.
        """
        inputs, targets = (part[:records] for part in self.held_out(device))
        losses, correct = [], []
        with torch.no_grad():
            for first in range(0, len(inputs), batch_size):
                output = logits_of(inputs[first : first + batch_size]).flatten(0, -2)
                expected = targets[first : first + batch_size].flatten().to(output.device)
                # Score the batch in parts, because the float64 logits of 64 windows with 50,257 tokens would need 13 GB.
                for logits, classes in zip(output.split(_SCORED_AT_ONCE), expected.split(_SCORED_AT_ONCE), strict=True):
                    scored = classes != IGNORE_INDEX
                    losses.append(F.cross_entropy(logits[scored].double(), classes[scored], reduction="none").cpu())
                    correct.append((logits.argmax(-1) == classes)[scored].cpu())
        return Scores(torch.cat(losses).numpy(), torch.cat(correct).numpy())

    def _inputs(self, stored: Tensor, device: Device) -> Tensor:
        if self.kind == LANGUAGE:
            return stored.long().to(device.torch_device)
        config = json.loads((self.folder / CONFIG).read_text())
        mean, deviation = (torch.tensor(config[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        return ((stored.float() / 255 - mean) / deviation).to(device.torch_device)


def trained_language_model(context: Context, name: str) -> TrainedModel:
    """Return the trained Llama of a recipe. If this machine has not trained it yet, train it.

    Args:
        context: context of the experiment, with its seed, device and data source.
        name: a name in LANGUAGE_MODELS.

    Raises:
        HyperionError: no recipe has this name.
        DataError: the data are wrong, or no source has them.
    """
    return _trained(context, LANGUAGE, name, LANGUAGE_MODELS, datasets.TEXT, _train_language)


def trained_classifier(context: Context, name: str) -> TrainedModel:
    """Return the trained ResNet-18 of a recipe. If this machine has not trained it yet, train it.

    Args:
        context: context of the experiment, with its seed, device and data source.
        name: a name in CLASSIFIERS.

    Raises:
        HyperionError: no recipe has this name.
        DataError: the data are wrong, or no source has them.
    """
    return _trained(context, CLASSIFIER, name, CLASSIFIERS, datasets.IMAGES, _train_classifier)


def read_trained_model(folder: Path) -> TrainedModel:
    """Return the trained model in a folder. The size and hash of each file are checked.

    Raises:
        DataError: a file is missing or damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"the trained model has no {FILE_NAME}", where=folder, next_step=_REMEDY)
    manifest.verify(folder)
    facts = manifest.facts
    if facts.get("kind") not in (LANGUAGE, CLASSIFIER):
        raise DataError(f"the folder holds {facts.get('kind')!r}, not a trained model", where=folder, next_step=_REMEDY)
    return TrainedModel(facts["kind"], manifest.name, folder, manifest.source, facts)


def _trained(
    context: Context, kind: str, name: str, recipes: dict[str, Any], data: tuple[str, ...], train_into: Callable[..., None]
) -> TrainedModel:
    recipe = recipes.get(name)
    if recipe is None:
        known = ", ".join(recipes)
        raise HyperionError(f"no trained model is named {name!r}", where=f"{kind} model", next_step=f"use one of {known}")
    identity = {  # everything that the trained weights depend on
        "recipe": recipe.model_dump(),
        "seed": context.seed,
        "data": data_identity(data, context.data_source),
        "synthetic": [context.allow_synthetic, context.synthetic],
        "device": context.device.name,
        "torch": torch.__version__,
        "source": reached_source_hash(__name__),
        "weights of the library": _metadata(name),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = processed_root() / f"trained-{name}-{digest[:12]}"
    if folder.is_dir():
        try:
            return read_trained_model(folder)
        except (DataError, SafetensorError) as error:
            moved = quarantine(folder, [DataFinding(Path(str(getattr(error, "where", folder))).name, str(error))])
            print(f"WARNING: the trained model {name} is damaged and is trained again: {error} It was moved to {moved}.")
    with staged(folder) as work:
        seed_everything(context.seed)
        train_into(context, name, recipe, work, identity)
    # The processes that measure the model need the memory that PyTorch caches after the training.
    release_memory()
    return read_trained_model(folder)


def _train_language(context: Context, name: str, recipe: LanguageRecipe, work: Path, identity: dict) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    device = context.device
    corpus, tokenizer, train_tokens, test_tokens = _streams(context, recipe)
    held_out_tokens = test_tokens[: recipe.held_out_tokens]
    config = LlamaConfig(
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        intermediate_size=recipe.mlp_width,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        initializer_range=recipe.initial_deviation,
        bos_token_id=tokenizer.eos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.eos_id,
    )
    with torch.device(device.torch_device):
        language_model = AutoModelForCausalLM.from_config(config)
    model, length = LlamaLM(language_model), recipe.sequence_length

    def train_here() -> float:
        batches = LanguageBatches(train_tokens, length, recipe.batch_size, context.seed, device.torch_device)
        schedule = WarmupCosine(recipe.learning_rate, max(1, recipe.steps // 10), recipe.steps)
        optimizer = adamw(model, recipe.learning_rate, recipe.weight_decay)
        engine = LanguageEngine(model, optimizer, schedule, choose_precision(device, "auto"), device)
        print(f"{name}: {parameter_count(model):,} parameters, {tokenizer.vocab_size} tokens, {engine.precision}")
        return train(engine, batches, TrainingPlan(steps=recipe.steps)).losses[-1]

    trained = _weights(name, language_model, _made_from(recipe, context.seed, corpus.sha256), train_here)
    language_model.save_pretrained(work)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.library_tokenizer(),
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=recipe.context,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(work)
    windows = list(evaluation_windows(held_out_tokens, length, length, tokenizer.eos_id, 1))
    starts = np.linspace(0, len(train_tokens) - length, min(_CALIBRATION, len(train_tokens) // length)).astype(int)
    calibration = np.stack([train_tokens[start : start + length].astype(np.int32) for start in starts])
    tensors = {
        "inputs": torch.cat([inputs for inputs, _ in windows]).int(),
        "targets": torch.cat([targets for _, targets in windows]).int(),
        "calibration": torch.from_numpy(calibration),
    }
    baseline = unigram_baseline(np.asarray(train_tokens), np.asarray(held_out_tokens), tokenizer.vocab_size)
    facts = {"baseline_loss": baseline.total_nll_nats / baseline.tokens, "baseline": "unigram model", "tokenizer": tokenizer.name}
    _store(work, LANGUAGE, name, corpus.source, tensors, device, identity, facts | trained)


def _train_classifier(context: Context, name: str, recipe: ClassifierRecipe, work: Path, identity: dict) -> None:
    values = recipe.model_dump(exclude={"held_out_images"})
    training = set_up(
        context,
        Recipe(
            task="images", model="resnet18", strategy="single", precision="auto", warmup_share=0.2, evaluation_batches=0, **values
        ),
    )
    model = training.engine.model
    images, prepared = datasets.images(context)

    def train_here() -> float:
        return train(training.engine, training.batches, TrainingPlan(steps=recipe.steps)).losses[-1]

    trained = _weights(name, model, _made_from(recipe, context.seed, images.sha256), train_here)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    save_file(state, work / WEIGHTS, metadata={"format": "pt"})
    arrays = prepared.arrays
    # Mean and standard deviation with which the model's training images were normalised.
    mean, deviation = not_none(training.normalisation)
    config = {
        "architectures": ["ResNet18"],
        "model_type": "hyperion_resnet18",
        "width": recipe.width,
        "num_classes": CLASS_COUNT,
        "image_mean": list(mean),
        "image_std": list(deviation),
    }
    (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {
        "inputs": torch.from_numpy(np.array(arrays["test_images"][: recipe.held_out_images])),
        "targets": torch.from_numpy(np.array(arrays["test_labels"][: recipe.held_out_images]).astype(np.int32)),
        "calibration": torch.from_numpy(np.array(arrays["train_images"][:_CALIBRATION])),
    }
    facts = {"baseline_loss": math.log(CLASS_COUNT), "baseline": "equal probabilities"}
    _store(work, CLASSIFIER, name, training.source, tensors, context.device, identity, facts | trained)


def _made_from(recipe: Table, seed: int, data_sha256: str) -> dict[str, Any]:
    return {"recipe": recipe.model_dump(), "seed": seed, "data": data_sha256}


def _metadata(name: str) -> dict[str, str]:
    """Return the metadata of the weights that the library contains for a model, or {} if it contains none."""
    path = _WEIGHTS_OF_THE_LIBRARY / f"{name}.safetensors"
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return file.metadata()


def _weights(name: str, model: nn.Module, made_from: dict[str, Any], train_here: Callable[[], float]) -> dict[str, Any]:
    """Load the library's weights into a model. If they were trained with another recipe, seed or data, train the model instead.

    Args:
        name: name of the recipe.
        model: the model with its initial weights.
        made_from: recipe, seed and data of the training run.
        train_here: function that trains the model and returns the last loss.

    Returns:
        The facts `trained`, `train_loss` and `made_from`.
    """
    metadata = _metadata(name)
    if metadata and json.loads(metadata["made_from"]) == json.loads(json.dumps(made_from)):
        missing, unexpected = model.load_state_dict(load_file(_WEIGHTS_OF_THE_LIBRARY / f"{name}.safetensors"), strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:  # the head shares the weights of the embedding
            raise HyperionError(
                f"the weights of the library do not fit {name!r}",
                where=str(_WEIGHTS_OF_THE_LIBRARY),
                next_step="train them again: python -m hyperion.commands.regenerate trained-models",
            )
        where = f"before, on {metadata['device']} with torch {metadata['torch']}; the weights come with the library"
        print(f"{name}: trained {where}")
        return {"trained": where, "train_loss": float(metadata["train_loss"]), "made_from": made_from}
    return {"trained": "on this machine", "train_loss": train_here(), "made_from": made_from}


def _store(
    work: Path,
    kind: str,
    name: str,
    source: str,
    tensors: dict[str, Tensor],
    device: Device,
    identity: dict,
    facts: dict[str, Any],
) -> None:
    """Write the held-out data and the manifest. The loss in the manifest is computed with the weights read back from the file."""
    save_file(tensors, work / HELD_OUT)
    stored = TrainedModel(kind, name, work, source, {})
    model = stored.load(device)
    scores = stored.score(model, device)
    facts |= {"kind": kind, "loss": scores.loss, "accuracy": scores.accuracy, "parameters": parameter_count(model)}
    write_manifest(work, name=name, source=source, detail=f"{kind} model", facts=facts | identity)


def _streams(context: Context, recipe: LanguageRecipe) -> tuple[TextCorpus, Tokenizer, np.ndarray, np.ndarray]:
    """Return the text, the tokenizer, and the token ids of the train and test splits."""
    if recipe.vocabulary is None:
        corpus, tokenizer, prepared = datasets.text(context)
        return corpus, tokenizer, prepared.tokens["train"], prepared.tokens["test"]
    corpus = load_wikitext2(
        context.data_source,
        allow_synthetic=context.allow_synthetic,
        synthetic_lines=context.synthetic["lines"],
        seed=context.seed,
    )
    tokenizer = train_tokenizer(corpus, recipe.vocabulary)
    streams = {}
    with tokenizer.encoding() as encoding:
        for split in ("train", "test"):
            parts = list(encoding.encode(corpus.splits[split]))
            if lost := next((part.lost for part in parts if part.lost), ""):
                raise DataError(f"decoding does not reproduce {lost[:60]!r}", where=tokenizer.name, next_step=_REMEDY)
            streams[split] = np.concatenate([part.ids for part in parts])
    return corpus, tokenizer, streams["train"], streams["test"]


def write_weights_of_library() -> dict[Path, float]:
    """Train the models of the profile `smoke` on real data, and write their weights to the library.

    Returns:
        A dict that maps the file of each model to its held-out loss.
    """
    losses = {}
    for getter, name in ((trained_language_model, "llama_d128_l2"), (trained_classifier, "resnet18_w8")):
        path = _WEIGHTS_OF_THE_LIBRARY / f"{name}.safetensors"
        path.unlink(missing_ok=True)
        sizes = {"sizes": {}, "synthetic": load_profile("smoke").synthetic, "allow_synthetic": False}
        context = Context(notebook="", experiment="", workspace=path.parent, **sizes)
        model = getter(context, name)
        facts = {"train_loss": str(model.facts["train_loss"]), "made_from": json.dumps(model.facts["made_from"])}
        machine = {"device": model.facts["device"], "torch": model.facts["torch"], "format": "pt"}
        path.parent.mkdir(exist_ok=True)
        save_file(load_file(model.folder / WEIGHTS), path, metadata=facts | machine)
        losses[path] = model.loss
    return losses
