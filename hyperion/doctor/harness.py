"""Self-test of the measurements: make known measurement mistakes on purpose, and show which check detects each of them.

Such a mistake is called a planted fault. The same measurement without the mistake is called the clean twin, and must pass the
check. Most planted faults are defined in `hyperion.measure.planted_faults`. The faults in this file need a model or the function
`sample_frame`, whose packages must not be imported by `hyperion.measure`.
"""

from collections.abc import Sequence

import torch
from rich.table import Table
from torch import nn

from hyperion.chapter.rows import sample_frame
from hyperion.experiments.steps.exercises import stand_in
from hyperion.hardware import Device, detect
from hyperion.measure import time_function
from hyperion.measure.planted_faults import FAULTS, Believe, FaultResult, PlantedFault, run_self_test
from hyperion.models.reference import VisionTransformer


def self_test() -> list[FaultResult]:
    """Plant every fault on the device of this machine, and return the results. On a CPU, this takes about 15 s."""
    return run_self_test(detect(), ALL_FAULTS)


def self_test_table(results: Sequence[FaultResult]) -> Table:
    """Return a table with one line per fault.

    A line is red if the fault was not detected, or if a check rejected the clean twin (the same measurement without the fault).
    """
    table = Table(
        "planted fault", "wrong result without the check", "caught", "check and its message", "clean twin", pad_edge=False
    )
    for r in results:
        caught, twin = ("yes" if r.caught else "[red]NO[/]", "passes" if r.twin_passes else f"[red]{_plain(r.twin_message)}[/]")
        table.add_row(r.name, _plain(r.believed), caught, f"{r.check}: {_plain(r.message)}", twin)
    return table


def self_test_conclusion(results: Sequence[FaultResult]) -> str:
    """Return one line of text with the number of detected faults and the number of clean twins that passed."""
    wrong = [r.name for r in results if not r.passed]
    caught, passing = sum(r.caught for r in results), sum(r.twin_passes for r in results)
    text = f"{caught} of {len(results)} planted faults caught, {passing} of {len(results)} clean twins pass"
    text += f", in {sum(r.seconds for r in results):.0f} s"
    return text + (f"; not distinguished: {', '.join(wrong)}" if wrong else "")


def _plain(text: str) -> str:
    """Return the text escaped for rich and shortened to 160 characters."""
    return (text if len(text) <= 160 else f"{text[:159]}…").replace("[", "\\[")


class _StandIn(VisionTransformer):
    """A model with 212,328 parameters and the name of ViT-B/16.

    A published benchmark timed such a small model by mistake, because the import of the real model had failed.
    """

    @property
    def name(self) -> str:
        return "vit_b_16"

    def _make(self) -> nn.Module:
        return stand_in()


def _substituted_model(device: Device, broken: bool, believe: Believe) -> None:
    believe("the step time of a model of 212,328 parameters, reported as that of ViT-B/16, which has 86,567,656")
    with torch.device("meta"):
        # `build` compares the number of parameters with the published one. It needs only shapes, so nothing is allocated.
        (_StandIn if broken else VisionTransformer)().build()


def _hot_labelled_cold(device: Device, broken: bool, believe: Believe) -> None:
    source = torch.randn(1 << 16, device=device.torch_device)
    target = torch.empty_like(source)
    timing = time_function(lambda: target.copy_(source), device, cold=False, minimum_samples=10, time_limit_s=0.05)
    believe(
        f"{timing.estimate.map(lambda seconds: 2 * source.nbytes / seconds / 1e9).value:.3g} GB/s of a warm cache, labelled cold"
    )
    # `sample_frame` compares the label with the state of the caches during the timing.
    sample_frame(timing, "copy", "fp32", {"elements": source.numel(), "cache": "cold" if broken else "hot"})


ALL_FAULTS: tuple[PlantedFault, ...] = (
    *FAULTS,
    PlantedFault("samples of a warm cache labelled cold", "require_cache_label", "labelled cold", _hot_labelled_cold),
    PlantedFault("a substituted model", "ReferenceModel.build", "the built model has 212,328", _substituted_model),
)
