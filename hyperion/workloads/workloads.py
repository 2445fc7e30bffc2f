"""The two baselines made ready to be compared: a model, its optimizer, and a few batches that are the same in every process."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context
from hyperion.data import channel_statistics
from hyperion.data.batches.loaders import LanguageBatches
from hyperion.data.images.device_images import ImageBatches
from hyperion.hardware import Device
from hyperion.models import (
    ModelFlops,
    TransformerConfig,
    TransformerLM,
    flops_per_image,
    flops_per_token,
    named_config,
    parameter_count,
    resnet18,
)
from hyperion.models.resnet import IMAGE_SIZE
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
from hyperion.workloads import datasets
from hyperion.workloads.training_rows import ADAMW_BYTES_A_PARAMETER, SGD_BYTES_A_PARAMETER

KINDS = ("language", "image")
CLASSES = 10
SIXTEEN_BIT = ("bf16", "fp16")
_FLOAT32 = 4
# A logit is written in 16 or 32 bits, read for the softmax, and its gradient is written and read twice.
_LOGIT_BYTES = 20
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """One baseline at the sizes of a profile.

    Attributes:
        kind: "language" or "image".
        name: of the model, for rows.
        item: what is counted, "token" or "image".
        items: of one batch.
        flops: of one item, by the field's convention.
        least_flops: forward and backward of one item that nothing can avoid.
        block_flops: of them the forward pass of the repeated blocks, which checkpointing does twice.
        build: makes the module, with weights from torch's generator.
        sizes: the profile's table of this kind.
        parameters: of the module.
        moments: tensors of its size that the optimizer keeps.
        step_bytes: that a step moves beside the products, by what moves them, in float32.
    """

    kind: str
    name: str
    item: str
    items: int
    flops: ModelFlops
    least_flops: float
    block_flops: float
    build: Callable[[], nn.Module]
    sizes: dict
    parameters: int
    moments: int
    step_bytes: dict[str, float]
    config: TransformerConfig | None = None

    def activations(self, sixteen_bit: bool) -> ActivationBytes:
        """What a forward pass keeps, from shapes."""
        sizes = self.sizes
        if self.config is None:
            return image_activations(sizes["width"], sizes["batch_size"], sixteen_bit)
        return language_activations(self.config, sizes["batch_size"], sizes["sequence_length"], sixteen_bit)

    @property
    def standing_bytes(self) -> int:
        """Weights and the optimizer's moments: there before, during and after a step."""
        return _FLOAT32 * self.parameters * (1 + self.moments)

    @property
    def batch_bytes(self) -> int:
        """Of one batch: int64 inputs and targets, or float32 images and int64 labels."""
        if self.config is None:
            return self.sizes["batch_size"] * (_FLOAT32 * 3 * IMAGE_SIZE**2 + 8)
        return 2 * 8 * self.items

    def model(self, device: Device, seed: int) -> nn.Module:
        """A fresh module on the device, its weights drawn from the seed."""
        seed_everything(seed)
        with torch.device(device.torch_device):  # a GPU draws the weights of a large model much faster
            return self.build()

    @property
    def schedule(self) -> WarmupCosine:
        """Constant after a short warm-up: nothing is trained to the end here."""
        rate, warmup = self.sizes["learning_rate"], self.sizes["warmup_steps"]
        return WarmupCosine(rate, warmup, warmup + 1, final_fraction=1.0)

    def engine(
        self, dtype: str, device: Device, seed: int, lay_out: Callable[[nn.Module], nn.Module] | None = None
    ) -> TorchEngine:
        """A fresh engine; the same seed gives the same weights, whatever the precision.

        Args:
            lay_out: what is done to the module before its optimizer is built, see hyperion.parallel.parallelize.
        """
        model = self.model(device, seed)
        model = model if lay_out is None else lay_out(model)
        rate, precision = self.sizes["learning_rate"], choose_precision(device, dtype)
        if self.kind == "language":
            return LanguageEngine(model, adamw(model, rate), self.schedule, precision, device)
        return ImageEngine(model, sgd_nesterov(model, rate), self.schedule, precision, device)


def workload(kind: str, sizes: dict, vocabulary: int = 0, layers: int = 0) -> Workload:
    """A baseline by its kind.

    Args:
        sizes: for "language" model, batch_size, sequence_length, and layers where they are to be fewer than the model's;
            for "image" width, batch_size; both learning_rate and warmup_steps.
        vocabulary, layers: of the language model; 0 for those of its sizes. Another number is part of its name.
    """
    return _language(sizes, vocabulary, layers) if kind == "language" else _image(sizes)


def _language(sizes: dict, vocabulary: int, layers: int) -> Workload:
    named, length = named_config(sizes["model"]), sizes["sequence_length"]
    shape = {"vocab_size": vocabulary or named.vocab_size, "layers": layers or sizes.get("layers", named.layers)}
    config = named_config(sizes["model"], context=length, **shape)
    differing = "".join(
        f"_{mark}{value}"
        for mark, value, usual in (("v", config.vocab_size, named.vocab_size), ("cut_to_l", config.layers, named.layers))
        if value != usual
    )
    items, causal = sizes["batch_size"] * length, flops_per_token(config, length // 2)
    kept = language_activations(config, sizes["batch_size"], length, sixteen_bit=False).saved()
    moved = {
        "optimizer": ADAMW_BYTES_A_PARAMETER * config.parameter_count,
        "logits": items * config.vocab_size * _LOGIT_BYTES,
        "activations": 3 * (kept - _FLOAT32 * items * config.vocab_size),  # written, read forward, read backward
    }
    return Workload(
        kind="language",
        name=sizes["model"] + differing,
        item="token",
        items=items,
        flops=flops_per_token(config, length),
        least_flops=causal.forward_backward,
        block_flops=causal.forward - 2 * config.vocab_size * config.width,
        build=lambda: TransformerLM(config),
        sizes=sizes,
        parameters=config.parameter_count,
        moments=2,
        step_bytes=moved,
        config=config,
    )


def _image(sizes: dict) -> Workload:
    width, batch = sizes["width"], sizes["batch_size"]
    model, flops = resnet18(CLASSES, width), flops_per_image(CLASSES, width)
    parameters, stem = parameter_count(model), 2 * 9 * 3 * width * IMAGE_SIZE**2
    kept = image_activations(width, batch, sixteen_bit=False).saved()
    return Workload(
        kind="image",
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
        step_bytes={"optimizer": SGD_BYTES_A_PARAMETER * parameters, "activations": 6 * kept},
    )


def foretold(context: Context, kind: str) -> Workload | None:
    """The workload that `prepare` will make, None while this run has not counted the vocabulary."""
    if kind != "language":
        return workload(kind, context.sizes[kind])
    counted = datasets.vocabulary_row(context)
    return None if counted is None else workload(kind, context.sizes[kind], int(counted.value))


@dataclass(frozen=True)
class Ready:
    """A workload's batches in a file.

    Attributes:
        file: inputs and targets of all batches, and the vocabulary.
        source: the data source they were taken from.
        vocabulary: tokens that the model must tell apart, 0 for images.
    """

    kind: str
    file: Path
    source: str
    vocabulary: int

    def for_worker(self) -> dict:
        """What another process needs to load them: JSON-able."""
        return {"kind": self.kind, "file": str(self.file), "source": self.source}


def source_of(ready: Iterable[Ready]) -> str:
    """The data source of several: "synthetic" where one of them is, so that the banner is not missed."""
    sources = [found.source for found in ready]
    return "synthetic" if "synthetic" in sources else sources[0]


@contextmanager
def prepared(context: Context) -> Iterator[dict[str, Ready]]:
    """Both kinds, their batches in files that go when the context ends."""
    ready = {kind: prepare(context, kind) for kind in KINDS}
    try:
        yield ready
    finally:
        for found in ready.values():
            found.file.unlink()


def prepare(context: Context, kind: str) -> Ready:
    """Take the first `batches` batches of the training split and put them into a file, for every process alike."""
    sizes = context.sizes[kind]
    if kind == "language":
        corpus, tokenizer, prepared = datasets.text(context)
        loader = LanguageBatches(prepared.tokens["train"], sizes["sequence_length"], sizes["batch_size"], context.seed)
        vocabulary, source = tokenizer.vocab_size, corpus.source
    else:
        image_set, prepared = datasets.images(context)
        images, labels = (prepared.arrays[f"train_{name}"] for name in ("images", "labels"))
        loader = ImageBatches(images, labels, sizes["batch_size"], channel_statistics(images), seed=context.seed)
        vocabulary, source = 0, image_set.source
    batches = [loader.next_batch() for _ in range(context.sizes["batches"])]
    inputs, targets = (np.stack([batch[side].numpy() for batch in batches]) for side in (0, 1))
    context.workspace.mkdir(parents=True, exist_ok=True)
    file = context.workspace / f"{kind}.npz"
    np.savez(file, inputs=inputs, targets=targets, vocabulary=vocabulary)
    return Ready(kind, file, source, vocabulary)


def load(kind: str, sizes: dict, file: Path, device: Device) -> tuple[Workload, list[Batch]]:
    """The workload, and the batches of the file on the device."""
    with np.load(file) as stored:
        pairs = zip(stored["inputs"], stored["targets"], strict=True)
        batches = [tuple(torch.from_numpy(part).to(device.torch_device) for part in pair) for pair in pairs]
        return workload(kind, sizes, int(stored["vocabulary"])), batches


def random_batch(work: Workload, device: Device, seed: int) -> Batch:
    """A batch drawn from a seed, where values do not matter and shapes do."""
    generator = torch.Generator().manual_seed(seed)
    if work.config is not None:
        shape = (work.sizes["batch_size"], work.sizes["sequence_length"])
        parts = [torch.randint(work.config.vocab_size, shape, generator=generator) for _ in range(2)]
    else:
        count = work.sizes["batch_size"]
        images = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        parts = [images, torch.randint(CLASSES, (count,), generator=generator)]
    return tuple(part.to(device.torch_device) for part in parts)
