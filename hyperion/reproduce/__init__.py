"""Execute the book's notebooks, store their results, and run again only what failed or changed."""

import sys
from types import ModuleType
from typing import cast

from hyperion.reproduce.driver import Request, reproduce
from hyperion.reproduce.notebooks import Notebook, read_book, select

# Keeps nbformat's schema checker from building a grammar of internationalized addresses, which no notebook needs: it takes a
# second of every call. None makes the import of that module fail.
sys.modules.setdefault("rfc3987_syntax", cast(ModuleType, None))

__all__ = ["Notebook", "Request", "read_book", "reproduce", "select"]
