"""The exercises of the chapter on kernels: what is given fails, a right answer passes, half an answer does not."""

import torch

from hyperion.experiments.kernels.exercises import SCORES_GIB, judge_mask, judge_product, judge_softmax
from tests.exercise_scores import solved


def test_a_softmax_must_subtract_the_maximum():
    def given(x):
        powers = torch.exp(x)
        return powers / powers.sum(1, keepdim=True)

    def mean_subtracted(x):
        return given(x - x.mean(1, keepdim=True))

    def one_maximum(x):
        powers = torch.exp(x - x.max())
        return powers / powers.sum(1, keepdim=True)

    assert list(judge_softmax(given)["right"]) == [True, False, False, False, True, False]
    assert list(judge_softmax(mean_subtracted)["right"]) == [True, True, True, False, False, True]
    assert list(judge_softmax(one_maximum)["right"]) == [True, True, True, True, True, False]
    assert solved(judge_softmax(lambda x: given(x - x.amax(1, keepdim=True))))


def block(masks):
    """A kernel of a product, with the masks of loads and stores that are named."""

    def compute(a, b, c, m, n, k, row, column, size):
        rows, columns = row + torch.arange(size)[:, None], column + torch.arange(size)[None, :]
        inner = torch.arange(k)
        x = a.load(rows * k + inner[None, :], rows < m if "a" in masks else None)
        y = b.load(inner[:, None] * n + columns, columns < n if "b" in masks else None)
        c.store(rows * n + columns, x @ y, (rows < m) & (columns < n) if "c" in masks else None)

    return compute


def test_a_product_needs_its_edge_masks():
    assert list(judge_product(block(""))["right"]) == [True, False, False, False]
    assert not solved(judge_product(block("ab")))
    assert "overwritten" in " ".join(judge_product(block("ab"))["seen"])
    assert list(judge_product(block("c"))["right"]) == [True, False, False, False]
    assert "read outside" in " ".join(judge_product(block("c"))["seen"])
    assert solved(judge_product(block("abc")))


def test_attention_must_not_see_the_next_position():
    given = judge_mask(lambda query, key: key <= query + 1)
    assert list(given["right"]) == [True, False, False, True]
    assert not judge_mask(lambda query, key: key < query)["right"].any()
    assert solved(judge_mask(lambda query, key: key <= query))


def test_the_size_of_the_scores():
    assert SCORES_GIB.expected == 8 and SCORES_GIB.judge(8) == "right"
