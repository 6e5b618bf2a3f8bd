"""Which timings a model is bound by: those of the options, or those that come with the package for this hardware."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from firstlight.errors import FirstlightError
from firstlight.hardware import Hardware
from firstlight.hardware.calibration import CalibrationError, Table, packaged_table, read_table, table_name
from firstlight.hardware.timings import Timings

logger = logging.getLogger(__name__)
AUTO, NONE = "auto", "none"
_WARNED: set[str] = set()


def timings_of(option: str, hardware: Hardware) -> Timings | None:
    """The timings of `--table`: a file, "auto" or "none". None: there are none for this hardware, so ranks decide.

    Times of other versions of the software are used all the same, and one warning says so: which provider is faster changes
    more slowly than by how much. Raises FirstlightError for a table that can't be read, or that is of other hardware.
    """
    if option == NONE:
        return None
    try:
        table = packaged_table(hardware) if option == AUTO else read_table(Path(option))
    except CalibrationError as error:
        raise FirstlightError(f"--table {error}") from None
    if table is None:
        return None
    here = table_name(hardware)
    if table.gpu != here:
        raise FirstlightError(
            f"--table {option}: measured on {table.gpu}, and this is {here}; "
            "make one with firstlight calibrate, or say --table none"
        )
    if (others := other_versions(table)) and table.path not in _WARNED:
        _WARNED.add(table.path)
        logger.warning("%s was measured with %s; firstlight calibrate makes it anew", table.path, others)
    return _timings(table.path, Path(table.path).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _timings(path: str, changed: int) -> Timings:
    return Timings(read_table(Path(path)))


def other_versions(table: Table) -> str:
    """Software of the table that is here in another version, for people; "" if there is none.

    What isn't installed here can't differ: a model can be bound for a GPU that is elsewhere. Nor does a build's own mark
    count ("+cu130"), which a package's metadata may lack.
    """
    found = []
    for name, measured in table.versions.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if public(here) != public(measured):
            found.append(f"{name} {measured} (here: {here})")
    return ", ".join(found)


def public(version: str) -> str:
    """A version without the mark of its build."""
    return version.partition("+")[0]
