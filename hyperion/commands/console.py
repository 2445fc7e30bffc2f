"""Where commands print to."""

from rich.console import Console


def console() -> Console:
    """Standard output; where it is no terminal, wide enough for its tables."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)
