"""The made-up runs of tests/book, for the tests of tables and formats."""

from tests.book.conftest import cpu_material, cpu_run, material, run

__all__ = ["cpu_material", "cpu_run", "material", "run"]
