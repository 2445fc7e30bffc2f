"""Options of the experiment `scaling`: the training workloads that run on several numbers of devices."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hyperion.chapter.context import Context
from hyperion.chapter.variants import RankOptions
from hyperion.models import TransformerConfig, named_config
from hyperion.training import choose_precision

# Weak scaling: the batch per device is constant. Strong scaling: the total batch is constant.
MODES = ("weak", "strong")


@dataclass(frozen=True)
class ScaledTraining:
    """One training workload that runs on several numbers of devices.

    The tokens and images are random, because their values do not affect the time.

    Args:
        name: variant of the rows.
        model: name of a configuration of a TransformerLM, or of a randomly initialised Llama with LoRA adapters, or "resnet18".
        strategy: parallelism strategy, "ddp" or "fsdp".
        batch_per_device: number of sequences or images in a step. In weak scaling, it is the number per device. In strong
            scaling, it is the total over all devices.
        sequence_length: number of tokens in a sequence, for language models.
        vocabulary: number of tokens in the vocabulary, for language models.
        width: number of channels of the first stage, for the ResNet-18.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str
    model: str
    strategy: Literal["ddp", "fsdp"]
    batch_per_device: int
    sequence_length: int = 0
    vocabulary: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        needed = ("width",) if self.item == "image" else ("sequence_length", "vocabulary")
        if missing := [name for name in needed if getattr(self, name) < 1]:
            raise ValueError(f"workload {self.name!r} with the model {self.model!r} needs {' and '.join(missing)} of at least 1")

    @property
    def item(self) -> str:
        """What the workload counts: "image" or "token"."""
        return "image" if self.model == "resnet18" else "token"

    @property
    def lora(self) -> bool:
        """True if the workload trains LoRA adapters of a Llama."""
        return "llama" in self.model

    def params(self, mode: str, ranks: int) -> dict:
        """Return the params of the rows of a scaling mode on `ranks` devices, and of their prediction."""
        step = {f"{self.item}s": self.items(mode, ranks)}
        return {"model": self.model, "strategy": self.strategy, "mode": mode, "ranks": ranks} | step

    def batch(self, mode: str, ranks: int) -> int:
        """Return the number of sequences or images in a step, summed over all ranks."""
        return self.batch_per_device * (ranks if mode == "weak" else 1)

    def items(self, mode: str, ranks: int) -> int:
        """Return the number of tokens or images in a step, summed over all ranks."""
        return self.batch(mode, ranks) * (self.sequence_length if self.item == "token" else 1)


class ScalingOptions(RankOptions):
    """Options for the `scaling` experiment.

    Args:
        counts: numbers of devices to compare.
        precision: number format of the timed steps. "auto" is bf16 if the device has matrix units for it, otherwise fp32.
        warmup_steps: number of steps before the timed steps.
        steps: number of timed steps.
        traced_steps: number of consecutive steps in a profiled window. Three windows are profiled, and the window whose duration
            is the median is used.
        learning_rate: constant learning rate.
        parity_steps: number of steps of the parity check, in float32.
        parity_batch: number of sequences or images in a batch of the parity check, summed over all ranks.
        parity_length: number of tokens in a sequence of the parity check.
        workloads: training workloads to run.
    """

    counts: tuple[int, ...]
    precision: str
    warmup_steps: int
    steps: int
    learning_rate: float
    parity_steps: int
    parity_batch: int
    parity_length: int
    workloads: tuple[ScaledTraining, ...]
    traced_steps: int = 3

    def dtype(self, context: Context) -> str:
        """Return the number format of the timed steps on this device."""
        return choose_precision(context.device, self.precision).dtype


def lm_config(training: ScaledTraining) -> TransformerConfig:
    """Return the configuration of the workload's TransformerLM."""
    return named_config(training.model, vocab_size=training.vocabulary)
