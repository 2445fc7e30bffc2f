"""Execute the notebooks of the book, and store their results. Later calls run only the notebooks that failed or changed."""

from hyperion.reproduce.driver import Request, reproduce
from hyperion.reproduce.notebooks import Notebook, read_book, select

__all__ = ["Notebook", "Request", "read_book", "reproduce", "select"]
