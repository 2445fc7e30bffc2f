"""Reproduce: execute the book's notebooks, keep what they made, and do again only what failed or changed."""

from hyperion.reproduce.driver import Request, reproduce
from hyperion.reproduce.notebooks import Notebook, read_book, select

__all__ = ["Notebook", "Request", "read_book", "reproduce", "select"]
