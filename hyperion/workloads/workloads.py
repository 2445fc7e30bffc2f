"""Build the training steps of the two baseline models: a Transformer language model and a ResNet-18.

This module builds the models with their optimizers and estimates the memory of a step. It also stores batches in files, so that
several processes can use the same batches.
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
from hyperion.data.images.imageset import CLASS_COUNT
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
SIXTEEN_BIT = ("bf16", "fp16")
# Number of steps to run before the memory of a step is measured, because the first step allocates the state of the optimizer and
# the workspaces of libraries such as cuBLAS.
WARM_UP_STEPS = 2
NO_VOCABULARY = "no estimate: this run has not counted the vocabulary (01_dataset_preparation)"
# Bytes that a step moves per logit. The logit is written in 16 or 32 bits and read for the softmax. Its gradient is written once
# and read twice.
LOGIT_BYTES = 20
BASIS = "the estimator: this very step on tensors that have shapes and no memory"
# Bytes that an update reads and writes per parameter, all in float32. AdamW reads the weight, the gradient and two moments, and
# writes the weight and the two moments. SGD has only one moment.
ADAMW_BYTES_A_PARAMETER = 7 * 4
SGD_BYTES_A_PARAMETER = 5 * 4
_FLOAT32 = 4
Batch = tuple[Tensor, Tensor]


class StepSizes(BaseModel, extra="forbid", frozen=True, strict=True):
    """Dimensions of a training step shared by both kinds of model.

    Args:
        batch_size: number of sequences or images in a batch.
        learning_rate: learning rate after the warm-up. It does not affect the time or memory of a step.
        warmup_steps: number of linear warm-up steps. It does not affect the time or memory of a step.
    """

    batch_size: int
    learning_rate: float = 1e-4
    warmup_steps: int = 2


class LanguageSizes(StepSizes, frozen=True):
    """Dimensions of a language-model training step.

    Args:
        model: name of a Transformer configuration.
        sequence_length: number of tokens in a sequence.
        vocabulary: number of tokens in the vocabulary. 0 uses the configuration's number.
        layers: number of blocks. 0 uses the configuration's number.
    """

    model: str
    sequence_length: int
    vocabulary: int = 0
    layers: int = 0


class ImageSizes(StepSizes, frozen=True):
    """Dimensions of a ResNet-18 training step.

    Args:
        width: number of channels of the first stage.
    """

    width: int


@dataclass(frozen=True)
class Workload:
    """Training step of one baseline model with given dimensions. Use `workload` to create a Workload.

    Attributes:
        name: name of the model in the rows. If the vocabulary or the number of blocks differs from the configuration, the name
            contains it.
        item: unit of the throughput, "token" or "image".
        items: number of tokens or images in one batch.
        flops: FLOPs per token or image as conventionally counted for MFU: matrix products and convolutions in the forward and
            backward pass, with attention over the whole sequence and without recomputation.
        least_flops: FLOPs per token or image of the forward and backward pass that every implementation must compute.
        block_flops: FLOPs of the forward pass of the repeated blocks, which are a part of `least_flops`. If all blocks are
            checkpointed, this part is computed twice.
        build: function that returns a new module. Its weights come from torch's default random generator.
        sizes: dimensions of the training step.
        parameters: number of parameters.
        moments: number of moments that the optimizer stores per parameter.
        step_bytes: a dict that maps each cause, such as the optimizer, to the bytes that a float32 step reads and writes outside
            matrix products.
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
        """Bytes of the weights and the optimizer moments, which are in memory throughout training."""
        return _FLOAT32 * self.parameters * (1 + self.moments)

    def traffic(self, dtype: str) -> dict[str, float]:
        """Return `step_bytes` for a step in this number format. In a 16-bit format, activations have half as many bytes."""
        half = 0.5 if dtype in SIXTEEN_BIT else 1.0
        return {cause: moved * (half if cause == "activations" else 1) for cause, moved in self.step_bytes.items()}

    def model(self, device: Device, seed: int) -> nn.Module:
        """Return a new module on the device, with weights drawn from this seed."""
        seed_everything(seed)
        with torch.device(device.torch_device):  # drawing the weights of a large model is much faster on a GPU
            return self.build()

    @property
    def blocks(self) -> int:
        """Number of blocks of the model, see `layout_of`."""
        with torch.device("meta"):  # on the meta device, no weights are drawn
            return len(layout_of(self.build()).blocks)

    @property
    def schedule(self) -> WarmupCosine:
        """Learning-rate schedule: a short warm-up, then a constant rate without decay, because no run trains to the end."""
        warmup = self.sizes.warmup_steps
        return WarmupCosine(self.sizes.learning_rate, warmup, warmup + 1, final_fraction=1.0)

    def engine(self, dtype: str, device: Device, seed: int, wrap: Callable[[nn.Module], nn.Module] | None = None) -> TorchEngine:
        """Return a new engine. The same seed gives the same weights in every precision.

        Args:
            dtype: precision of the training, see `choose_precision`.
            device: device of the engine.
            seed: seed of the weights.
            wrap: function applied to the module before the optimizer is built, e.g. `hyperion.parallel.parallelize`.
        """
        model = self.model(device, seed)
        model = model if wrap is None else wrap(model)
        rate, precision = self.sizes.learning_rate, choose_precision(device, dtype)
        if self.kind == "language":
            return LanguageEngine(model, adamw(model, rate), self.schedule, precision, device)
        return ImageEngine(model, sgd_nesterov(model, rate), self.schedule, precision, device)


def workload(sizes: LanguageSizes | ImageSizes) -> Workload:
    """Return the baseline with these dimensions."""
    return _image(sizes) if isinstance(sizes, ImageSizes) else _language(sizes)


def _language(sizes: LanguageSizes) -> Workload:
    named, length = named_config(sizes.model), sizes.sequence_length
    vocabulary, layers = sizes.vocabulary or named.vocab_size, sizes.layers or named.layers
    config = named_config(sizes.model, context=length, vocab_size=vocabulary, layers=layers)
    name = sizes.model
    name += f"_v{vocabulary}" if vocabulary != named.vocab_size else ""
    name += f"_cut_to_l{layers}" if layers != named.layers else ""
    # Because of the causal mask, half of the attention products need not be computed.
    items, causal = sizes.batch_size * length, flops_per_token(config, length // 2)
    kept_bytes = language_activations(config, sizes.batch_size, length, sixteen_bit=False).saved()
    return Workload(
        name=name,
        item="token",
        items=items,
        flops=flops_per_token(config, length),
        least_flops=causal.forward_backward,
        # The head has 2 * V * D FLOPs per token in the forward pass. It is not a block.
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
    model, flops = resnet18(CLASS_COUNT, width), flops_per_image(CLASS_COUNT, width)
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
        block_flops=flops.forward - stem - 2 * 8 * width * CLASS_COUNT,
        build=lambda: resnet18(CLASS_COUNT, width),
        sizes=sizes,
        parameters=parameters,
        moments=1,
        step_bytes={"optimizer": SGD_BYTES_A_PARAMETER * parameters, "activations": 6 * kept_bytes},
    )


def expected_workload(context: Context, sizes: LanguageSizes | ImageSizes) -> Workload | None:
    """Return the workload for a forecast, with the vocabulary size that this run has counted in its text.

    Return None if the vocabulary size is needed and this run has not counted it.
    """
    if isinstance(sizes, ImageSizes):
        return workload(sizes)
    counted = datasets.vocabulary_row(context)
    return None if counted is None else workload(_with_vocabulary(sizes, int(not_none(counted.value))))


def applied(plan: ParallelPlan, device: Device) -> Callable[[nn.Module], nn.Module]:
    """Return a function that applies the parallel plan to a model on the given device and returns the resulting model."""
    return lambda model: parallelize(model, plan, replace(world(), device=device))


def build_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device, seed: int = 0) -> tuple[TorchEngine, Batch]:
    """Return (engine, random batch) on the device. The parallel plan is applied to the engine's model."""
    return work.engine(dtype, device, seed, applied(plan, device)), random_batch(work, device, seed)


def estimate_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    """Return the estimated memory of a training step after warm-up.

    The estimate for an accelerator includes the memory that libraries need on this device. Estimates are cached, because an
    experiment needs the same ones several times.
    """
    return _estimate(work.sizes, dtype, plan, device)


@functools.lru_cache(maxsize=256)
def _estimate(sizes: LanguageSizes | ImageSizes, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    work = workload(sizes)
    return estimate_memory(lambda where: build_step(work, dtype, plan, where), device, ask=device.kind != "cpu")


def plan_within_budget(work: Workload, dtype: str, device: Device, share: float) -> ParallelPlan:
    """Return the parallel plan that saves the requested amount of memory and checkpoints as few blocks as possible.

    Args:
        work: workload to plan.
        dtype: precision of the training.
        device: device of the training.
        share: reduction of the peak memory, as a share of the reduction that checkpointing all blocks gives.
    """
    blocks = work.blocks
    ends = {0: ParallelPlan(), blocks: ParallelPlan(checkpointing=EVERY_BLOCK)}

    def peak(checkpointed: int) -> int:
        plan = ends.get(checkpointed) or ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=checkpointed)
        return estimate_step(work, dtype, plan, device).peak_bytes

    # share = 0 keeps the peak of a step without checkpointing; share = 1 requires all blocks to be checkpointed.
    budget = peak(0) - share * (peak(0) - peak(blocks))
    return ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=fewest_checkpointed(peak, blocks, int(budget)))


@dataclass(frozen=True)
class StoredBatches:
    """Batches stored in a file, so that several processes can load them.

    Attributes:
        kind: kind of model that the batches are for, one of KINDS.
        file: path of the file with the inputs and targets of all batches, and the vocabulary size.
        source: data source of the batches.
        vocabulary: size of the tokenizer's vocabulary. 0 for images.
    """

    kind: str
    file: Path
    source: str
    vocabulary: int

    @property
    def params(self) -> dict[str, str]:
        """JSON-compatible values that another process needs to load the batches."""
        return {"kind": self.kind, "file": str(self.file), "source": self.source}


def common_source(stored: Iterable[StoredBatches]) -> str:
    """Return the data source to state for several stored batches together.

    If any of the batches is synthetic, the result is "synthetic". Pages with these results then show the warning about synthetic
    data.
    """
    sources = [batches.source for batches in stored]
    return "synthetic" if "synthetic" in sources else sources[0]


@contextmanager
def stored_batches(
    context: Context, sizes: Mapping[str, LanguageSizes | ImageSizes], count: int
) -> Iterator[list[StoredBatches]]:
    """Context manager that stores `count` batches for each kind of model in files, and deletes these files on exit.

    Args:
        context: context of the experiment.
        sizes: a dict that maps each kind of model to the dimensions of its training step.
        count: number of batches for each kind of model.

    Yields:
        The stored batches of each kind of model, in the order of `sizes`.
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
    """Load a file of stored batches. Return (workload, batches). The workload has the vocabulary size of the file.

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
    """Return a random batch on the device, for measurements that depend only on the batch's shapes."""
    # Draw the batch with a generator on the host, so that it is the same on every device.
    generator, count = torch.Generator().manual_seed(seed), work.sizes.batch_size
    if isinstance(work.sizes, LanguageSizes):
        shape, vocabulary = (count, work.sizes.sequence_length), not_none(work.config).vocab_size
        inputs, targets = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
    else:
        inputs = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        targets = torch.randint(CLASS_COUNT, (count,), generator=generator)
    return inputs.to(device.torch_device), targets.to(device.torch_device)


def _with_vocabulary(sizes: LanguageSizes, vocabulary: int) -> LanguageSizes:
    return sizes.model_copy(update={"vocabulary": vocabulary})
