"""Made-up runs that the tests of the book share, and their material."""

import pytest

from hyperion.figures.material import Material
from tests.book.made_up import GPU, made_up_run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A made-up GPU run on mirrored data. Tests that write take a copy."""
    return made_up_run(tmp_path_factory.mktemp("book") / "20260101-120000-full")


@pytest.fixture(scope="session")
def cpu_run(tmp_path_factory):
    """A made-up run of a CPU that no data sheet knows, on synthetic data."""
    environment = GPU | {"gpus": [], "cuda": None, "torch": "2.13.0+cpu"}
    folder = tmp_path_factory.mktemp("book") / "20260101-120000-smoke"
    return made_up_run(
        folder, source="synthetic", peaks={"fp64": None, "fp32": None, "bf16": None}, bandwidth=None, environment=environment
    )


@pytest.fixture(scope="session")
def material(run):
    return Material(run)


@pytest.fixture(scope="session")
def cpu_material(cpu_run):
    return Material(cpu_run)
