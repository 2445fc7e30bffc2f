"""The machine's numbers pass, the pack is what float64 gives, and each planted error is caught and named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyperion.commands.doctor import print_numerics
from hyperion.doctor import numerics
from hyperion.doctor.numerics import (
    CASES,
    PACK,
    NumericsReport,
    check_numerics,
    compare,
    difference,
    make_pack,
    note,
    numerics_table,
    read_pack,
    tolerances,
    uniform,
)
from hyperion.hardware import detect, detect_cpu
from tests.hardware.machines import facts

LANGUAGE, IMAGES = CASES


pytestmark = pytest.mark.usefixtures("one_thread")


def fp32(case) -> NumericsReport:
    device = detect_cpu()
    return NumericsReport(device.name, tuple(compare(case, "fp32", device, read_pack())))


@pytest.mark.slow
def test_float32_and_bf16_on_this_cpu_pass():
    report = check_numerics(detect_cpu(), ["fp32", "tf32"])
    assert report.passed and "all 6 quantities agree with float64" in report.conclusion
    absent = [finding for finding in report.findings if finding.reason]
    assert [finding.dtype for finding in absent] == ["tf32", "tf32"]
    assert all(finding.error > 0 for finding in report.findings if not finding.reason)  # compared with itself it would be 0
    assert len(numerics_table(report).rows) == 8
    assert all(0 < finding.error <= finding.tolerance for finding in compare(LANGUAGE, "bf16", detect_cpu(), read_pack()))


@pytest.mark.slow
def test_the_pack_is_what_float64_gives_here_and_small():
    kept, made = read_pack(), make_pack()
    assert kept.keys() == made.keys() and PACK.stat().st_size < 300_000
    assert max(difference(made[name], kept[name]) for name in kept) < 1e-9


def test_the_generators_numbers_are_those_of_every_platform():
    assert uniform("a name", (3,)).tolist() == [0.15357892215251923, -0.6080374121665955, 0.1580948382616043]


def changed(monkeypatch, change):
    """The language model with known weights, but for a change."""
    plain = type(LANGUAGE).model

    def model(self):
        made = plain(self)
        with torch.no_grad():
            change(made)
        return made

    monkeypatch.setattr(type(LANGUAGE), "model", model)


def one_weight(monkeypatch):
    """Of the 4096 of a matrix, one that is 2 % larger."""
    changed(monkeypatch, lambda model: model.blocks[1].mlp.up.weight[5, 7].mul_(1.02))


def no_mask(monkeypatch):
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v))


def other_gelu(monkeypatch):
    gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: gelu(x))


def other_epsilon(monkeypatch):
    """Of a LayerNorm: 1e-6 instead of 1e-5."""
    changed(monkeypatch, lambda model: setattr(model.blocks[0].mlp_norm, "eps", 1e-6))


@pytest.mark.parametrize("plant", [one_weight, no_mask, other_gelu, other_epsilon])
def test_a_planted_error_is_caught_and_named(monkeypatch, capsys, plant):
    plant(monkeypatch)
    report = fp32(LANGUAGE)
    assert not report.passed
    assert "the first wrong tensor: the logits of language in fp32" in report.conclusion
    monkeypatch.setattr("hyperion.doctor.numerics.check_numerics", lambda on_line: report)
    assert print_numerics() == 1
    assert "WRONG NUMBERS" in capsys.readouterr().out


@pytest.mark.slow
def test_a_backward_pass_that_is_wrong_in_one_layer_names_its_gradient(monkeypatch):
    shell = IMAGES.shell

    def broken():
        model = shell()
        model.blocks[3].conv2.weight.register_hook(lambda gradient: gradient * 1.001)
        return model

    report = fp32(replace(IMAGES, shell=broken))
    wrong = next(finding for finding in report.findings if not finding.passed)
    assert (wrong.quantity, wrong.first) == ("gradients", "the gradient of blocks.3.conv2.weight")


def test_a_nan_does_not_pass():
    device, pack = detect_cpu(), read_pack()
    pack["language/losses"][7] = float("nan")
    report = NumericsReport(device.name, tuple(compare(LANGUAGE, "fp32", device, pack)))
    assert not report.passed and "the loss of step 8 of language in fp32" in report.conclusion


def test_an_mi250x_may_be_further_off_in_16_bits_and_the_report_says_why():
    mi250x, h200 = (detect(facts(name)) for name in ("MI250X", "H200"))
    assert tolerances("language", "fp32", mi250x) == tolerances("language", "fp32", h200)
    for dtype in ("fp16", "bf16"):
        wider, usual = tolerances("resnet18", dtype, mi250x), tolerances("resnet18", dtype, h200)
        assert all(usual[name] < wider[name] < 1 for name in usual)
    assert "flushes subnormal" in note(mi250x) and note(h200) == ""


def test_elements_that_are_not_sampled_count_by_their_norm():
    reference = {"gradients/w": np.array([1.0, 2.0]), "norms/w": np.array([3.0])}
    assert numerics._gradient_errors({"w": (np.array([1.0, 2.0]), 3.0)}, reference) == {"the gradient of w": 0.0}
    assert numerics._gradient_errors({"w": (np.array([1.0, 2.0]), 4.5)}, reference) == {"the gradient of w": 0.5}
