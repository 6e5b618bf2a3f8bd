"""JSON from files that nobody vouches for: bounded, without duplicate keys, NaN or surprises from deep nesting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """A file's content, of at most `max_bytes`. Raises CheckpointError, naming the file."""
    try:
        if not path.is_file():  # a pipe or a device could block for ever
            raise CheckpointError(f"{path}: no such file")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"{path}: more than {max_bytes} bytes")
    return content


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file of at most `max_bytes`. Raises CheckpointError, naming the file."""
    return parse_json_object(read_bytes(path, max_bytes), str(path))


def parse_json_object(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `content` (UTF-8). Raises CheckpointError, beginning with `where`."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, a duplicate key, an integer of thousands of digits
        raise CheckpointError(f"{where}: not valid JSON: {str(error)[:300]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:100]!r} appears twice")
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
