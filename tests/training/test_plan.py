import pytest

from hyperion.errors import HyperionError
from hyperion.training import Plan


def test_epochs_or_steps_say_how_long():
    assert Plan(epochs=3).total_steps(steps_per_epoch=7) == 21
    assert Plan(steps=10).total_steps(steps_per_epoch=7) == 10


@pytest.mark.parametrize("fields", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": 5, "checkpoint_every": 0}])
def test_impossible_plans_are_refused(fields):
    with pytest.raises(HyperionError):
        Plan(**fields)
