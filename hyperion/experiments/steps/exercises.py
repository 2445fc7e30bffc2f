"""Exercise of chapter 1.2 that marks itself: is the model that was timed the one it is called?"""

from collections.abc import Callable

import pandas as pd
import torch
from torch import nn

from hyperion.chapter.exercises import mutation_score
from hyperion.models import reference_model
from hyperion.models.reference import VisionTransformer


def judge_model_check(my_check: Callable[[nn.Module], bool]) -> pd.DataFrame:
    """Judge a check that says whether a module is ViT-B/16.

    Args:
        my_check: takes a module on torch's meta device (shapes without memory; it maps images [B, 3, 224, 224] on "meta"
            to logits [B, 1000]) and returns True for ViT-B/16 only.
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
    """Return the 212,328 parameters that a published benchmark timed as "Vision Transformer" when it could not import one."""
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
