"""Trainings on one or many ranks: a `Recipe` describes one, `set_up` makes the engine and this rank's batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

import torch

from hyperion.chapter.context import Context
from hyperion.checkpoints import agreed, frozen_sha256, on_rank_0
from hyperion.data.batches.loaders import LanguageBatches, ResumableBatches, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.images.imageset import channel_statistics
from hyperion.data.instructions.instruction_batches import InstructionBatches
from hyperion.errors import HyperionError
from hyperion.models import LlamaLM, TransformerLM, named_config, resnet18
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
from hyperion.workloads import datasets
from hyperion.workloads.llama_setup import base_model, frozen_dtype, material, with_lora
from hyperion.workloads.workloads import CLASSES

_HELD_OUT = 10  # the last tenth of the training images is held out
T = TypeVar("T")

TASKS = ("language", "images", "llama")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Description of a training: JSON-able, the same on every rank.

    Args:
        task: "language" (WikiText-2), "images" (CIFAR-10) or "llama" (instruction rows).
        model: name of a Transformer configuration; "resnet18" for images; for llama the name of a random configuration, or a
            folder or hub name of real weights.
        strategy: "single", "ddp" or "fsdp".
        precision: "auto", "fp32", "bf16" and others, see `choose_precision`.
        batch_size: examples of one optimizer step over all ranks.
        steps, epochs: length of the training; give one of the two.
        learning_rate: at the end of the warm-up, which takes `warmup_share` of all steps; a cosine to zero follows.
        sequence_length: tokens of one example (language).
        width: channels of the first stage (images).
        lora: train adapters on a frozen base instead of all parameters (llama).
        records: number of training examples to use (images); None for all that are not held out.
        evaluation_batches: held-out batches to score at the end of each epoch, and for images test batches to score after the
            last step; None for all, 0 for none.
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
    lora: bool = False
    records: int | None = None
    evaluation_batches: int | None = None
    checkpoint_every: int | None = None

    def __post_init__(self):
        if self.task not in TASKS:
            raise HyperionError(f"unknown task {self.task!r}", where="Recipe", next_step=f"use one of {', '.join(TASKS)}")

    @property
    def name(self) -> str:
        """Model and strategy, e.g. "gpt2_124m_fsdp"."""
        name = self.model.rstrip("/").rpartition("/")[2]
        part = f"_w{self.width}" if self.task == "images" else "_lora" if self.lora else ""
        return f"{name}{part}_{self.strategy}"

    def plan(self) -> Plan:
        """Return the length of the training and the checkpoint interval."""
        return Plan(steps=self.steps, epochs=self.epochs, checkpoint_every=self.checkpoint_every)


@dataclass(frozen=True)
class Training:
    """What one rank needs to train a recipe.

    Attributes:
        engine: the model, parallelized by the recipe's strategy, and its optimizer.
        batches: this rank's part of every batch.
        validation: returns fresh held-out batches; None if the recipe scores none.
        source: data source in use.
        base_sha256: hash of the frozen weights under the adapters, "" without adapters.
        test: returns batches of the test split, to be read once, after the last step; None for tasks that do not use it.
    """

    engine: TorchEngine
    batches: ResumableBatches
    validation: Callable[[], Iterable] | None
    source: str
    base_sha256: str = ""
    test: Callable[[], Iterable] | None = None


def set_up(context: Context, recipe: Recipe) -> Training:
    """Seed, load the data, build the model and parallelize it over the ranks.

    Raises:
        HyperionError: the ranks do not divide the batch, or the model, precision or strategy is unknown.
    """
    seed_everything(context.seed)
    return {"language": _language, "images": _images, "llama": _llama}[recipe.task](context, recipe)


def rank_zero_first(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and then on the others, so that rank 0 alone prepares the files that all ranks read.

    Raises:
        CheckpointError: on all ranks if one rank raised, so that no rank waits for it.
    """
    here, first = world(), list[T]()
    if here.size == 1:
        return function()
    on_rank_0(lambda: first.append(function()))
    return agreed(lambda: first[0] if here.rank == 0 else function())


def _language(context: Context, recipe: Recipe) -> Training:
    here, device = _batch_world(recipe), context.device
    corpus, tokenizer, prepared = rank_zero_first(lambda: datasets.text(context))
    batches = LanguageBatches(
        prepared.tokens["train"],
        recipe.sequence_length,
        recipe.batch_size,
        context.seed,
        device.torch_device,
        rank=here.rank,
        ranks=here.size,
    )
    config = named_config(recipe.model, vocab_size=tokenizer.vocab_size, context=recipe.sequence_length)
    precision = choose_precision(device, recipe.precision)
    with torch.device(device.torch_device):  # a GPU draws the weights much faster than a CPU
        model = TransformerLM(config)
    model = parallelize(model, _plan(recipe, precision), here)
    engine = LanguageEngine(
        model,
        adamw(model, recipe.learning_rate, recipe.weight_decay),
        _schedule(recipe, len(batches)),
        precision,
        device,
        world=here,
    )

    def validation() -> Iterable:
        windows = evaluation_windows(
            prepared.tokens["valid"],
            recipe.sequence_length,
            recipe.sequence_length,
            tokenizer.eos_id,
            recipe.batch_size // here.size,
            device.torch_device,
        )
        return islice(windows, recipe.evaluation_batches)

    return Training(engine, batches, None if recipe.evaluation_batches == 0 else validation, corpus.source)


def _images(context: Context, recipe: Recipe) -> Training:
    here, device = _batch_world(recipe), context.device
    image_set, prepared = rank_zero_first(lambda: datasets.images(context))
    arrays = prepared.arrays
    first_held_out = len(arrays["train_images"]) * (_HELD_OUT - 1) // _HELD_OUT
    used = min(recipe.records or first_held_out, first_held_out)
    images, labels = arrays["train_images"][:used], arrays["train_labels"][:used]
    normalisation = channel_statistics(images)
    batches = ImageBatches(
        images,
        labels,
        recipe.batch_size,
        normalisation,
        seed=context.seed,
        device=device.torch_device,
        augment=image_set.augmentations,
        rank=here.rank,
        ranks=here.size,
    )
    precision = choose_precision(device, recipe.precision)
    model = resnet18(CLASSES, recipe.width)
    model = model.to(device.torch_device)
    model = parallelize(model, _plan(recipe, precision), here)
    optimizer = sgd_nesterov(model, recipe.learning_rate, recipe.weight_decay)
    engine = ImageEngine(model, optimizer, _schedule(recipe, len(batches)), precision, device, world=here)

    def scored(split: str, first: int) -> Iterable:
        batches = ImageBatches(
            arrays[f"{split}_images"][first:],
            arrays[f"{split}_labels"][first:],
            recipe.batch_size // here.size,
            normalisation,
            device=device.torch_device,
            shuffle=False,
            drop_last=False,
        )
        return islice(batches, recipe.evaluation_batches)

    if recipe.evaluation_batches == 0:
        return Training(engine, batches, None, image_set.source)
    held_out, test = partial(scored, "train", first_held_out), partial(scored, "test", 0)
    return Training(engine, batches, held_out, image_set.source, test=test)


def _llama(context: Context, recipe: Recipe) -> Training:
    here, device = _batch_world(recipe), context.device
    chosen = {"model": recipe.model, "real_weights": False, "sequence_length": recipe.sequence_length}
    loaded = rank_zero_first(lambda: material(replace(context, sizes=context.sizes | chosen)))
    precision = choose_precision(device, recipe.precision)
    base = base_model(context, loaded, frozen_dtype(precision) if recipe.lora else torch.float32)
    base_sha256 = frozen_sha256(base) if recipe.lora else ""  # needs whole weights, so before sharding
    model = with_lora(base, context.seed) if recipe.lora else LlamaLM(base)
    model = parallelize(model, _plan(recipe, precision), here)
    batches = InstructionBatches(
        loaded.train, recipe.batch_size, context.seed, device=device.torch_device, rank=here.rank, ranks=here.size
    )
    optimizer = adamw(model, recipe.learning_rate, recipe.weight_decay)
    engine = LanguageEngine(model, optimizer, _schedule(recipe, len(batches)), precision, device, world=here)

    def validation() -> Iterable:
        whole = InstructionBatches(
            loaded.held_out, recipe.batch_size // here.size, shuffle=False, drop_last=False, device=device.torch_device
        )
        return islice(whole, recipe.evaluation_batches)

    held_out = None if recipe.evaluation_batches == 0 else validation
    return Training(engine, batches, held_out, loaded.rows.source, base_sha256)


def _batch_world(recipe: Recipe) -> World:
    """Return the ranks that share a batch: all, or this one alone with strategy "single"."""
    here = world()
    return replace(here, rank=0, size=1) if recipe.strategy == "single" else here


def _plan(recipe: Recipe, precision: Precision) -> ParallelPlan:
    # BatchNorm needs parameters in the float32 of its statistics, so a ResNet is gathered in float32.
    halved = recipe.strategy == "fsdp" and recipe.task != "images" and precision.dtype == "bf16"
    return ParallelPlan(strategy=recipe.strategy, param_dtype="bf16" if halved else None)


def _schedule(recipe: Recipe, steps_per_epoch: int) -> WarmupCosine:
    total = recipe.plan().total_steps(steps_per_epoch)
    return WarmupCosine(recipe.learning_rate, max(1, int(recipe.warmup_share * total)), total)
