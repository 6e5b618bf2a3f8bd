"""The console that wide tables are printed to."""

from __future__ import annotations

from rich.console import Console

PIPED_WIDTH = 140
"""Characters of a line where no terminal sets a limit: in a pipe or a file."""


def table_console() -> Console:
    """A console as wide as the terminal. What isn't one gets room for a whole table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(PIPED_WIDTH, console.width))
