"""The exercise of chapter 1.2: the cell as given fails it, counting parameters passes, refusing everything does not."""

import torch

from hyperion.experiments.steps.exercises import judge_model_check, stand_in
from hyperion.models import parameter_count
from tests.exercise_scores import solved


def test_thestand_in_is_the_published_one():
    assert parameter_count(stand_in()) == 212_328


def test_shapes_alone_take_every_impostor_for_a_vit():
    score = judge_model_check(lambda model: model(torch.zeros(1, 3, 224, 224, device="meta")).shape == (1, 1000))
    assert list(score["right"]) == [True, False, False, False]


def test_counting_parameters_tells_them_apart():
    assert solved(judge_model_check(lambda model: parameter_count(model) == 86_567_656))


def test_refusing_everything_does_not_pass():
    assert not solved(judge_model_check(lambda model: False))
