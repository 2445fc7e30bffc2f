"""A tiny work for the tests of engines: 4 steps of 4 rows with 16 scored tokens."""

import numpy as np
import pytest
import torch

from hyperion.engines.work import Work, write_work_folder
from hyperion.models.llama import build_random_llama

STEPS, ROWS, LENGTH, VOCABULARY = 4, 4, 16, 64


@pytest.fixture(scope="session")
def tiny_work(tmp_path_factory) -> Work:
    folder = tmp_path_factory.mktemp("work")
    torch.manual_seed(0)
    model = build_random_llama("random_llama_d64_l2", VOCABULARY)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS * ROWS, LENGTH + 1))
    write_work_folder(folder, model, tokens)
    return Work(str(folder), STEPS, ROWS, LENGTH, micro_batches=2)
