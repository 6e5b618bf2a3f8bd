"""The files of `firstlight generate`: requests in, answers out, a JSON object a line.

An answer belongs to its line by `id`, or by the line's number if it has none. Answers are appended whole, one write
each, so that a run that was stopped, however, leaves whole lines and at most one torn one at the end, which the next
run cuts off. The last line of a request counts. A refused one is tried again by the next run, which may then add another.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from firstlight.errors import FirstlightError

Key = tuple[str, str | int]
"""("id", the id) or ("index", the line's number)."""
TOO_DEEP = "too many lists and objects within each other; no request needs so many"
DEEPER_CALLS = 300
"""A request is written under more callers than it is read under, which leave that much less of Python's limit on
recursion for its own lists and objects."""


@dataclass(frozen=True)
class InputLine:
    """A request. index: its line, from 0. error: why it is none; then `fields` means nothing."""

    index: int
    id: str | int | None
    fields: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> Key:
        """What its answer is found by."""
        return ("index", self.index) if self.id is None else ("id", self.id)


class FileError(FirstlightError):
    """The input or output can't be used. The message names the file and the line."""


def read_lines(path: Path) -> list[InputLine]:
    """The requests of a file; blank lines are skipped but counted. Raises FileError if two have the same id."""
    lines: list[InputLine] = []
    seen: dict[Key, int] = {}
    try:
        with path.open("rb") as file:
            for index, text in enumerate(file):
                if not text.strip():
                    continue
                line = _input_line(index, text)
                if (other := seen.setdefault(line.key, index)) != index:
                    raise FileError(f"{path}: lines {other + 1} and {index + 1} have the same id {line.id!r}")
                lines.append(line)
    except OSError as error:
        raise FileError(f"can't read {path}: {error.strerror}") from None
    return lines


def _input_line(index: int, text: bytes) -> InputLine:
    try:
        fields = json.loads(text)
    except ValueError as error:
        return InputLine(index, None, error=f"not valid JSON: {error}")
    except RecursionError:
        return InputLine(index, None, error=TOO_DEEP)
    if not isinstance(fields, dict):
        return InputLine(index, None, error="a line must be a JSON object")
    id = fields.pop("id", None)
    if fault := _unsendable(id):
        return InputLine(index, None, error=fault)
    if id is not None and (isinstance(id, bool) or not isinstance(id, (str, int))):
        return InputLine(index, None, error=f"`id` must be a string or an integer; it is {id!r}")
    if fault := _unsendable(fields):
        return InputLine(index, id, error=fault)
    kinds = [name for name in ("prompt", "messages", "prompt_token_ids") if name in fields]
    if len(kinds) != 1:
        return InputLine(index, id, error="a line must have one of `prompt`, `messages`, `prompt_token_ids`")
    if fields.get("stream"):
        return InputLine(index, id, error="`stream` has no meaning here")
    if "prompt_token_ids" in fields:
        fields["prompt"] = fields.pop("prompt_token_ids")
        if not isinstance(fields["prompt"], list) or not all(type(token) is int for token in fields["prompt"]):
            return InputLine(index, id, error="`prompt_token_ids` must be a list of token ids")
    elif "prompt" in fields and not isinstance(fields["prompt"], str):
        return InputLine(index, id, error="`prompt` must be a string; token ids go into `prompt_token_ids`")
    return InputLine(index, id, fields)


def _unsendable(value: Any) -> str:
    """Why a parsed value can't be written as JSON in UTF-8, to a server or a file; empty if it can."""
    for _ in range(DEEPER_CALLS):
        value = [value]
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return (
            f"the line has half of a surrogate pair, \\u{ord(error.object[error.start]):04x}, which is no character: "
            "write both halves, or the character itself"
        )
    except RecursionError:
        return TOO_DEEP
    return ""


class OutputFile:
    """Answers, appended. A context manager; only one process at a time may have the file.

    done: the keys of the answers that were there; refused lines, which have `error`, are not among them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[Key] = set()
        self._descriptor = -1

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise FileError(f"can't write {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise FileError(f"{self.path} is being written by another run") from None
        try:
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, line: InputLine, answer: dict[str, Any]) -> None:
        """Append the answer to a line. Raises FileError when the disk is full."""
        key = {"index": line.index} if line.id is None else {"index": line.index, "id": line.id}
        data = json.dumps({**key, **answer}, ensure_ascii=False).encode() + b"\n"
        try:
            whole = os.write(self._descriptor, data) == len(data)
        except OSError as error:
            raise FileError(f"can't write {self.path}: {error.strerror}") from None
        if not whole:
            raise FileError(f"{self.path}: a line was cut short; is the disk full?")

    def _read(self) -> None:
        """Learn what is there, and cut off a torn last line."""
        whole_bytes = 0
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    os.ftruncate(self._descriptor, whole_bytes)
                    break
                whole_bytes += len(text)
                try:
                    answer = json.loads(text)
                    key: Key = ("id", answer["id"]) if "id" in answer else ("index", answer["index"])
                    if "error" in answer:
                        self.done.discard(key)
                    else:
                        self.done.add(key)
                except (ValueError, KeyError, TypeError):
                    raise FileError(
                        f"{self.path}, line {number} was not written by `generate`; choose another file"
                    ) from None
