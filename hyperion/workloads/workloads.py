"""The training steps of the two baselines: models with their optimizers, estimates of the memory, and batches stored in files.

Batches are stored in files so that several processes can use the same batches.
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
# All values are float32. AdamW reads the weight, the gradient and two moments, and writes the weight and the moments. SGD has
# only one moment.
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
        vocabulary: number of tokens in the vocabulary. 0 takes the number of the configuration.
        layers: number of blocks. 0 takes the number of the configuration.
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
    """One baseline with its sizes. Use `workload` to make it.

    Attributes:
        name: name of the model, for rows. It contains the vocabulary or the number of blocks if they differ from the
            configuration.
        item: unit of the throughput, "token" or "image".
        items: number of tokens or images in one batch.
        flops: FLOPs of one item as they are usually counted for MFU: matrix products and convolutions in forward and backward,
            with attention over the whole sequence and without recomputation.
        least_flops: FLOPs of the forward and backward pass of one item that no implementation can avoid.
        block_flops: the part of `least_flops` in the forward pass of the repeated blocks. Activation checkpointing computes this
            part twice.
        build: function that returns a new module, with weights from torch's random generator.
        sizes: sizes of the training step.
        parameters: number of parameters.
        moments: number of values in the optimizer's state for each parameter.
        step_bytes: bytes that a step in float32 moves outside of matrix products, by cause.
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
        """One of KINDS."""
        return "image" if self.config is None else "language"

    def activations(self, sixteen_bit: bool) -> ActivationBytes:
        """Return the bytes of the activations that a forward pass keeps for the backward pass, computed from shapes."""
        if isinstance(self.sizes, ImageSizes):
            return image_activations(self.sizes.width, self.sizes.batch_size, sixteen_bit)
        return language_activations(not_none(self.config), self.sizes.batch_size, self.sizes.sequence_length, sixteen_bit)

    @property
    def standing_bytes(self) -> int:
        """Number of bytes of the weights and the optimizer's moments, which exist all the time."""
        return _FLOAT32 * self.parameters * (1 + self.moments)

    @property
    def batch_bytes(self) -> int:
        """Number of bytes of one batch: int64 inputs and targets, or float32 images and int64 labels."""
        if self.config is None:
            return self.sizes.batch_size * (_FLOAT32 * 3 * IMAGE_SIZE**2 + 8)
        return 2 * 8 * self.items

    def traffic(self, dtype: str) -> dict[str, float]:
        """Return `step_bytes` for a step in this number format. In 16-bit formats, activations need half of the bytes."""
        half = 0.5 if dtype in SIXTEEN_BIT else 1.0
        return {cause: moved * (half if cause == "activations" else 1) for cause, moved in self.step_bytes.items()}

    def model(self, device: Device, seed: int) -> nn.Module:
        """Return a new module on the device, with weights drawn from the seed."""
        seed_everything(seed)
        with torch.device(device.torch_device):  # a GPU draws the weights of a large model much faster
            return self.build()

    @property
    def schedule(self) -> WarmupCosine:
        """Constant learning rate after a short warm-up. It does not decay, because no workload is trained to the end."""
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
    parameters, stem = parameter_count(model), 2 * 9 * 3 * width * IMAGE_SIZE**2
    kept_bytes = image_activations(width, batch, sixteen_bit=False).saved()
    return Workload(
        name=model.name,
        item="image",
        items=batch,
        flops=flops,
        least_flops=flops.forward_backward,
        block_flops=flops.forward - stem - 2 * 8 * width * CLASSES,
        build=lambda: resnet18(CLASSES, width),
        sizes=sizes,
        parameters=parameters,
        moments=1,
        step_bytes={"optimizer": SGD_BYTES_A_PARAMETER * parameters, "activations": 6 * kept_bytes},
    )


def expected_workload(context: Context, sizes: LanguageSizes | ImageSizes) -> Workload | None:
    """Return the workload with the vocabulary of the run's text, or None if the run has not counted the vocabulary."""
    if isinstance(sizes, ImageSizes):
        return workload(sizes)
    counted = datasets.vocabulary_row(context)
    return None if counted is None else workload(_with_vocabulary(sizes, int(not_none(counted.value))))


def applied(plan: ParallelPlan, device: Device) -> Callable[[nn.Module], nn.Module]:
    """Return a function that applies the plan to a model on the given device."""
    return lambda model: parallelize(model, plan, replace(world(), device=device))


def build_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device, seed: int = 0) -> tuple[TorchEngine, Batch]:
    """Return an engine with the parallel plan applied, and a random batch. Both are on the device."""
    return work.engine(dtype, device, seed, applied(plan, device)), random_batch(work, device, seed)


def estimate_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    """Return the estimated memory of a training step after warm-up.

    On an accelerator, the device is asked how much memory its libraries need. Estimates are cached, because the
    policies of a chapter need the same estimates many times.
    """
    return _estimate(work.sizes, dtype, plan, device)


@functools.lru_cache(maxsize=256)
def _estimate(sizes: LanguageSizes | ImageSizes, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    work = workload(sizes)
    return estimate_memory(lambda where: build_step(work, dtype, plan, where), device, ask=device.kind != "cpu")


def plan_within_budget(work: Workload, dtype: str, device: Device, share: float) -> ParallelPlan:
    """Return the plan that checkpoints as few blocks as possible and still saves the requested amount of memory.

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

    budget = peak(0) - share * (peak(0) - peak(blocks))
    return ParallelPlan(checkpointing=BUDGET, checkpointed_blocks=fewest_checkpointed(peak, blocks, int(budget)))


@dataclass(frozen=True)
class StoredBatches:
    """Batches that are stored in a file, so that several processes can load them.

    Attributes:
        kind: kind of model that the batches are for, one of KINDS.
        file: file with the inputs and targets of all batches, and the size of the vocabulary.
        source: data source of the batches.
        vocabulary: size of the tokenizer's vocabulary. 0 for images.
    """

    kind: str
    file: Path
    source: str
    vocabulary: int

    @property
    def params(self) -> dict[str, str]:
        """The facts that another process needs to load the batches, JSON-serializable."""
        return {"kind": self.kind, "file": str(self.file), "source": self.source}


def common_source(stored: Iterable[StoredBatches]) -> str:
    """Return one data source for several stored batches.

    If some of the batches are synthetic, the result is "synthetic", so that the page shows the banner for synthetic data.
    """
    sources = [batches.source for batches in stored]
    return "synthetic" if "synthetic" in sources else sources[0]


@contextmanager
def stored_batches(
    context: Context, sizes: Mapping[str, LanguageSizes | ImageSizes], count: int
) -> Iterator[list[StoredBatches]]:
    """Context manager that stores `count` batches of each kind in files. The files are deleted at the end.

    Args:
        context: context of the experiment.
        sizes: sizes of the training step, by kind of model.
        count: number of batches of each kind.

    Yields:
        The stored batches of each kind, in the order of `sizes`.
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
    """Load a file of stored batches. Return the workload with the vocabulary of the file, and the batches on the device."""
    with np.load(file) as stored:
        pairs = zip(stored["inputs"], stored["targets"], strict=True)
        batches = [
            (torch.from_numpy(inputs).to(device.torch_device), torch.from_numpy(targets).to(device.torch_device))
            for inputs, targets in pairs
        ]
        vocabulary = int(stored["vocabulary"])
    return workload(_with_vocabulary(sizes, vocabulary) if isinstance(sizes, LanguageSizes) else sizes), batches


def random_batch(work: Workload, device: Device, seed: int) -> Batch:
    """Return a random batch for measurements that depend only on shapes."""
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
