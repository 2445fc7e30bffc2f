"""The two baselines as training steps: a model with its optimizer, estimates of a step's memory, and stored batches.

Stored batches are the same in every process.
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
# Bytes that a step moves per logit: written in 16 or 32 bits, read for the softmax, its gradient written and read twice.
LOGIT_BYTES = 20
BASIS = "the estimator: this very step on tensors that have shapes and no memory"
# In float32. AdamW reads weight, gradient and two moments, and writes all but the gradient; SGD has one moment.
ADAMW_BYTES_A_PARAMETER = 7 * 4
SGD_BYTES_A_PARAMETER = 5 * 4
_FLOAT32 = 4
Batch = tuple[Tensor, Tensor]


class StepSizes(BaseModel, extra="forbid", frozen=True, strict=True):
    """Sizes of a training step that both kinds of model have.

    Args:
        batch_size: sequences or images of a batch.
        learning_rate: after the warm-up.
        warmup_steps: steps of linear warm-up. Neither this nor the rate changes the time or the memory of a step.
    """

    batch_size: int
    learning_rate: float = 1e-4
    warmup_steps: int = 2


class LanguageSizes(StepSizes, frozen=True):
    """Sizes of a training step of a language model.

    Args:
        model: name of a Transformer configuration.
        sequence_length: tokens of a sequence.
        vocabulary: tokens of the vocabulary, 0 for the configuration's.
        layers: number of blocks, 0 for the configuration's.
    """

    model: str
    sequence_length: int
    vocabulary: int = 0
    layers: int = 0


class ImageSizes(StepSizes, frozen=True):
    """Sizes of a training step of a ResNet-18.

    Args:
        width: channels of the first stage.
    """

    width: int


@dataclass(frozen=True)
class Workload:
    """One baseline with its sizes; `workload` makes it.

    Attributes:
        name: name of the model, for rows. A vocabulary or depth other than the configuration's is part of it.
        item: unit of throughput, "token" or "image".
        items: tokens or images of one batch.
        flops: FLOPs of one item by the field's convention.
        least_flops: FLOPs of forward and backward of one item that no implementation can avoid.
        block_flops: those of `least_flops` in the forward pass of the repeated blocks, which checkpointing computes twice.
        build: makes the module, with weights from torch's generator.
        parameters: number of parameters.
        moments: number of tensors of the size of the parameters in the optimizer's state.
        step_bytes: bytes that a step moves outside of matrix products, in float32, by cause.
        config: configuration of the Transformer, None for a ResNet-18.
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
        """Return the bytes that a forward pass keeps for the backward pass, computed from shapes."""
        if isinstance(self.sizes, ImageSizes):
            return image_activations(self.sizes.width, self.sizes.batch_size, sixteen_bit)
        return language_activations(not_none(self.config), self.sizes.batch_size, self.sizes.sequence_length, sixteen_bit)

    @property
    def standing_bytes(self) -> int:
        """Bytes of weights and optimizer moments, which exist before, during and after a step."""
        return _FLOAT32 * self.parameters * (1 + self.moments)

    @property
    def batch_bytes(self) -> int:
        """Bytes of one batch: int64 inputs and targets, or float32 images and int64 labels."""
        if self.config is None:
            return self.sizes.batch_size * (_FLOAT32 * 3 * IMAGE_SIZE**2 + 8)
        return 2 * 8 * self.items

    def traffic(self, dtype: str) -> dict[str, float]:
        """Return `step_bytes` for a step in this number format: 16-bit formats halve the activations."""
        half = 0.5 if dtype in SIXTEEN_BIT else 1.0
        return {cause: moved * (half if cause == "activations" else 1) for cause, moved in self.step_bytes.items()}

    def model(self, device: Device, seed: int) -> nn.Module:
        """Return a fresh module on the device with weights drawn from the seed."""
        seed_everything(seed)
        with torch.device(device.torch_device):  # a GPU draws the weights of a large model much faster
            return self.build()

    @property
    def schedule(self) -> WarmupCosine:
        """Constant learning rate after a short warm-up: no workload is trained to the end."""
        warmup = self.sizes.warmup_steps
        return WarmupCosine(self.sizes.learning_rate, warmup, warmup + 1, final_fraction=1.0)

    def engine(self, dtype: str, device: Device, seed: int, wrap: Callable[[nn.Module], nn.Module] | None = None) -> TorchEngine:
        """Return a fresh engine; the same seed gives the same weights in every precision.

        Args:
            wrap: applied to the module before its optimizer is built, e.g. `hyperion.parallel.parallelize`.
        """
        model = self.model(device, seed)
        model = model if wrap is None else wrap(model)
        rate, precision = self.sizes.learning_rate, choose_precision(device, dtype)
        if self.kind == "language":
            return LanguageEngine(model, adamw(model, rate), self.schedule, precision, device)
        return ImageEngine(model, sgd_nesterov(model, rate), self.schedule, precision, device)


def workload(sizes: LanguageSizes | ImageSizes) -> Workload:
    """Return the baseline of these sizes."""
    return _image(sizes) if isinstance(sizes, ImageSizes) else _language(sizes)


def _language(sizes: LanguageSizes) -> Workload:
    named, length = named_config(sizes.model), sizes.sequence_length
    vocabulary, layers = sizes.vocabulary or named.vocab_size, sizes.layers or named.layers
    config = named_config(sizes.model, context=length, vocab_size=vocabulary, layers=layers)
    name = sizes.model
    name += f"_v{vocabulary}" if vocabulary != named.vocab_size else ""
    name += f"_cut_to_l{layers}" if layers != named.layers else ""
    # The causal mask leaves half of attention, which is all that must be computed.
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
    """Return the workload with the vocabulary of the run's text; None if this run has not counted the vocabulary."""
    if isinstance(sizes, ImageSizes):
        return workload(sizes)
    counted = datasets.vocabulary_row(context)
    return None if counted is None else workload(_with_vocabulary(sizes, int(not_none(counted.value))))


def applied(plan: ParallelPlan, device: Device) -> Callable[[nn.Module], nn.Module]:
    """Return a function that applies the plan to a model on this device alone."""
    return lambda model: parallelize(model, plan, replace(world(), device=device))


def build_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device, seed: int = 0) -> tuple[TorchEngine, Batch]:
    """Return an engine under the plan and a random batch, on the device."""
    return work.engine(dtype, device, seed, applied(plan, device)), random_batch(work, device, seed)


def estimate_step(work: Workload, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    """Return the estimate of a steady step's memory.

    If the device is an accelerator, it is asked what its libraries need. Estimates are cached: the policies of a chapter ask
    for the same ones again and again.
    """
    return _estimate(work.sizes, dtype, plan, device)


@functools.lru_cache(maxsize=256)
def _estimate(sizes: LanguageSizes | ImageSizes, dtype: str, plan: ParallelPlan, device: Device) -> MemoryEstimate:
    work = workload(sizes)
    return estimate_memory(lambda where: build_step(work, dtype, plan, where), device, ask=device.kind != "cpu")


def plan_within_budget(work: Workload, dtype: str, device: Device, share: float) -> ParallelPlan:
    """Return the plan that checkpoints the fewest blocks which still lower the peak as far as asked.

    Args:
        share: how far, as a share of what checkpointing every block saves.
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
    """Batches of one kind of model in a file, for every process to load.

    Attributes:
        file: inputs and targets of all batches, and the vocabulary.
        source: data source that they were taken from.
        vocabulary: size of the tokenizer's vocabulary, 0 for images.
    """

    kind: str
    file: Path
    source: str
    vocabulary: int

    @property
    def params(self) -> dict[str, str]:
        """What another process needs to load them, JSON-able."""
        return {"kind": self.kind, "file": str(self.file), "source": self.source}


def common_source(stored: Iterable[StoredBatches]) -> str:
    """Return the data source of several: "synthetic" if one of them is, so that the page carries the banner."""
    sources = [batches.source for batches in stored]
    return "synthetic" if "synthetic" in sources else sources[0]


@contextmanager
def stored_batches(
    context: Context, sizes: Mapping[str, LanguageSizes | ImageSizes], count: int
) -> Iterator[list[StoredBatches]]:
    """Context with `count` batches of each kind in files, which are deleted at its end.

    Args:
        sizes: sizes of the step by kind.
    """
    stored = [store_batches(context, kind_sizes, count) for kind_sizes in sizes.values()]
    try:
        yield stored
    finally:
        for batches in stored:
            batches.file.unlink()


def store_batches(context: Context, sizes: LanguageSizes | ImageSizes, count: int) -> StoredBatches:
    """Write the first `count` batches of the training split to a file in the workspace."""
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
    """Return the workload with the vocabulary of a stored file, and the file's batches on the device."""
    with np.load(file) as stored:
        pairs = zip(stored["inputs"], stored["targets"], strict=True)
        batches = [
            (torch.from_numpy(inputs).to(device.torch_device), torch.from_numpy(targets).to(device.torch_device))
            for inputs, targets in pairs
        ]
        vocabulary = int(stored["vocabulary"])
    return workload(_with_vocabulary(sizes, vocabulary) if isinstance(sizes, LanguageSizes) else sizes), batches


def random_batch(work: Workload, device: Device, seed: int) -> Batch:
    """Return a batch drawn from a seed, for measurements that depend on shapes alone."""
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
