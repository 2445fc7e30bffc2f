"""Differences between two models on the same data, with confidence intervals.

Two models are compared on the same tokens or images, and the difference is computed for each of them. The confidence interval of
the mean difference is much smaller than the intervals of the two means.
"""

import math

import numpy as np

from hyperion.data import IGNORE_INDEX
from hyperion.hardware import detect_cpu
from hyperion.results import Estimate
from hyperion.workloads.trained_models import CLASSIFIER, Scores, TrainedModel

_NORMAL = 1.959964  # half the width of a normal distribution's 95 % interval, in standard deviations


def change_of_quality(trained: TrainedModel, scores: Scores, original: Scores, records: int | None) -> tuple[str, Estimate]:
    """Return the metric and the value of a variant's quality relative to the original model on the same data.

    Args:
        trained: the original model.
        scores, original: scores of the variant and of the original model.
        records: number of windows or images that were scored. None means all.
    """
    if trained.kind == CLASSIFIER:
        return "accuracy_difference", accuracy_difference(scores.correct, original.correct)
    return "perplexity_ratio", perplexity_ratio(scores.losses, original.losses, windows_of_tokens(trained, records))


def windows_of_tokens(trained: TrainedModel, records: int | None) -> np.ndarray:
    """Return the window number of each token of a language model's held-out data that is scored, int [n].

    Args:
        trained: the language model.
        records: number of windows that were scored. None means all.
    """
    targets = trained.held_out(detect_cpu())[1][:records]
    return np.nonzero((targets != IGNORE_INDEX).numpy())[0]


def clustered_mean(values: np.ndarray, clusters: np.ndarray) -> Estimate:
    """Return the mean of the values, with a 95 % confidence interval that allows for correlation within a cluster.

    Args:
        values: float [n].
        clusters: cluster number of each value, int [n]. There must be at least two clusters.

    Source: Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference, J. Human Resources 50 (2015) 317-372.
    """
    from scipy import stats  # slow to import

    mean = float(np.mean(values))
    sums = np.bincount(clusters, weights=values - mean)
    count = len(sums)
    error = math.sqrt(count / (count - 1) * float(np.sum(sums**2))) / len(values)
    half = float(stats.t.ppf(0.975, count - 1)) * error
    return Estimate(mean, mean - half, mean + half, len(values))


def perplexity(losses: np.ndarray, windows: np.ndarray) -> Estimate:
    """Return the perplexity per token, exp of the mean loss. The tokens of a window form a cluster."""
    return clustered_mean(losses, windows).map(math.exp)


def perplexity_ratio(losses: np.ndarray, original: np.ndarray, windows: np.ndarray) -> Estimate:
    """Return the perplexity relative to the original model: exp of the mean difference of the losses on the same tokens."""
    return clustered_mean(losses - original, windows).map(math.exp)


def accuracy_difference(hits: np.ndarray, original: np.ndarray) -> Estimate:
    """Return the accuracy of a variant minus that of the original model on the same images, with a 95 % interval.

    The interval follows Agresti and Min (2005, Statistics in Medicine 24, 729-740). Each image is in one of four classes, because
    each of the two models is right or wrong. Half an image is added to each class. As a result, the interval does not shrink to a
    point if both models classify every image alike.

    Args:
        hits, original: whether each image is classified correctly, bool [n], by the variant and by the original model.
    """
    n = len(hits)
    gained, lost = int((hits & ~original).sum()), int((~hits & original).sum())
    value = (gained - lost) / n
    b, c, m = gained + 0.5, lost + 0.5, n + 2
    centre, half = (b - c) / m, _NORMAL * math.sqrt(b + c - (b - c) ** 2 / m) / m
    return Estimate(value, min(value, centre - half), max(value, centre + half), n)
