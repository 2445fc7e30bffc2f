"""Planted faults of models and rows. They need packages above `hyperion.measure`, which has the others."""

import torch
from torch import nn

from hyperion.chapter.rows import sample_frame
from hyperion.experiments.steps.exercises import stand_in
from hyperion.hardware import Device
from hyperion.measure import time_function
from hyperion.measure.faults.planted_faults import FAULTS, Believe, Fault
from hyperion.models.reference import VisionTransformer


class _StandIn(VisionTransformer):
    """Under the name of ViT-B/16 what a published benchmark timed when it could not import one: 212,328 parameters."""

    name = "vit_b_16"

    def _make(self) -> nn.Module:
        return stand_in()


def _substituted_model(device: Device, broken: bool, believe: Believe) -> None:
    believe("the step time of 212,328 parameters as that of ViT-B/16, which has 86,567,656")
    with torch.device("meta"):
        (_StandIn if broken else VisionTransformer)().build()


def _hot_labelled_cold(device: Device, broken: bool, believe: Believe) -> None:
    source = torch.randn(1 << 16, device=device.torch_device)
    target = torch.empty_like(source)
    timing = time_function(lambda: target.copy_(source), device, cold=False, minimum_samples=10, time_limit_s=0.05)
    believe(f"{timing.estimate.map(lambda seconds: 2 * source.nbytes / seconds / 1e9).value:.3g} GB/s, called cold")
    sample_frame(timing, "copy", "fp32", {"elements": source.numel(), "cache": "cold" if broken else "hot"})


ALL_FAULTS: tuple[Fault, ...] = (
    *FAULTS,
    Fault("samples of a warm cache labelled cold", "checks.require_cache_label", "labelled cold", _hot_labelled_cold),
    Fault("a substituted model", "ReferenceModel.build", "the built model has 212,328", _substituted_model),
)
