"""Self-marking exercise for chapter 1.2: check that a timed model is the model that its name claims."""

from collections.abc import Callable

import pandas as pd
import torch
from torch import nn

from hyperion.chapter.exercises import Question, mutation_score
from hyperion.models import reference_model
from hyperion.models.reference import VisionTransformer

TFLOPS_OF_PUBLISHED_STEP = Question(105.15e9 * 32 / 5.44e-3 / 1e12, "FLOPs of 32 samples over 0.00544 s, in units of 1e12 FLOP/s")
EFFICIENCY_OF_BATCH_2 = Question(100 * 99.0 / 621.9, "the samples per second of batch 2, divided by those of the best batch")


def judge_model_check(my_check: Callable[[nn.Module], bool]) -> pd.DataFrame:
    """Test a check that decides whether a module is ViT-B/16.

    Args:
        my_check: function that takes a module and returns True only if the module is ViT-B/16. The module maps images of shape
            [B, 3, 224, 224] to logits of shape [B, 1000]. It is on torch's meta device, where tensors have shapes but no memory.
    """
    with torch.device("meta"):
        sound = reference_model("vit_b_16").build()
        mutants = {
            "three layers under the name of a ViT": stand_in(),
            "eleven blocks instead of twelve": VisionTransformer(layers=11).build(),
            "another well-known model": reference_model("resnet50").build(),
        }
    return mutation_score(my_check, sound, mutants)


def stand_in() -> nn.Module:
    """Return a small model with 212,328 parameters.

    A published benchmark timed this model as "Vision Transformer" when it could not import a real one.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 1000),
    )
