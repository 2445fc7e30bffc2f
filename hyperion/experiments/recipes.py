"""Trainings that run on one rank or on many: a recipe in, an engine and this rank's batches out."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from hyperion.data.imageset import channel_statistics
from hyperion.data.loaders import ImageBatches, LanguageBatches, evaluation_windows
from hyperion.errors import HyperionError
from hyperion.experiments import datasets
from hyperion.experiments.context import Context
from hyperion.models import TransformerLM, named_config, resnet18
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import World, world
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    Plan,
    Precision,
    TorchEngine,
    WarmupCosine,
    adamw,
    choose_precision,
    seed_everything,
    sgd_nesterov,
)

TASKS = ("language", "images")
CLASSES = 10
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training as commands and profiles describe it: JSON-able, the same on every rank.

    Args:
        task: "language" (WikiText-2) or "images" (CIFAR-10).
        model: a Transformer's configuration by name; for images "resnet18".
        strategy: "single", "ddp" or "fsdp".
        precision: "auto", "fp32", "bf16", …: see `choose_precision`.
        batch_size: examples of one optimizer step, over all ranks together.
        steps, epochs: how long; one of the two.
        learning_rate: at the end of the warm-up, which takes `warmup_share` of all steps; a cosine to zero follows.
        sequence_length: tokens of one example (language).
        width: channels of the first stage (images).
        records: use only so many training examples (images); None for all.
        evaluation_batches: held-out batches scored at the end of an epoch; None for all, 0 for none.
    """

    task: str
    model: str
    strategy: str
    precision: str
    batch_size: int
    learning_rate: float
    weight_decay: float
    steps: int | None = None
    epochs: int | None = None
    warmup_share: float = 0.1
    sequence_length: int = 0
    width: int = 64
    records: int | None = None
    evaluation_batches: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self):
        if self.task not in TASKS:
            raise HyperionError(
                f"no task is named {self.task!r}", where="Recipe", next_step=f"use one of {', '.join(TASKS)}"
            )

    @property
    def name(self) -> str:
        """What is trained and how: "gpt2_124m_fsdp"."""
        return f"{self.model}{'' if self.task == 'language' else f'_w{self.width}'}_{self.strategy}"

    def plan(self) -> Plan:
        """How long to train, and when to save."""
        return Plan(steps=self.steps, epochs=self.epochs, checkpoint_every=self.checkpoint_every)


@dataclass(frozen=True)
class Training:
    """A recipe made ready on this rank.

    Attributes:
        engine: the model, laid out as the recipe's strategy says, and its optimizer.
        batches: this rank's part of every batch.
        validation: makes fresh held-out batches; None when the recipe scores none.
        source: the data source that was taken.
    """

    engine: TorchEngine
    batches: LanguageBatches | ImageBatches
    validation: Callable[[], Iterable] | None
    source: str


def set_up(context: Context, recipe: Recipe) -> Training:
    """Seed, load the data, build the model and lay it out over the ranks.

    Raises:
        HyperionError: a batch that the ranks do not divide, an unknown model, precision or strategy.
    """
    seed_everything(context.seed)
    return _language(context, recipe) if recipe.task == "language" else _images(context, recipe)


def rank_zero_first(function: Callable[[], T]) -> T:
    """What `function` returns on every rank; rank 0 goes first, so that it alone prepares what all then find on disk."""
    here = world()
    if here.size == 1:
        return function()
    if here.rank == 0:
        found = function()
        dist.barrier()
        return found
    dist.barrier()
    return function()


def _language(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
    corpus, tokenizer, prepared = rank_zero_first(lambda: datasets.text(context))
    batches = LanguageBatches(
        prepared.tokens["train"], recipe.sequence_length, recipe.batch_size, context.seed, device.torch_device,
        rank=here.rank, ranks=here.size,
    )  # fmt: skip
    config = named_config(recipe.model, vocab_size=tokenizer.vocab_size, context=recipe.sequence_length)
    model, precision = TransformerLM(config).to(device.torch_device), choose_precision(device, recipe.precision)
    model = parallelize(model, _plan(recipe, precision), here)
    engine = LanguageEngine(
        model, adamw(model, recipe.learning_rate, recipe.weight_decay), _schedule(recipe, len(batches)), precision, device,
        world=here,
    )  # fmt: skip

    def validation() -> Iterable:
        windows = evaluation_windows(
            prepared.tokens["valid"], recipe.sequence_length, recipe.sequence_length, tokenizer.eos_id,
            recipe.batch_size // here.size, device.torch_device,
        )  # fmt: skip
        return _first(windows, recipe.evaluation_batches)

    return Training(engine, batches, None if recipe.evaluation_batches == 0 else validation, corpus.source)


def _images(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
    image_set, prepared = rank_zero_first(lambda: datasets.images(context))
    arrays = prepared.arrays
    images, labels = arrays["train_images"][: recipe.records], arrays["train_labels"][: recipe.records]
    normalisation = channel_statistics(images)
    batches = ImageBatches(
        images, labels, recipe.batch_size, normalisation, seed=context.seed, device=device.torch_device,
        augment=image_set.augmentations, rank=here.rank, ranks=here.size,
    )  # fmt: skip
    model, precision = resnet18(CLASSES, recipe.width), choose_precision(device, recipe.precision)
    model = model.to(device.torch_device)
    model = parallelize(model, _plan(recipe, precision), here)
    optimizer = sgd_nesterov(model, recipe.learning_rate, recipe.weight_decay)
    engine = ImageEngine(model, optimizer, _schedule(recipe, len(batches)), precision, device, world=here)

    def validation() -> Iterable:
        held_out = ImageBatches(
            arrays["test_images"], arrays["test_labels"], recipe.batch_size // here.size, normalisation,
            device=device.torch_device, shuffle=False, drop_last=False,
        )  # fmt: skip
        return _first(held_out, recipe.evaluation_batches)

    return Training(engine, batches, None if recipe.evaluation_batches == 0 else validation, image_set.source)


def _sharers(recipe: Recipe) -> World:
    """The ranks that share a batch: all, or this one alone beside the others."""
    here = world()
    return replace(here, rank=0, size=1) if recipe.strategy == "single" else here


def _plan(recipe: Recipe, precision: Precision) -> ParallelPlan:
    # Batch norms keep float32 parameters beside their float32 statistics, so a ResNet is gathered in float32.
    halved = recipe.strategy == "fsdp" and recipe.task == "language" and precision.dtype == "bf16"
    return ParallelPlan(strategy=recipe.strategy, param_dtype="bf16" if halved else None)


def _schedule(recipe: Recipe, steps_per_epoch: int) -> WarmupCosine:
    total = recipe.plan().total_steps(steps_per_epoch)
    return WarmupCosine(recipe.learning_rate, max(1, int(recipe.warmup_share * total)), total)


def _first(batches: Iterable, count: int | None) -> Iterable:
    for index, batch in enumerate(batches):
        if index == count:
            return
        yield batch
