"""What can be wrong with a load before it begins."""

from __future__ import annotations

from firstlight.errors import FirstlightError


class BenchError(FirstlightError):
    """The load can't be made, or the server doesn't answer at all. The message names the option or the line."""
