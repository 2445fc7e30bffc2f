"""Fixtures of all rooms."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mirror() -> Path:
    """The folder of real data that HYPERION_DATA_MIRROR names; without one the test is skipped, in CI it fails."""
    named = os.environ.get("HYPERION_DATA_MIRROR")
    if not named:
        reason = "HYPERION_DATA_MIRROR is not set: no real WikiText-2, CIFAR-10 and GPT-2 tokenizer to test with"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return Path(named)
