import random

import numpy as np
import pytest
import torch

from hyperion.checkpoints import read_state, write_state
from hyperion.errors import HyperionError
from hyperion.training import rng_state, seed_everything, set_rng_state
from hyperion.training.recipe import seed_rank


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]


def test_a_seed_repeats_every_generator():
    seed_everything(11)
    first = draws()
    seed_everything(11)
    assert draws() == first
    seed_everything(12)
    assert draws() != first


def test_every_rank_and_every_start_draws_its_own_numbers():
    drawn = []
    for seed, step, rank in [(3, 0, 0), (3, 0, 1), (3, 9, 0), (4, 0, 0), (2**63, 0, 0), (3, 0, 0)]:
        seed_rank(seed, step, rank)
        drawn.append(tuple(map(str, draws())))
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == len(drawn) - 1


def test_the_state_survives_a_file(tmp_path):
    seed_everything(3)
    draws()
    np.random.randn(1)  # numpy keeps the second half of a pair of normal numbers
    write_state(tmp_path, rng_state())
    expected = draws()
    set_rng_state(read_state(tmp_path))
    assert draws() == expected


@pytest.fixture
def restore_determinism():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64, True, 0.5])
def test_a_seed_that_a_generator_does_not_take_is_refused_before_any_is_seeded(seed):
    seed_everything(3)
    expected = random.Random(3).random()
    with pytest.raises(HyperionError, match="seed is ") as refusal:
        seed_everything(seed)
    assert random.random() == expected and "SEED=0" in refusal.value.next_step


def test_deterministic_mode_is_torchs(restore_determinism):
    seed_everything(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
