"""Execute the notebooks of the book, and store their results. Later calls run only the notebooks that failed or changed."""

import sys
from types import ModuleType
from typing import cast

from hyperion.reproduce.driver import Request, reproduce
from hyperion.reproduce.notebooks import Notebook, read_book, select

# None makes the import of this module fail, so that nbformat's schema checker does not build a grammar of internationalized
# addresses, which would take one second in every call and which no notebook needs.
sys.modules.setdefault("rfc3987_syntax", cast(ModuleType, None))

__all__ = ["Notebook", "Request", "read_book", "reproduce", "select"]
