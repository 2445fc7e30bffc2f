"""Reproduce: execute the book's notebooks, keep what they made, and do again only what failed or changed."""

import sys

from hyperion.reproduce.driver import Request, reproduce
from hyperion.reproduce.notebooks import Notebook, read_book, select

# nbformat's schema checker would build a grammar for a kind of address that no notebook holds: a second of every call.
sys.modules.setdefault("rfc3987_syntax", None)

__all__ = ["Notebook", "Request", "read_book", "reproduce", "select"]
