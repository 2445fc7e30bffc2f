"""Differences between two models on the same data."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hyperion.data import IGNORE_INDEX
from hyperion.workloads.quality import (
    accuracy_difference,
    change_of_quality,
    clustered_mean,
    perplexity,
    perplexity_ratio,
    windows_of_tokens,
)
from hyperion.workloads.trained_models import CLASSIFIER, LANGUAGE, Scores


def made_up_losses():
    draw = np.random.default_rng(0)
    windows = np.repeat(np.arange(40), 25)
    original = draw.exponential(3.0, 1000)
    return windows, original, original + 0.01 + 0.001 * draw.normal(size=1000)


def test_a_paired_ratio_is_far_more_precise_than_a_perplexity():
    windows, original, changed = made_up_losses()
    ratio, alone = perplexity_ratio(changed, original, windows), perplexity(original, windows)
    assert ratio.value == pytest.approx(math.exp(0.01), rel=1e-4) and ratio.ci_low > 1
    assert ratio.ci_high - ratio.ci_low < 0.01 * (alone.ci_high - alone.ci_low) / alone.value
    assert alone.n == 1000 and alone.ci_low < alone.value < alone.ci_high


def test_a_worse_variant_has_a_higher_perplexity_and_a_lower_accuracy():
    windows, original, changed = made_up_losses()
    # One token of each window is not scored.
    targets = torch.zeros(40, 26, dtype=torch.int64)
    targets[:, -1] = IGNORE_INDEX
    language = SimpleNamespace(kind=LANGUAGE, held_out=lambda device: (None, targets))
    right, half = np.full(1000, True), np.arange(1000) % 2 == 0
    metric, value = change_of_quality(language, Scores(changed, right), Scores(original, right), None)
    assert metric == "perplexity_ratio" and value == perplexity_ratio(changed, original, windows) and value.value > 1
    assert len(windows_of_tokens(language, 3)) == 3 * 25
    classifier = SimpleNamespace(kind=CLASSIFIER)
    metric, value = change_of_quality(classifier, Scores(original, half), Scores(original, right), None)
    assert metric == "accuracy_difference" and value.value == -0.5


def test_correlated_tokens_widen_the_interval():
    draw = np.random.default_rng(0)
    values = np.repeat(draw.normal(size=50), 20)  # all tokens of a window have one value
    alone = clustered_mean(values, np.arange(1000))
    together = clustered_mean(values, np.repeat(np.arange(50), 20))
    assert (together.ci_high - together.ci_low) > 4 * (alone.ci_high - alone.ci_low)


def test_the_interval_covers_the_mean_in_about_95_of_100_cases():
    draw, windows = np.random.default_rng(1), np.repeat(np.arange(20), 5)
    inside = 0
    for _ in range(400):
        found = clustered_mean(np.repeat(draw.normal(size=20), 5) + draw.normal(size=100), windows)
        inside += found.ci_low <= 0 <= found.ci_high
    assert 0.91 < inside / 400 < 0.985


def test_equal_models_have_an_interval_that_is_not_a_point():
    hits = np.arange(1000) % 3 == 0
    same = accuracy_difference(hits, hits)
    assert same.value == 0 and same.ci_low < 0 < same.ci_high and same.ci_high < 0.004
    worse = hits.copy()
    worse[np.flatnonzero(hits)[:30]] = False
    lost = accuracy_difference(worse, hits)
    assert lost.value == -0.03 and lost.ci_high < 0
    # Gains and losses cancel in the value, but not in the interval.
    mixed = worse.copy()
    mixed[np.flatnonzero(~hits)[:30]] = True
    both = accuracy_difference(mixed, hits)
    assert both.value == 0 and both.ci_high - both.ci_low > lost.ci_high - lost.ci_low


def test_the_interval_of_an_accuracy_difference_by_hand():
    original = np.arange(100) < 60
    hits = original.copy()
    hits[:1], hits[97:] = False, True  # one lost, three gained
    found = accuracy_difference(hits, original)
    half = 1.959964 * math.sqrt(5 - 2**2 / 102) / 102
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx((0.02, 2 / 102 - half, 2 / 102 + half))
