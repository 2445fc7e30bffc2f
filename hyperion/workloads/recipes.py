"""Trainings that run on one rank or on many: a recipe in, an engine and this rank's batches out."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from hyperion.chapter.context import Context
from hyperion.checkpoints import agreed, frozen_sha256, on_rank_0
from hyperion.data.batches.instruction_batches import InstructionBatches
from hyperion.data.batches.loaders import LanguageBatches, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.images.imageset import channel_statistics
from hyperion.models import LlamaLM, TransformerLM, named_config, resnet18
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import World, world
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    Precision,
    WarmupCosine,
    adamw,
    choose_precision,
    seed_everything,
    sgd_nesterov,
)
from hyperion.workloads import datasets
from hyperion.workloads.llama_setup import base_model, frozen_dtype, material, with_lora
from hyperion.workloads.recipe import Recipe, Training

CLASSES = 10
_HELD_OUT = 10  # of so many training images the last one is held out
T = TypeVar("T")


def set_up(context: Context, recipe: Recipe) -> Training:
    """Seed, load the data, build the model and lay it out over the ranks.

    Raises:
        HyperionError: a batch that the ranks do not divide, an unknown model, precision or strategy.
    """
    seed_everything(context.seed)
    return {"language": _language, "images": _images, "llama": _llama}[recipe.task](context, recipe)


def rank_zero_first(function: Callable[[], T]) -> T:
    """What `function` returns on every rank; rank 0 goes first, so that it alone prepares what all then find on disk.

    Raises:
        CheckpointError: on all ranks, what a rank raised: none waits for one that gave up.
    """
    here, first = world(), []
    if here.size == 1:
        return function()
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
    with torch.device(device.torch_device):  # weights are drawn where they stay
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
        return _first(windows, recipe.evaluation_batches)

    return Training(engine, batches, None if recipe.evaluation_batches == 0 else validation, corpus.source)


def _images(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
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
    model, precision = resnet18(CLASSES, recipe.width), choose_precision(device, recipe.precision)
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
        return _first(batches, recipe.evaluation_batches)

    if recipe.evaluation_batches == 0:
        return Training(engine, batches, None, image_set.source)
    held_out, test = partial(scored, "train", first_held_out), partial(scored, "test", 0)
    return Training(engine, batches, held_out, image_set.source, test=test)


def _llama(context: Context, recipe: Recipe) -> Training:
    here, device = _sharers(recipe), context.device
    chosen = {"model": recipe.model, "real_weights": False, "sequence_length": recipe.sequence_length}
    found = rank_zero_first(lambda: material(replace(context, sizes=context.sizes | chosen)))
    precision = choose_precision(device, recipe.precision)
    base = base_model(context, found, frozen_dtype(precision) if recipe.lora else torch.float32)
    base_sha256 = frozen_sha256(base) if recipe.lora else ""  # before it is sharded
    model = with_lora(base, context.seed) if recipe.lora else LlamaLM(base)
    model = parallelize(model, _plan(recipe, precision), here)
    batches = InstructionBatches(
        found.train, recipe.batch_size, context.seed, device=device.torch_device, rank=here.rank, ranks=here.size
    )
    optimizer = adamw(model, recipe.learning_rate, recipe.weight_decay)
    engine = LanguageEngine(model, optimizer, _schedule(recipe, len(batches)), precision, device, world=here)

    def validation() -> Iterable:
        whole = InstructionBatches(
            found.held_out, recipe.batch_size // here.size, shuffle=False, drop_last=False, device=device.torch_device
        )
        return _first(whole, recipe.evaluation_batches)

    held_out = None if recipe.evaluation_batches == 0 else validation
    return Training(engine, batches, held_out, found.rows.source, base_sha256)


def _sharers(recipe: Recipe) -> World:
    """The ranks that share a batch: all, or this one alone beside the others."""
    here = world()
    return replace(here, rank=0, size=1) if recipe.strategy == "single" else here


def _plan(recipe: Recipe, precision: Precision) -> ParallelPlan:
    # Batch norms keep float32 parameters beside their float32 statistics, so a ResNet is gathered in float32.
    halved = recipe.strategy == "fsdp" and recipe.task != "images" and precision.dtype == "bf16"
    return ParallelPlan(strategy=recipe.strategy, param_dtype="bf16" if halved else None)


def _schedule(recipe: Recipe, steps_per_epoch: int) -> WarmupCosine:
    total = recipe.plan().total_steps(steps_per_epoch)
    return WarmupCosine(recipe.learning_rate, max(1, int(recipe.warmup_share * total)), total)


def _first(batches: Iterable, count: int | None) -> Iterable:
    for index, batch in enumerate(batches):
        if index == count:
            return
        yield batch
