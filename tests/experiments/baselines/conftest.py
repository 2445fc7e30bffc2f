"""The figures of the baselines are drawn from the made-up runs of the book's tests."""

from tests.book.conftest import cpu_material, cpu_run, material, run

__all__ = ["cpu_material", "cpu_run", "material", "run"]
