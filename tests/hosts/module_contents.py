"""What a host's modules and classes hold, by identity: compared before and after our plugin, it says what we changed."""

from __future__ import annotations

import sys
from typing import Any


def holders(package: str) -> dict[str, Any]:
    """The loaded modules of a package and the classes that they define, by name."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and module is not None:
            found[name] = module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}.{value.__qualname__}"] = value
    return found


def contents(value: Any) -> str | None:
    """What a container holds, by identity, or None for anything else."""
    if isinstance(value, dict):
        return str(sorted((repr(key), id(item)) for key, item in value.items()))
    if isinstance(value, list | set):
        return str(sorted(id(item) for item in value))
    return None
