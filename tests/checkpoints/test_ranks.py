"""Alone, one rank's work is plain work; tests/training/test_loop_on_ranks.py lets two ranks agree."""

import pytest

from hyperion.checkpoints import agreed, gathered, on_rank_0, rank_and_size


@pytest.mark.parametrize("together", [agreed, on_rank_0])
def test_alone_work_is_done_and_its_errors_are_its_own(together):
    assert together(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        together(lambda: 1 // 0)


def test_alone_there_is_one_rank():
    assert rank_and_size() == (0, 1)
    assert gathered("mine") == ["mine"]
