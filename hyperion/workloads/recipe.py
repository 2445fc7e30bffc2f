"""One training as commands and profiles describe it, and the same made ready on a rank."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hyperion.data.batches.loaders import ResumableBatches
from hyperion.errors import HyperionError
from hyperion.training import Plan, TorchEngine

TASKS = ("language", "images", "llama")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training as commands and profiles describe it: JSON-able, the same on every rank.

    Args:
        task: "language" (WikiText-2), "images" (CIFAR-10) or "llama" (instruction rows).
        model: a Transformer's configuration by name; for images "resnet18"; for llama a random configuration by name, or a
            folder or hub name of real weights.
        strategy: "single", "ddp" or "fsdp".
        precision: "auto", "fp32", "bf16", …: see `choose_precision`.
        batch_size: examples of one optimizer step, over all ranks together.
        steps, epochs: how long; one of the two.
        learning_rate: at the end of the warm-up, which takes `warmup_share` of all steps; a cosine to zero follows.
        sequence_length: tokens of one example (language).
        width: channels of the first stage (images).
        lora: train adapters on a frozen base instead of all parameters (llama).
        records: use only so many training examples (images); None for all that are not held out.
        evaluation_batches: held-out batches scored at the end of an epoch, and of images as many of the test split at the
            very end; None for all, 0 for none.
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
            raise HyperionError(f"no task is named {self.task!r}", where="Recipe", next_step=f"use one of {', '.join(TASKS)}")

    @property
    def name(self) -> str:
        """What is trained and how: "gpt2_124m_fsdp"."""
        name = self.model.rstrip("/").rpartition("/")[2]
        part = f"_w{self.width}" if self.task == "images" else "_lora" if self.lora else ""
        return f"{name}{part}_{self.strategy}"

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
        base_sha256: of the frozen weights that adapters are trained on, "" without adapters.
        test: makes batches of the test split, to be read once, after the last step; None for recipes that leave it alone.
    """

    engine: TorchEngine
    batches: ResumableBatches
    validation: Callable[[], Iterable] | None
    source: str
    base_sha256: str = ""
    test: Callable[[], Iterable] | None = None
