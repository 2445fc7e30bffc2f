"""The exercises on quantised weights: what is given fails, a right answer passes, half an answer does not."""

import pytest
import torch

from hyperion.experiments.quantization.exercises import DECODE_MS, NF4_BITS, judge_int8, judge_packing
from hyperion.experiments.quantization.quantized_linears import Nf4, unpack_int4
from tests.exercise_scores import solved
from tests.experiments.quantization.planted_bugs import quantise_without_scale, quantise_wrong_axis, unpack_wrong_nibble


def test_unpacking_needs_the_right_nibble():
    assert list(judge_packing(unpack_wrong_nibble)["right"]) == [True, False, False, False]
    assert not solved(judge_packing(lambda packed: unpack_int4(packed) + 1))
    assert solved(judge_packing(unpack_int4))


def test_int8_needs_a_scale_for_each_output():
    def right(weight):
        scales = weight.abs().amax(1).clamp_min(1e-30) / 127
        return (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales

    def truncated(weight):
        scales = weight.abs().amax(1).clamp_min(1e-30) / 127
        return (weight / scales[:, None]).to(torch.int8), scales

    def one_scale(weight):
        scales = weight.abs().max().expand(len(weight)) / 127
        return (weight / scales[:, None]).round().to(torch.int8), scales

    assert solved(judge_int8(right))
    assert not judge_int8(quantise_without_scale)["right"].iloc[:4].any()
    assert not judge_int8(quantise_wrong_axis)["right"].any()
    assert not solved(judge_int8(truncated))
    by_case = judge_int8(one_scale)
    assert not by_case["right"].iloc[1] and by_case["right"].iloc[2] == by_case["right"].iloc[0]


def test_the_numbers_of_the_questions():
    bits = 8 * Nf4(double=True).weight_bytes(4096, 4096) / 4096**2
    # The tables of a layer and the offset, 1092 bytes, are no part of the answer.
    assert NF4_BITS.expected == pytest.approx(bits - 8 * 1092 / 4096**2, rel=1e-9)
    assert DECODE_MS.expected == pytest.approx(3.146, abs=1e-3) and DECODE_MS.judge(3.15) == "right"
