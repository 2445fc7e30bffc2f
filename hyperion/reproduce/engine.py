"""Engine for papermill that passes the notebook to a function before it executes the first cell.

papermill writes the notebook to a file before and after each cell, which takes longer than many cells. The driver needs the cells
that were executed before a stop, but no file.
"""

from collections.abc import Callable
from typing import Any

from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines

NAME = "hyperion"


class Engine(NBClientEngine):
    """Executes a notebook, and calls a function with it before the first cell."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: NotebookExecutionManager, kernel_name: str, *, on_start: Callable[[Any], object], **named: Any
    ) -> Any:
        on_start(nb_man.nb)
        return super().execute_managed_notebook(nb_man, kernel_name, **named)


papermill_engines.register(NAME, Engine)
