"""Private places for the sockets between our processes: ipc sockets in a fresh directory that only this user may enter."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

LONGEST_IPC_PATH = 100
"""A unix socket's path may have 107 bytes."""
LONGEST_NAME = len("/engine")


def private_directory(prefix: str) -> Path:
    """A new directory for this user alone (mode 0700), with a path short enough for sockets with short names."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(directory)) > LONGEST_IPC_PATH - LONGEST_NAME:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return directory


def remove_directory_of(address: str) -> None:
    """Remove the directory of an ipc socket, for a child whose parent died without doing it."""
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
