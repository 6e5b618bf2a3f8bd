"""A file that a command writes its result to: tried before the work begins, written when the result has been shown.

The work may take minutes or hours, so a path that can't be written has to be said before it, not after.
"""

from __future__ import annotations

import os
from pathlib import Path

from firstlight.errors import FirstlightError


def check_output(option: str, path: Path) -> None:
    """Raises FirstlightError if `path`, as given to `option`, can't be written. Leaves what is there, or isn't, as it was."""
    try:
        if path.is_dir():
            raise FirstlightError(
                f"{option} {path}: this is a directory; name a file in it, such as {path / 'out.json'}"
            )
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY))  # as it is: not cut to nothing
        elif path.exists():
            # A pipe or a device is only asked: opening a pipe waits for its reader, and closing it ends the reader's input.
            if not os.access(path, os.W_OK):
                raise PermissionError(None, "Permission denied")
        else:
            place = Path(os.path.realpath(path))  # where a link that leads to nothing yet would make its file
            if not place.parent.is_dir():
                raise FirstlightError(f"{option} {path}: there is no folder {place.parent}; make it, or name another")
            # Only an attempt tells: root may do what modes forbid, and file systems refuse what modes allow.
            os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            place.unlink()
    except OSError as error:
        raise _unwritable(option, path, error) from None


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write a result. Raises FirstlightError that names the option and the path."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritable(option, path, error) from None


def _unwritable(option: str, path: Path, error: OSError) -> FirstlightError:
    return FirstlightError(f"{option} {path}: it can't be written: {error.strerror or error}; name another file")
