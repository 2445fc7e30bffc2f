"""A small real run that several tests (and the child processes they kill) train."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hyperion.data.batches import LanguageBatches, evaluation_windows
from hyperion.hardware import Device, detect_cpu
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import LanguageEngine, TrainingPlan, WarmupCosine, adamw, choose_precision, seed_everything, train

STEPS = 24
TOKENS = np.random.default_rng(5).integers(0, 19, 680) % np.arange(1, 681).clip(max=19)


class DropoutLM(TransformerLM):
    """With dropout, so that the losses depend on torch's generator."""

    def __init__(self, config: TransformerConfig):
        super().__init__(replace(config, dropout=0.2))


def small_engine(
    seed: int = 0, learning_rate: float = 3e-3, device: Device | None = None, kind: type = DropoutLM, **changes
) -> LanguageEngine:
    """A Transformer of two layers with AdamW and warm-up + cosine, on the CPU in float32 when no device is given."""
    torch.set_num_threads(1)
    seed_everything(seed)
    device = device or detect_cpu()
    model = kind(TransformerConfig(vocab_size=19, context=8, width=16, heads=2, layers=2)).to(device.torch_device)
    precision = choose_precision(device)
    schedule = WarmupCosine(learning_rate, 4, STEPS)
    return LanguageEngine(model, adamw(model, learning_rate), schedule, precision, device, **changes)


def small_batches(device: str = "cpu", resident: bool = True) -> LanguageBatches:
    """Seven batches an epoch."""
    return LanguageBatches(TOKENS, sequence_length=8, batch_size=10, seed=3, device=device, resident=resident)


def small_validation():
    return evaluation_windows(TOKENS[:100], context=8, stride=4, prefix_id=0, batch_size=4)


class Slow(LanguageBatches):
    """Gives a killer time to strike, and says where the run is."""

    def next_batch(self):
        print("batch", self.epoch, self.position, flush=True)
        time.sleep(0.02)
        return super().next_batch()


def main(folder: str) -> None:
    """Train in `folder`, slowly."""
    batches = Slow(TOKENS, sequence_length=8, batch_size=10, seed=3)
    plan = TrainingPlan(steps=STEPS, checkpoint_every=3)
    train(small_engine(), batches, plan, validation=small_validation, folder=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
