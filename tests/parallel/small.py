"""Small real models, batches and engines of the parallel tests."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.data.batches import LanguageBatches, evaluation_windows
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.packing import IGNORE_INDEX
from hyperion.hardware import detect_cpu
from hyperion.models import ResNet18, TransformerConfig, TransformerLM
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import World, world
from hyperion.training import ImageEngine, LanguageEngine, Precision, WarmupCosine, adamw, sgd_nesterov

CONFIG = TransformerConfig(vocab_size=50, context=16, width=32, heads=4, layers=3)
TOKENS = np.random.default_rng(0).integers(0, 50, 2000)
IMAGES = np.random.default_rng(1).integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
STEPS, IMAGE_STEPS = 20, 10
PARTS = 2
ALONE = World(rank=0, size=1, local_rank=0, backend="", device=detect_cpu())


def tiny_llama(seed: int = 0) -> nn.Module:
    """A Llama of two layers, width 32, four query and two key heads, 64 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
        )
    )


def here_or_alone(plan: ParallelPlan | None) -> World:
    """The ranks of a plan; without one a single device, even on one of several ranks."""
    return ALONE if plan is None else world()


def language_engine(plan: ParallelPlan | None, clip_norm: float = 0.5, precision: str = "fp32") -> LanguageEngine:
    """A Transformer of three layers; ranks other than 0 start from other weights."""
    here = here_or_alone(plan)
    torch.manual_seed(here.rank)
    model = TransformerLM(CONFIG)
    if plan is not None:
        model = parallelize(model, plan, here)
    return LanguageEngine(
        model, adamw(model, 1e-2), WarmupCosine(1e-2, 5, 30), Precision(precision, "test"), here.device, clip_norm, here
    )


def language_batches(plan: ParallelPlan | None) -> LanguageBatches:
    """Eight windows of 16 tokens a batch, over all ranks."""
    here = here_or_alone(plan)
    return LanguageBatches(TOKENS, 16, 8, seed=3, rank=here.rank, ranks=here.size)


def uneven(plan: ParallelPlan | None, step: int) -> tuple[Tensor, Tensor]:
    """A batch whose first half has fewer targets than the second, and in step 0 none at all."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(50, (8, 17), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    targets[:4, 2 * step :] = IGNORE_INDEX
    here = here_or_alone(plan)
    part = slice(here.rank * 8 // here.size, (here.rank + 1) * 8 // here.size)
    return inputs[part], targets[part]


def language_validation():
    """An odd number of batches, the last one smaller."""
    return evaluation_windows(TOKENS[:300], 16, 8, prefix_id=0, batch_size=6)


class ExactResNet(ResNet18):
    """Computes in float64: a ReLU on the edge would make much of a rounding difference within twenty steps."""

    def forward(self, images_BCYX: Tensor) -> Tensor:
        return super().forward(images_BCYX.double())


class PartsEngine(ImageEngine):
    """One device that normalises as ranks do: each part of the batch by its own statistics."""

    def summed_loss(self, batch):
        images, labels = batch
        outputs = torch.cat([self.model(part) for part in images.chunk(PARTS)])
        return F.cross_entropy(outputs, labels, reduction="sum")


def image_model() -> ResNet18:
    """A narrow ResNet-18 in float64."""
    return ExactResNet(num_classes=10, width=8).double()


def image_engine(plan: ParallelPlan | None) -> ImageEngine:
    """The ResNet with SGD; alone it normalises as two ranks do."""
    here = here_or_alone(plan)
    torch.manual_seed(here.rank)
    model = image_model()
    if plan is not None:
        model = parallelize(model, plan, here)
    kind, schedule = PartsEngine if plan is None else ImageEngine, WarmupCosine(0.02, 5, 30)
    return kind(model, sgd_nesterov(model, 0.1), schedule, Precision("fp32", "test"), here.device, world=here)


def image_batches(plan: ParallelPlan | None) -> ImageBatches:
    """Twelve images a batch, over all ranks."""
    here = here_or_alone(plan)
    return ImageBatches(
        IMAGES, np.arange(60) % 10, 12, ([0.5] * 3, [0.25] * 3), seed=1, augment=("crop", "flip"), rank=here.rank, ranks=here.size
    )


def image_validation() -> ImageBatches:
    """An odd number of batches of ten images, whole on every rank."""
    return ImageBatches(IMAGES[:50], np.arange(50) % 10, 10, ([0.5] * 3, [0.25] * 3), shuffle=False)
