"""The training steps of the two baselines, which are a Transformer language model and a ResNet-18.

This module builds the models with their optimizers, estimates the memory of a step, and stores batches in files. Batches are
stored in files so that several processes can use the same batches.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from hyperion.chapter.context import Context
from hyperion.data import channel_statistics
from hyperion.data.batches import LanguageBatches
from hyperion.data.images.device_images import ImageBatches
from hyperion.errors import not_none
from hyperion.hardware import Device
from hyperion.models import (
    ModelFlops,
    TransformerConfig,
    TransformerLM,
    flops_per_image,
    flops_per_token,
    layout_of,
    named_config,
    parameter_count,
    resnet18,
)
from hyperion.models.resnet import IMAGE_SIZE
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.parallel.parallelize import BUDGET, EVERY_BLOCK
from hyperion.processes import world
from hyperion.training import (
    ActivationBytes,
    ImageEngine,
    LanguageEngine,
    TorchEngine,
    WarmupCosine,
    adamw,
    choose_precision,
    image_activations,
    language_activations,
    seed_everything,
    sgd_nesterov,
)
from hyperion.training.memory_estimate import MemoryEstimate, estimate_memory, fewest_checkpointed
from hyperion.workloads import datasets

KINDS = ("language", "image")
CLASSES = 10
SIXTEEN_BIT = ("bf16", "fp16")
NO_VOCABULARY = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
# Bytes that a step moves per logit. The logit is written in 16 or 32 bits and read for the softmax. Its gradient is written once
# and read twice.
LOGIT_BYTES = 20
BASIS = "the estimator: this very step on tensors that have shapes and no memory"
# Bytes that an update reads and writes for each parameter. All values are float32. AdamW reads the weight, the gradient and two
# moments, and writes the weight and the two moments. SGD has only one moment.
ADAMW_BYTES_A_PARAMETER = 7 * 4
SGD_BYTES_A_PARAMETER = 5 * 4
_FLOAT32 = 4
Batch = tuple[Tensor, Tensor]


class StepSizes(BaseModel, extra="forbid", frozen=True, strict=True):
    """Sizes of a training step that both kinds of model have.

    Args:
        batch_size: number of sequences or images in a batch.
        learning_rate: learning rate after the warm-up. It does not change the time or the memory of a step.
        warmup_steps: number of steps of linear warm-up. It does not change the time or the memory of a step.
    """

    batch_size: int
    learning_rate: float = 1e-4
    warmup_steps: int = 2


class LanguageSizes(StepSizes, frozen=True):
    """Sizes of a training step of a language model.

    Args:
        model: name of a Transformer configuration.
        sequence_length: number of tokens in a sequence.
        vocabulary: number of tokens in the vocabulary. 0 uses the number in the configuration.
        layers: number of blocks. 0 uses the number in the configuration.
    """

    model: str
    sequence_length: int
    vocabulary: int = 0
    layers: int = 0


class ImageSizes(StepSizes, frozen=True):
    """Sizes of a training step of a ResNet-18.

    Args:
        width: number of channels of the first stage.
    """

    width: int


@dataclass(frozen=True)
class Workload:
    """One baseline with its sizes. Use `workload` to create a workload.

    Attributes:
        name: name of the model in the rows. If the vocabulary or the number of blocks differs from the configuration, the name
            contains this number.
        item: what the throughput counts, "token" or "image".
        items: number of tokens or images in one batch.
        flops: FLOPs for each token or image, as they are usually counted for MFU. They are the FLOPs of matrix products and
            convolutions in the forward and backward pass, with attention over the whole sequence and without recomputation.
        least_flops: FLOPs of the forward and backward pass for each token or image that every implementation must compute.
        block_flops: the part of `least_flops` that belongs to the forward pass of the repeated blocks. If all blocks are
            checkpointed, this part is computed twice.
        build: function that returns a new module. Its weights come from torch's default random generator.
        sizes: sizes of the training step.
        parameters: number of parameters.
        moments: number of moments that the optimizer stores for each parameter.
        step_bytes: a dict that maps a cause, such as the optimizer, to the bytes that a step in float32 reads and writes outside
            of matrix products.
        config: configuration of the Transformer. None for a ResNet-18.
    """

    name: str
    item: str
    items: int
    flops: ModelFlops
    least_flops: float
    block_flops: float
    build: Callable[[], nn.Module]
    sizes: LanguageSizes | ImageSizes
    parameters: int
    moments: int
    step_bytes: dict[str, float]
    config: TransformerConfig | None = None

    @property
    def kind(self) -> str:
        """Kind of the model, one of KINDS."""
        return "image" if self.config is None else "language"

    def activations(self, sixteen_bit: bool) -> ActivationBytes:
        """Return the bytes of the activations that a forward pass keeps for the backward pass, computed from shapes.

        Args:
            sixteen_bit: whether the step uses a 16-bit number format.
        """
        if isinstance(self.sizes, ImageSizes):
            return image_activations(self.sizes.width, self.sizes.batch_size, sixteen_bit)
        return language_activations(not_none(self.config), self.sizes.batch_size, self.sizes.sequence_length, sixteen_bit)

    @property
    def standing_bytes(self) -> int:
        """Number of bytes of the weights and the moments of the optimizer. They exist during the whole training."""
        return _FLOAT32 * self.parameters * (1 + self.moments)

    @property
    def batch_bytes(self) -> int:
        """Number of bytes of one batch: int64 inputs and targets, or float32 images and int64 labels."""
        if self.config is None:
            return self.sizes.batch_size * (_FLOAT32 * 3 * IMAGE_SIZE**2 + 8)
        return 2 * 8 * self.items

    def traffic(self, dtype: str) -> dict[str, float]:
        """Return `step_bytes` for a step with this number format. In 16-bit formats, activations have half of the bytes."""
        half = 0.5 if dtype in SIXTEEN_BIT else 1.0
        return {cause: moved * (half if cause == "activations" else 1) for cause, moved in self.step_bytes.items()}

    def model(self, device: Device, seed: int) -> nn.Module:
        """Return a new module on the device. Its weights are drawn with this seed."""
        seed_everything(seed)
        with torch.device(device.torch_device):  # on a GPU, drawing the weights of a large model is much faster
            return self.build()

    @property
    def schedule(self) -> WarmupCosine:
        """Schedule of the learning rate: a short warm-up, then a constant. No training runs to its end, so there is no decay."""
        warmup = self.sizes.warmup_steps
        return WarmupCosine(self.sizes.learning_rate, warmup, warmup + 1, final_fraction=1.0)

    def engine(self, dtype: str, device: Device, seed: int, wrap: Callable[[nn.Module], nn.Module] | None = None) -> TorchEngine:
        """Return a new engine. The same seed gives the same weights in every precision.

        Args:
            dtype: precision of the training, see `choose_precision`.
            device: device of the engine.
            seed: seed of the weights.
            wrap: function that is applied to the module before the optimizer is built, e.g. `hyperion.parallel.parallelize`.
        """
        model = self.model(device, seed)
        model = model if wrap is None else wrap(model)
        rate, precision = self.sizes.learning_rate, choose_precision(device, dtype)
        if self.kind == "language":
            return LanguageEngine(model, adamw(model, rate), self.schedule, precision, device)
        return ImageEngine(model, sgd_nesterov(model, rate), self.schedule, precision, device)


def workload(sizes: LanguageSizes | ImageSizes) -> Workload:
    """Return the baseline with these sizes."""
    return _image(sizes) if isinstance(sizes, ImageSizes) else _language(sizes)


def _language(sizes: LanguageSizes) -> Workload:
    named, length = named_config(sizes.model), sizes.sequence_length
    vocabulary, layers = sizes.vocabulary or named.vocab_size, sizes.layers or named.layers
    config = named_config(sizes.model, context=length, vocab_size=vocabulary, layers=layers)
    name = sizes.model
    name += f"_v{vocabulary}" if vocabulary != named.vocab_size else ""
    name += f"_cut_to_l{layers}" if layers != named.layers else ""
    # Only half of attention must be computed, because of the causal mask.
    items, causal = sizes.batch_size * length, flops_per_token(config, length // 2)
    kept_bytes = language_activations(config, sizes.batch_size, length, sixteen_bit=False).saved()
    return Workload(
        name=name,
        item="token",
        items=items,
        flops=flops_per_token(config, length),
        least_flops=causal.forward_backward,
        # The head has 2 * V * D FLOPs per token in the forward pass. It is no block.
        block_flops=causal.forward - 2 * vocabulary * config.width,
        build=lambda: TransformerLM(config),
        sizes=sizes,
        parameters=config.parameter_count,
        moments=2,
        step_bytes={
            "optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count,
            "logits": items * vocabulary * LOGIT_BYTES,
            "activations": 3 * (kept_bytes - _FLOAT32 * items * vocabulary),  # written, read forward, read backward
        },
        config=config,
    )


def _image(sizes: ImageSizes) -> Workload:
    width, batch = sizes.width, sizes.batch_size
    model, flops = resnet18(CLASSES, width), flops_per_image(CLASSES, width)
    # FLOPs of the stem per image: a 3x3 convolution from 3 channels to `width` at the full resolution, 2 FLOPs per
    # multiply-add.
    parameters, stem = parameter_count(model), 2 * 9 * 3 * width * IMAGE_SIZE**2
    kept_bytes = image_activations(width, batch, sixteen_bit=False).saved()
    return Workload(
        name=model.name,
        item="image",
        items=batch,
        flops=flops,
        least_flops=flops.forward_backward,
        # The classifier has 8 * width inputs, the channels of the last stage.
        block_flops=flops.forward - stem - 2 * 8 * width * CLASSES,
        build=lambda: resnet18(CLASSES, width),
        sizes=sizes,
        parameters=parameters,
        moments=1,
        step_bytes={"optimizer": SGD_BYTES_A_PARAMETER * parameters, "activations": 6 * kept_bytes},
    )


def expected_workload(context: Context, sizes: LanguageSizes | ImageSizes) -> Workload | None:
    """Return the workload with the vocabulary that this run has counted in its text.

    Return None if the vocabulary is needed and this run has not counted it.
    """
    if isinstance(sizes, ImageSizes):
        return workload(sizes)
    counted = datasets.vocabulary_row(context)
    return None if counted is None else workload(_with_vocabulary(sizes, int(not_none(counted.value))))


def applied(plan: ParallelPlan, device: Device) -> Callable[[nn.Module], nn.Module]:
    """Return a function that takes a model on the given device, applies the parallel plan to it, and returns it."""
    return lambda model: parallelize(model, plan, replace(world(), device=device))


def build_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device, seed: int = 0) -> tuple[TorchEngine, Batch]:
    """Return (engine, random batch) on the device. The parallel plan is applied to the model of the engine."""
    return work.engine(dtype, device, seed, applied(plan, device)), random_batch(work, device, seed)


def estimate_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    """Return the estimated memory of a training step after warm-up.

    The estimate for an accelerator includes the memory that libraries need on this device. Estimates are cached, because an
    experiment needs the same estimates several times.
    """
    return _estimate(work.sizes, dtype, plan, device)


@functools.lru_cache(maxsize=256)
def _estimate(sizes: LanguageSizes | ImageSizes, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    work = workload(sizes)
    return estimate_memory(lambda where: build_step(work, dtype, plan, where), device, ask=device.kind != "cpu")


def plan_within_budget(work: Workload, dtype: str, device: Device, share: float) -> ParallelPlan:
    """Return the parallel plan that checkpoints as few blocks as possible and still saves the requested amount of memory.

    Args:
        work: the workload.
        dtype: precision of the training.
        device: device of the training.
        share: memory to save at the peak, as a share of the memory that checkpointing of all blocks saves.
    """
    blocks = len(layout_of(work.build()).blocks)
    ends = {0: ParallelPlan(), blocks: ParallelPlan(checkpointing=EVERY_BLOCK)}

    def peak(checkpointed: int) -> int:
        plan = ends.get(checkpointed) or ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=checkpointed)
        return estimate_step(work, dtype, plan, device).peak_bytes

    # share = 0 keeps the peak of a step without checkpointing; share = 1 needs all blocks checkpointed.
    budget = peak(0) - share * (peak(0) - peak(blocks))
    return ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=fewest_checkpointed(peak, blocks, int(budget)))


@dataclass(frozen=True)
class StoredBatches:
    """Batches that are stored in a file, so that several processes can load them.

    Attributes:
        kind: kind of the model for which the batches are, one of KINDS.
        file: path of a file that contains the inputs and targets of all batches, and the size of the vocabulary.
        source: data source of the batches.
        vocabulary: size of the tokenizer's vocabulary. 0 for images.
    """

    kind: str
    file: Path
    source: str
    vocabulary: int

    @property
    def params(self) -> dict[str, str]:
        """Values that another process needs to load the batches. They can be converted to JSON."""
        return {"kind": self.kind, "file": str(self.file), "source": self.source}


def common_source(stored: Iterable[StoredBatches]) -> str:
    """Return one data source for several stored batches.

    If some of the batches are synthetic, the result is "synthetic". Pages with these results then show the warning about
    synthetic data.
    """
    sources = [batches.source for batches in stored]
    return "synthetic" if "synthetic" in sources else sources[0]


@contextmanager
def stored_batches(
    context: Context, sizes: Mapping[str, LanguageSizes | ImageSizes], count: int
) -> Iterator[list[StoredBatches]]:
    """Context manager that stores `count` batches for each kind of model in files. At its end it deletes the files.

    Args:
        context: context of the experiment.
        sizes: a dict that maps the kind of a model to the sizes of its training step.
        count: number of batches for each kind of model.

    Yields:
        The stored batches for each kind of model, in the order of `sizes`.
    """
    stored = [store_batches(context, kind_sizes, count) for kind_sizes in sizes.values()]
    try:
        yield stored
    finally:
        for batches in stored:
            batches.file.unlink()


def store_batches(context: Context, sizes: LanguageSizes | ImageSizes, count: int) -> StoredBatches:
    """Store the first `count` batches of the training split in a file in the workspace."""
    if isinstance(sizes, LanguageSizes):
        corpus, tokenizer, prepared = datasets.text(context)
        loader = LanguageBatches(prepared.tokens["train"], sizes.sequence_length, sizes.batch_size, context.seed)
        kind, vocabulary, source = "language", tokenizer.vocab_size, corpus.source
    else:
        image_set, prepared = datasets.images(context)
        images, labels = (prepared.arrays[f"train_{name}"] for name in ("images", "labels"))
        loader = ImageBatches(images, labels, sizes.batch_size, channel_statistics(images), seed=context.seed)
        kind, vocabulary, source = "image", 0, image_set.source
    batches = [loader.next_batch() for _ in range(count)]
    inputs, targets = (np.stack([batch[side].numpy() for batch in batches]) for side in (0, 1))
    context.workspace.mkdir(parents=True, exist_ok=True)
    file = context.workspace / f"{kind}.npz"
    np.savez(file, inputs=inputs, targets=targets, vocabulary=vocabulary)
    return StoredBatches(kind, file, source, vocabulary)


def load_batches(sizes: LanguageSizes | ImageSizes, file: Path, device: Device) -> tuple[Workload, list[Batch]]:
    """Load a file of stored batches. Return (workload, batches). The workload has the vocabulary of the file.

    The batches are on the device.
    """
    with np.load(file) as stored:
        pairs = zip(stored["inputs"], stored["targets"], strict=True)
        batches = [
            (torch.from_numpy(inputs).to(device.torch_device), torch.from_numpy(targets).to(device.torch_device))
            for inputs, targets in pairs
        ]
        vocabulary = int(stored["vocabulary"])
    return workload(_with_vocabulary(sizes, vocabulary) if isinstance(sizes, LanguageSizes) else sizes), batches


def random_batch(work: Workload, device: Device, seed: int) -> Batch:
    """Return a random batch on the device, for measurements that depend only on the shapes of the batch."""
    # A generator on the host gives the same batch on every device.
    generator, count = torch.Generator().manual_seed(seed), work.sizes.batch_size
    if isinstance(work.sizes, LanguageSizes):
        shape, vocabulary = (count, work.sizes.sequence_length), not_none(work.config).vocab_size
        inputs, targets = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
    else:
        inputs = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        targets = torch.randint(CLASSES, (count,), generator=generator)
    return inputs.to(device.torch_device), targets.to(device.torch_device)


def _with_vocabulary(sizes: LanguageSizes, vocabulary: int) -> LanguageSizes:
    return sizes.model_copy(update={"vocabulary": vocabulary})
