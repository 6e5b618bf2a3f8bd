"""Give freed memory back to the system.

glibc keeps large freed blocks for later once it has seen some; while weights are loaded and packed one after another, that
would add up to far more than the largest of them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def _trim() -> Any:
    """glibc's malloc_trim, or None with another C library."""
    name = ctypes.util.find_library("c")
    return getattr(ctypes.CDLL(name), "malloc_trim", None) if name else None


def release_freed_memory() -> None:
    """Return what the C library holds but nobody uses; does nothing where that can't be asked for."""
    trim = _trim()
    if trim is not None:
        trim(0)
