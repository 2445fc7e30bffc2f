"""Set up training runs on one or several ranks from recipes.

A recipe describes a training run. `set_up` builds the engine that the recipe describes, and this rank's loader of batches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import ConfigDict

from hyperion.chapter.context import Context
from hyperion.checkpoints import agreed, on_rank_0
from hyperion.data.batches import InstructionBatches, LanguageBatches, ResumableBatches, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.images.imageset import CLASS_COUNT, channel_statistics
from hyperion.errors import HyperionError
from hyperion.models import LlamaLM, TransformerLM, named_config, resnet18
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import World, world
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    Precision,
    TrainingPlan,
    WarmupCosine,
    adamw,
    choose_precision,
    frozen_sha256,
    seed_everything,
    sgd_nesterov,
)
from hyperion.workloads import datasets
from hyperion.workloads.fine_tuning import base_model, fine_tuning_data, frozen_dtype, with_lora

Task = Literal["language", "images", "llama"]
Strategy = Literal["single", "ddp", "fsdp"]
TASKS = ("language", "images", "llama")
_HELD_OUT = 10  # one in this many training images is held out for evaluation
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Description of a training run, for commands and profiles. It can be stored as JSON and is the same on every rank.

    Args:
        task: "language" (WikiText-2), "images" (CIFAR-10) or "llama" (instruction rows).
        model: name of the model: a Transformer configuration for "language", and "resnet18" for "images". For "llama", a random
            configuration, or a folder or a Hugging Face Hub model with real weights.
        strategy: "single", "ddp" or "fsdp".
        precision: number format, for example "fp32" or "bf16", or "auto". See `choose_precision`.
        batch_size: number of examples in one optimizer step, summed over all ranks.
        learning_rate: peak learning rate, reached at the end of the warm-up. It then falls to a tenth along a cosine.
        weight_decay: weight decay of the optimizer.
        steps, epochs: length of the training run. Exactly one of the two is given.
        warmup_share: warm-up steps as a share of all steps.
        sequence_length: number of tokens in one example (language, llama).
        width: number of channels of the first stage (images).
        lora: whether to freeze the weights and train LoRA adapters, instead of training all parameters (llama).
        records: number of training examples to use (images). None uses all examples that are not held out.
        evaluation_batches: number of held-out batches in the evaluation at the end of an epoch and, for images, of test batches
            in the evaluation after the last step. None uses all batches, and 0 disables evaluation.
        checkpoint_every: number of steps between checkpoints. None saves no checkpoints.
    """

    # Profiles contain recipes as options. With this setting, pydantic rejects fields with unknown names.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    task: Task
    model: str
    strategy: Strategy
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
            raise HyperionError(f"no task is named {self.task!r}", where="Recipe", next_step=f"use one of {', '.join(TASKS)}")

    @property
    def name(self) -> str:
        """Name of the training run. It consists of the model and the strategy, for example "gpt2_124m_fsdp"."""
        name = self.model.rstrip("/").rpartition("/")[2]
        part = f"_w{self.width}" if self.task == "images" else "_lora" if self.lora else ""
        return f"{name}{part}_{self.strategy}"

    def plan(self) -> TrainingPlan:
        """Return the length of the training run and its checkpoint interval."""
        return TrainingPlan(steps=self.steps, epochs=self.epochs, checkpoint_every=self.checkpoint_every)


@dataclass(frozen=True)
class Training:
    """The engine and the data of a recipe, ready for training on this rank.

    Attributes:
        engine: the model and its optimizer, distributed according to the recipe's strategy.
        batches: this rank's part of every batch.
        validation: function that returns an iterable of the held-out batches. None if the recipe has no held-out evaluation.
        source: name of the data source.
        base_sha256: SHA-256 of the frozen weights that the adapters belong to, or an empty string without adapters.
        test: function that returns an iterable of the test batches, for one evaluation after the last step. None without a test
            split.
        normalisation: means and standard deviations of the image channels. None if the task has no images.
    """

    engine: LanguageEngine | ImageEngine
    batches: ResumableBatches
    validation: Callable[[], Iterable] | None
    source: str
    base_sha256: str = ""
    test: Callable[[], Iterable] | None = None
    normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None


def set_up(context: Context, recipe: Recipe) -> Training:
    """Seed the generators, load the data, build the model and distribute it over the ranks.

    Raises:
        HyperionError: the batch size is not a multiple of the number of ranks, or the model, precision or strategy is unknown.
    """
    # Use the same seed on every rank, because all ranks must start from the same weights.
    seed_everything(context.seed)
    return {"language": _language, "images": _images, "llama": _llama}[recipe.task](context, recipe)


def rank_zero_first(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 first, then on all other ranks. Return its result on this rank.

    Use it for functions that prepare missing files: only rank 0 prepares them, and the other ranks read them.

    Raises:
        CheckpointError: the function failed on one of the ranks. The error is raised on all ranks, so that no rank waits forever.
    """
    here, first = world(), []
    if here.size == 1:
        return function()
    # Rank 0 writes the files. `on_rank_0` also makes the other ranks wait until the files are complete.
    on_rank_0(lambda: first.append(function()))
    return agreed(lambda: first[0] if here.rank == 0 else function())


def _language(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
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
    with torch.device(device.torch_device):  # draw the weights on the device, not on the host
        model = TransformerLM(config)
    # The optimizer is built after this call, because it must hold the parameters that DDP or FSDP created.
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
            # Every rank loads all windows. An evaluation batch has the size of one rank's part of a training batch, so it needs
            # no more memory than training.
            recipe.batch_size // here.size,
            device.torch_device,
        )
        return _first(windows, recipe.evaluation_batches)

    return Training(engine, batches, None if recipe.evaluation_batches == 0 else validation, corpus.source)


def _images(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
    image_set, prepared = rank_zero_first(lambda: datasets.images(context))
    arrays = prepared.arrays
    # Hold out the last tenth of the training images. The test split is used only once, after the last step.
    first_held_out = len(arrays["train_images"]) * (_HELD_OUT - 1) // _HELD_OUT
    used = min(recipe.records or first_held_out, first_held_out)
    images, labels = arrays["train_images"][:used], arrays["train_labels"][:used]
    # Compute the statistics from the training images only, because held-out images must not influence the training.
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
    model, precision = resnet18(CLASS_COUNT, recipe.width), choose_precision(device, recipe.precision)
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
            # Keep an incomplete last batch, because an evaluation must score every image once.
            drop_last=False,
        )
        return _first(batches, recipe.evaluation_batches)

    if recipe.evaluation_batches == 0:
        return Training(engine, batches, None, image_set.source, normalisation=normalisation)
    held_out, test = partial(scored, "train", first_held_out), partial(scored, "test", 0)
    return Training(engine, batches, held_out, image_set.source, test=test, normalisation=normalisation)


def _llama(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
    data = rank_zero_first(lambda: fine_tuning_data(context, recipe.model, recipe.sequence_length))
    precision = choose_precision(device, recipe.precision)
    base = base_model(context, data, frozen_dtype(precision) if recipe.lora else torch.float32)
    base_sha256 = frozen_sha256(base) if recipe.lora else ""  # compute the hash before the model is sharded
    model = with_lora(base, context.seed) if recipe.lora else LlamaLM(base)
    model = parallelize(model, _plan(recipe, precision), here)
    batches = InstructionBatches(
        data.train, recipe.batch_size, context.seed, device=device.torch_device, rank=here.rank, ranks=here.size
    )
    optimizer = adamw(model, recipe.learning_rate, recipe.weight_decay)
    engine = LanguageEngine(model, optimizer, _schedule(recipe, len(batches)), precision, device, world=here)

    def validation() -> Iterable:
        whole = InstructionBatches(
            data.held_out, recipe.batch_size // here.size, shuffle=False, drop_last=False, device=device.torch_device
        )
        return _first(whole, recipe.evaluation_batches)

    held_out = None if recipe.evaluation_batches == 0 else validation
    return Training(engine, batches, held_out, data.rows.source, base_sha256)


def _sharers(recipe: Recipe) -> World:
    """Return a World with the ranks that share a batch: all ranks, or only this rank if the strategy is "single"."""
    here = world()
    return replace(here, rank=0, size=1) if recipe.strategy == "single" else here


def _plan(recipe: Recipe, precision: Precision) -> ParallelPlan:
    # BatchNorm statistics are float32, so BatchNorm needs float32 parameters. FSDP therefore gathers the parameters of a ResNet
    # in float32.
    sixteen_bit = recipe.strategy == "fsdp" and recipe.task != "images" and precision.dtype == "bf16"
    return ParallelPlan(strategy=recipe.strategy, param_dtype="bf16" if sixteen_bit else None)


def _schedule(recipe: Recipe, steps_per_epoch: int) -> WarmupCosine:
    total = recipe.plan().total_steps(steps_per_epoch)
    return WarmupCosine(recipe.learning_rate, max(1, int(recipe.warmup_share * total)), total)


def _first(batches: Iterable, count: int | None) -> Iterable:
    for index, batch in enumerate(batches):
        if index == count:
            return
        yield batch
