"""A file's bytes in memory without reading them.

The system fetches pages of a mapped file when they are looked at and can drop them again. The mapping is private and
copy-on-write: whatever is done to it, the file on disk stays as it is.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from firstlight.errors import CheckpointError


class MappedFile:
    """A file's bytes, mapped: `data` is a memory map, or b"" for an empty file; `size` is their number."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if `path` isn't a regular file that can be read."""
        self.path = path
        self.data: mmap.mmap | bytes = b""
        if not path.exists():
            raise CheckpointError(f"{path}: no such file")
        if not path.is_file():  # a pipe or a device could block for ever
            raise CheckpointError(f"{path}: not a regular file")
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size:
                    self.data = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error
