"""Variables are set in the block, and afterwards as before, also after an error."""

import os

import pytest

from hyperion.environ import variables_set


def test_variables_are_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("HYPERION_TEST_A", "1")
    monkeypatch.delenv("HYPERION_TEST_B", raising=False)
    with pytest.raises(ValueError), variables_set({"HYPERION_TEST_A": "2", "HYPERION_TEST_B": "3"}):
        assert (os.environ["HYPERION_TEST_A"], os.environ["HYPERION_TEST_B"]) == ("2", "3")
        raise ValueError
    assert os.environ["HYPERION_TEST_A"] == "1" and "HYPERION_TEST_B" not in os.environ
